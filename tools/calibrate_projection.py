"""Calibrate the projection of encore bench --project, and print its errors.

    python -m tools.calibrate_projection

Reads the digests of the public sets. A set is predicted from a set with the same round, submitter, accelerator
and GPUs per node on a different number of GPUs, 8 to 64; samples to the target, start and evaluations come from all
other sets. Writes encore/results/data/projection.json, and prints the errors in both directions and the agreement with
the speed of one GPU in measured.toml.
"""

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from encore import catalogue
from encore.lab.scaling import projection
from encore.lab.scaling.projection import Calibration, Convergence, Measured, Phases, Projected, Share
from encore.results.compare.forecast import weighted_quantiles
from encore.results.compare.run_set import submission
from encore.results.logs.timing import Length, in_unit
from encore.results.published.published import PublishedResult, load_published
from encore.results.published.systems import model_of
from encore.results.rules import benchmark_of, data_size, later_name
from encore.run.published_speed import measured
from tools import run

GPUS = range(8, 65)
OVERLAPS = tuple(number / 20 for number in range(21))
QUANTILES = (0.05, 0.5, 0.95)
MOST_RATIO = 2.0  # between the samples per GPU of a pair: the command measures the GPU's batch of the system
FEWEST_PAIRS = 5  # else of any ratio, and of all benchmarks
MOST_BIAS = 1.25  # of the median step: DLRM exchanges embeddings, which the model has no term for
LEVEL = 0.9  # coverage of the published minutes of submitters that are not in the calibration
WIDTHS = tuple(1 + number / 100 for number in range(200))
_LEAST_COMPUTE = 0.1  # fraction of a step
# FLOP/s of two layers in benchmarks/llama31_8b/measured.toml, over the FLOPs of a sample in flops.toml
RECORDED = {
    "llama31_8b": [
        Measured(426e12 / 421.6e12, "H200", "2 of 32 layers, bf16"),
        Measured(472e12 / 421.6e12, "H200", "2 of 32 layers, fp8=scaled_mm"),
    ]
}


@dataclass(frozen=True, kw_only=True)
class PublicSet:
    cell: PublishedResult
    benchmark: str
    target: str
    gpus: int
    nodes: int
    batch: int
    samples: float  # to the target
    phases: Mapping[str, float]

    @property
    def train_s(self) -> float:
        off_training = self.phases.get("start_s", 0.0) + self.phases.get("evaluate_s", 0.0)
        return (self.cell.score_minutes or math.nan) * 60 - off_training

    @property
    def step_s(self) -> float:
        return self.train_s / (self.samples / self.batch)

    def communication_s(self) -> float:
        links = projection.links_of(self.cell.hardware, max(1, self.gpus // self.nodes))
        return projection.communication_seconds(self.benchmark, self.gpus, self.nodes, links[0] if links else None)


Pair = tuple[PublicSet, PublicSet]  # Source and target of a prediction


class Error(NamedTuple):
    """Published over predicted values of the target."""

    source: PublicSet
    target: PublicSet
    step: float
    minutes: float


def read_set(cell: PublishedResult) -> PublicSet | None:
    benchmark, gpus, batch = later_name(cell.benchmark, cell.round), cell.hardware.accelerators, cell.global_batch
    info, run_set = benchmark_of(benchmark), submission(cell)
    if not (benchmark and info and gpus and batch and cell.score_minutes and run_set.lengths):
        return None
    length = Length(run_set.lengths.estimate, run_set.length_unit)
    value = in_unit(length, info.points_in, run_set.train_samples, batch)
    size, full_data = data_size(benchmark), catalogue.benchmarks()[benchmark.replace("_", "-")].full_data
    epoch = (size.train if size else None) or full_data.train_samples
    samples = value if info.points_in == "samples" else value and epoch and value * epoch
    if not samples:
        return None
    return PublicSet(
        cell=cell,
        benchmark=benchmark,
        target=projection.target_of(cell.round, benchmark),
        gpus=gpus,
        nodes=cell.hardware.nodes or 1,
        batch=batch,
        samples=samples,
        phases=run_set.phases,
    )


def convergence(sets: Iterable[PublicSet]) -> list[Convergence]:
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for public in sets:
        groups[public.target, public.batch].append(public.samples)
    return [Convergence(*key, median(values), len(values)) for key, values in sorted(groups.items())]


def phases_by_gpus(sets: Iterable[PublicSet]) -> list[Phases]:
    groups: dict[tuple[str, int], list[tuple[float, ...]]] = defaultdict(list)
    for public in sets:
        if evaluate := public.phases.get("evaluate_s"):
            count = evaluate / (public.phases.get("evaluation_s") or evaluate)
            row = (public.phases.get("start_s", 0.0), evaluate / public.train_s, count)
            groups[public.target, public.gpus].append(row)
    return [Phases(*key, *(round(median(column), 4) for column in zip(*rows))) for key, rows in sorted(groups.items())]  # noqa: B905


def pairs_of(sets: Sequence[PublicSet]) -> list[Pair]:
    groups: dict[tuple[object, ...], list[PublicSet]] = defaultdict(list)
    for public in sets:
        cell, hardware = public.cell, public.cell.hardware
        if public.gpus in GPUS and projection.links_of(hardware, 1):
            node = (hardware.accelerator, hardware.accelerators_per_node)
            groups[cell.round, cell.submitter, node].append(public)
    pairs = [pair for group in groups.values() for pair in itertools.permutations(group, 2)]
    return [pair for pair in pairs if pair[0].gpus != pair[1].gpus]


def work_ratio(pair: Pair) -> float:
    source, target = pair
    return target.batch / target.gpus / (source.batch / source.gpus)


def step_ratio(pair: Pair, overlap: float) -> float:
    """Return the published over the predicted step time."""
    source, target = pair
    exposed = (1 - overlap) * source.communication_s()
    compute = max(_LEAST_COMPUTE * source.step_s, source.step_s - exposed)
    return target.step_s / (compute * work_ratio(pair) + (1 - overlap) * target.communication_s())


def error_of(pair: Pair, overlap: float, sets: Sequence[PublicSet]) -> Error | None:
    """Return the error with samples to the target, start and evaluations of other sets; None without such sets."""
    target, step = pair[1], step_ratio(pair, overlap)
    # A round may contain the logs of an earlier one.
    logs = (target.cell.submitter, target.gpus, target.samples)
    remaining = [public for public in sets if (public.cell.submitter, public.gpus, public.samples) != logs]
    rows = [row for row in convergence(remaining) if row.target == target.target]
    if not rows:
        return None
    samples, _ = projection.samples_to_target(rows, target.target, target.batch)
    phases = projection.nearest_phases(phases_by_gpus(remaining), target.target, target.gpus)
    minutes = projection.to_target(target.step_s / step, samples / target.batch, phases)
    return Error(*pair, step, (target.cell.score_minutes or math.nan) / minutes)


def leave_one_out(sets: Sequence[PublicSet]) -> tuple[float, list[Error]]:
    """Return the overlap with the least median error of the steps, and the errors of all pairs."""
    pairs = pairs_of(sets)
    similar = [pair for pair in pairs if 1 / MOST_RATIO <= work_ratio(pair) <= MOST_RATIO]
    used = similar if len(similar) >= 2 * FEWEST_PAIRS else pairs
    if not used:
        return 0.0, []
    overlap = min(OVERLAPS, key=lambda value: median(abs(math.log(step_ratio(pair, value))) for pair in used))
    return overlap, [error for pair in used if (error := error_of(pair, overlap, sets))]


def quantiles(errors: Sequence[Error], kind: Literal["step", "minutes"]) -> list[float]:
    """Return the quantiles with equal weights of all submitters."""
    submitters = [error.target.cell.submitter for error in errors]
    weights = np.array([1 / submitters.count(submitter) for submitter in submitters])
    return [
        float(value) for value in weighted_quantiles(np.array([getattr(e, kind) for e in errors]), weights, QUANTILES)
    ]


def held_out(errors: Sequence[Error]) -> list[tuple[float, list[float]]]:
    """Return each pair's ratio of minutes with the quantiles over the pairs of all other submitters."""
    submitters = {error.target.cell.submitter for error in errors}
    remaining = {name: [error for error in errors if error.target.cell.submitter != name] for name in submitters}
    bounds = {name: quantiles(rest, "minutes") for name, rest in remaining.items() if len(rest) >= FEWEST_PAIRS}
    tested = [error for error in errors if error.target.cell.submitter in bounds]
    return [(error.minutes, bounds[error.target.cell.submitter]) for error in tested]


def coverage(tested: Sequence[tuple[float, list[float]]], width: float) -> float:
    return statistics.fmean(widen(bounds, width)[0] <= value <= widen(bounds, width)[2] for value, bounds in tested)


def widen(bounds: Sequence[float], width: float) -> list[float]:
    """Return quantiles with the outer two moved by the factor ``width``."""
    low, middle, high = bounds
    return [round(low / width, 3), round(middle, 3), round(high * width, 3)]


def agreement() -> Iterator[Projected]:
    """Yield the projections of published sets on the fewest H200 from recorded speeds of one H200."""
    for name in catalogue.benchmarks():
        benchmark, record = name.replace("-", "_"), measured(name)
        cells = [
            cell
            for cell in load_published()
            if later_name(cell.benchmark, cell.round) == benchmark
            and model_of(cell.hardware.accelerator) == "H200-SXM"
            and cell.score_minutes
            and cell.global_batch
        ]
        speeds = [
            Measured(figure.samples_per_second, "H200", f"{figure.loop}: {figure.conditions}")
            for figure in record.figures
            if figure.gpu == "H200" and figure.loop in ("synthetic", "real")
        ]
        speeds += [Measured(record.step.samples_per_second, "H200", record.step.source)] if record.step else []
        speeds += RECORDED.get(benchmark, [])
        if cells and benchmark in projection.calibrations():
            cell = min(cells, key=lambda cell: (cell.hardware.accelerators or 0, cell.score_minutes))
            gpus, nodes, batch = cell.hardware.accelerators or 1, cell.hardware.nodes or 1, cell.global_batch or 1
            share = Share(cell.system, cell.hardware.accelerator or "", gpus, nodes, batch)
            yield from (projection.project(cell, share, speed) for speed in speeds)


def main() -> None:
    by_benchmark: dict[str, list[PublicSet]] = defaultdict(list)
    names = {name.replace("-", "_") for name in catalogue.benchmarks()}
    for cell in load_published():
        is_known = later_name(cell.benchmark, cell.round) in names and cell.division != "open"
        if is_known and (public := read_set(cell)) is not None:
            by_benchmark[public.benchmark].append(public)
    overlaps, up, back = {}, {}, {}
    for name, sets in sorted(by_benchmark.items()):
        overlap, errors = leave_one_out(sets)
        upward = [error for error in errors if error.source.gpus < error.target.gpus]
        bias = median(error.step for error in upward) if upward else math.inf
        if abs(math.log(bias)) > math.log(MOST_BIAS):
            print(f"{name} is not calibrated: median of {len(upward)} steps {bias:.2f}")
            continue
        overlaps[name], up[name] = overlap, upward
        back[name] = [error for error in errors if error.source.gpus > error.target.gpus]
    tested = {name: held_out(errors) for name, errors in up.items()}
    width = next(width for width in WIDTHS if coverage([*itertools.chain(*tested.values())], width) >= LEVEL)
    print(f"Quantiles 0.05 and 0.95 are moved by a factor of {width:.2f}\n\n{_HEAD}")
    lines = []
    for name, errors in up.items():
        basis = errors if len(errors) >= FEWEST_PAIRS else [*itertools.chain(*up.values())]
        step, minutes = (widen(quantiles(basis, kind), width) for kind in ("step", "minutes"))
        pairs, submitters = len(errors), len({error.target.cell.submitter for error in errors})
        entry = Calibration(
            overlap=overlaps[name],
            pairs=pairs,
            submitters=submitters,
            step=step,
            minutes=minutes,
            convergence=convergence(by_benchmark[name]),
            phases=phases_by_gpus(by_benchmark[name]),
        )
        lines.append(f"{json.dumps(name)}: {json.dumps(entry)}")
        reverse = _text(quantiles(back[name], "minutes")) if back[name] else ""
        covered = f"{coverage(tested[name], width):.0%}" if tested[name] else ""
        columns = (name, pairs, submitters, f"{overlaps[name]:.2f}", _text(step), _text(minutes), reverse, covered)
        print(f"| {' | '.join(map(str, columns))} |")
    projection.CALIBRATION.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    projection.calibrations.cache_clear()
    for row in agreement():
        values = (row[key] for key in ("samples_per_second", "minutes", "published_minutes", "ratio"))
        numbers = (*(f"{value or 0:,.4g}" for value in values), f"{row['needed_samples_per_second'] or 0:,.4g}")
        cells = (row["published"], row["gpus"], row["note"], *numbers, _text(row["interval_minutes"] or [], ".4g"))
        print(f"| {' | '.join(map(str, cells))} |")


_HEAD = """\
| benchmark | pairs | submitters | overlap | published / predicted step | minutes | minutes on fewer GPUs | held out |
|---|---:|---:|---:|---|---|---|---:|"""


def _text(values: Sequence[float], form: str = ".2f") -> str:
    return " to ".join(f"{value:{form}}" for value in values)


if __name__ == "__main__":
    run(main, __doc__)
