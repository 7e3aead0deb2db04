"""Calibrate the projection of encore bench --project, and print its errors.

    python -m tools.calibrate_projection

Reads the digests of the public sets. A set is predicted from another one of the same round, submitter, accelerator
and GPUs per node on a different number of GPUs, 8 to 64; samples to the target, start and evaluations come from all
other sets. Writes encore/results/data/projection.json, and prints the errors in both directions and the agreement with
the speed of one GPU in measured.toml.
"""

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


@dataclass(frozen=True, kw_only=True)
class PublicSet:
    cell: PublishedResult
    benchmark: str
    target: str
    gpus: int
    nodes: int
    batch: int
    samples: float  # to the target
    start_s: float
    train_s: float
    evaluate_s: float | None
    evaluations: float

    @property
    def step_s(self) -> float:
        return self.train_s / (self.samples / self.batch)

    def communication_s(self) -> float:
        links = projection.links_of(self.cell.hardware, max(1, self.gpus // self.nodes))
        return projection.communication_seconds(self.benchmark, self.gpus, self.nodes, links[0] if links else None)


class Pair(NamedTuple):
    source: PublicSet
    target: PublicSet

    @property
    def ratio(self) -> float:
        """Ratio of the samples per GPU, at least one."""
        ratio = self.source.batch / self.source.gpus / (self.target.batch / self.target.gpus)
        return max(ratio, 1 / ratio)


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
    phases, seconds = run_set.phases, cell.score_minutes * 60
    evaluate, evaluation = phases.get("evaluate_s"), phases.get("evaluation_s")
    start = phases.get("start_s", 0.0)
    return PublicSet(
        cell=cell,
        benchmark=benchmark,
        target=projection.target_of(cell.round, benchmark),
        gpus=gpus,
        nodes=cell.hardware.nodes or 1,
        batch=batch,
        samples=samples,
        start_s=start,
        train_s=seconds - start - (evaluate or 0.0),
        evaluate_s=evaluate,
        evaluations=evaluate / evaluation if evaluate and evaluation else 0.0,
    )


def convergence(sets: Iterable[PublicSet]) -> list[Convergence]:
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for public in sets:
        groups[public.target, public.batch].append(public.samples)
    return [Convergence(*key, statistics.median(values), len(values)) for key, values in sorted(groups.items())]


def phases(sets: Iterable[PublicSet]) -> list[Phases]:
    groups: dict[tuple[str, int], list[PublicSet]] = defaultdict(list)
    for public in sets:
        if public.evaluate_s is not None:
            groups[public.target, public.gpus].append(public)
    median = statistics.median
    return [
        Phases(
            *key,
            round(median(public.start_s for public in group), 1),
            round(median((public.evaluate_s or 0.0) / public.train_s for public in group), 4),
            round(median(public.evaluations for public in group), 1),
        )
        for key, group in sorted(groups.items())
    ]


def pairs_of(sets: Sequence[PublicSet]) -> list[Pair]:
    groups: dict[tuple[object, ...], list[PublicSet]] = defaultdict(list)
    for public in sets:
        cell, hardware = public.cell, public.cell.hardware
        if public.gpus in GPUS and projection.links_of(hardware, 1):
            node = (hardware.accelerator, hardware.accelerators_per_node)
            groups[cell.round, cell.submitter, node].append(public)
    ordered = (pair for group in groups.values() for pair in itertools.permutations(group, 2))
    return [Pair(*pair) for pair in ordered if pair[0].gpus != pair[1].gpus]


def step_ratio(pair: Pair, overlap: float) -> float:
    """Return the published over the predicted step time."""
    source, target = pair
    exposed = (1 - overlap) * source.communication_s()
    compute = max(_LEAST_COMPUTE * source.step_s, source.step_s - exposed)
    work = target.batch / target.gpus / (source.batch / source.gpus)
    return target.step_s / (compute * work + (1 - overlap) * target.communication_s())


def minutes_ratio(pair: Pair, ratio: float, sets: Sequence[PublicSet]) -> float | None:
    """Return the published over the predicted minutes; ``ratio`` of the steps."""
    target, remaining = pair.target, [public for public in sets if public is not pair.target]
    rows = [row for row in convergence(remaining) if row.target == target.target]
    if not rows:
        return None
    samples, _ = projection.samples_to_target(rows, target.target, target.batch)
    nearest = projection.nearest_phases(phases(remaining), target.target, target.gpus)
    minutes = projection.to_target(target.step_s / ratio, samples / target.batch, nearest)
    return (target.cell.score_minutes or math.nan) / minutes


def fit_overlap(pairs: Sequence[Pair]) -> float:
    return min(
        OVERLAPS, key=lambda overlap: statistics.median(abs(math.log(step_ratio(pair, overlap))) for pair in pairs)
    )


def quantiles(values: Sequence[float], pairs: Sequence[Pair]) -> list[float]:
    """Return the quantiles with equal weights of all submitters."""
    submitters = [pair.target.cell.submitter for pair in pairs]
    weights = np.array([1 / submitters.count(submitter) for submitter in submitters])
    return [float(value) for value in weighted_quantiles(np.array(values), weights, QUANTILES)]


class Errors(NamedTuple):
    """Ratios of published to predicted values, by pair."""

    pairs: list[Pair]
    steps: list[float]
    minutes: list[float]


def errors(pairs: Sequence[Pair], overlap: float, sets: Sequence[PublicSet]) -> Errors:
    steps = [step_ratio(pair, overlap) for pair in pairs]
    minutes = [minutes_ratio(pair, ratio, sets) for pair, ratio in zip(pairs, steps, strict=True)]
    complete = [row for row in zip(pairs, steps, minutes, strict=True) if row[2] is not None]
    return Errors([row[0] for row in complete], [row[1] for row in complete], [row[2] or 0.0 for row in complete])


def held_out(result: Errors) -> list[tuple[float, list[float]]]:
    """Return each pair's ratio of minutes with the quantiles over the pairs of all other submitters."""
    left_out = []
    rows = list(zip(result.pairs, result.minutes, strict=True))
    for pair, value in rows:
        submitter = pair.target.cell.submitter
        remaining = [row for row in rows if row[0].target.cell.submitter != submitter]
        if len(remaining) >= FEWEST_PAIRS:
            left_out.append((value, quantiles([ratio for _, ratio in remaining], [row for row, _ in remaining])))
    return left_out


def coverage(left_out: Sequence[tuple[float, list[float]]], width: float) -> float:
    return statistics.fmean(widen(bounds, width)[0] <= value <= widen(bounds, width)[2] for value, bounds in left_out)


def widen(bounds: Sequence[float], width: float) -> list[float]:
    """Return quantiles with the outer two moved by the factor ``width``."""
    low, middle, high = bounds
    return [round(low / width, 3), round(middle, 3), round(high * width, 3)]


class Result(NamedTuple):
    """Overlap of a benchmark with the errors of pairs towards more and towards fewer GPUs."""

    sets: list[PublicSet]
    overlap: float
    up: Errors
    back: Errors


def leave_one_out(sets: list[PublicSet]) -> Result | None:
    pairs = pairs_of(sets)
    similar = [pair for pair in pairs if pair.ratio <= MOST_RATIO]
    used = similar if len(similar) >= 2 * FEWEST_PAIRS else pairs
    if not used:
        return None
    overlap = fit_overlap(used)
    up, back = (
        errors([pair for pair in used if (pair.source.gpus < pair.target.gpus) == grows], overlap, sets)
        for grows in (True, False)
    )
    return Result(sets, overlap, up, back) if up.pairs else None


def calibration_of(result: Result, basis: Errors, width: float) -> Calibration:
    return Calibration(
        overlap=result.overlap,
        fitted={
            "pairs": len(result.up.pairs),
            "submitters": len({pair.target.cell.submitter for pair in result.up.pairs}),
            "step": widen(quantiles(basis.steps, basis.pairs), width),
            "minutes": widen(quantiles(basis.minutes, basis.pairs), width),
        },
        convergence=convergence(result.sets),
        phases=phases(result.sets),
    )


def agreement() -> Iterator[Projected]:
    """Yield the projections of the fastest published set on 8 H200 from recorded speeds of one H200."""
    for name in catalogue.benchmarks():
        benchmark = name.replace("-", "_")
        cells = [
            cell
            for cell in load_published()
            if later_name(cell.benchmark, cell.round) == benchmark
            and model_of(cell.hardware.accelerator) == "H200-SXM"
            and (cell.hardware.accelerators, cell.hardware.nodes) == (8, 1)
            and cell.score_minutes
            and cell.global_batch
        ]
        if not cells or benchmark not in projection.calibrations():
            continue
        cell = min(cells, key=lambda cell: cell.score_minutes or math.inf)
        share = Share(cell.system, cell.hardware.accelerator or "", 8, 1, cell.global_batch or 0)
        for speed in recorded_speeds(name):
            yield projection.project(cell, share, speed)


def recorded_speeds(name: str) -> Iterator[Measured]:
    record = measured(name)
    for figure in record.figures:
        if figure.gpu == "H200" and figure.loop in ("synthetic", "real"):
            yield Measured(figure.samples_per_second, "H200", f"{figure.loop}: {figure.conditions}")
    if record.step:
        yield Measured(record.step.samples_per_second, "H200", f"step: {record.step.source}")


def main() -> None:
    by_benchmark: dict[str, list[PublicSet]] = defaultdict(list)
    names = {name.replace("-", "_") for name in catalogue.benchmarks()}
    for cell in load_published():
        is_known = later_name(cell.benchmark, cell.round) in names and cell.division != "open"
        if is_known and (public := read_set(cell)) is not None:
            by_benchmark[public.benchmark].append(public)
    results = {name: result for name, sets in sorted(by_benchmark.items()) if (result := leave_one_out(sets))}
    for name in [name for name, result in results.items() if not is_modeled(result)]:
        print(f"{name} is not calibrated: median of the steps {statistics.median(results.pop(name).up.steps):.2f}")
    left_out = {name: held_out(result.up) for name, result in results.items()}
    width = next(width for width in WIDTHS if coverage([*itertools.chain(*left_out.values())], width) >= LEVEL)
    everything = Errors(*(list(itertools.chain(*column)) for column in zip(*(r.up for r in results.values()))))  # noqa: B905
    calibrations = {}
    print(f"Quantiles 0.05 and 0.95 are moved by a factor of {width:.2f}\n\n{_HEAD}")
    for name, result in results.items():
        basis = result.up if len(result.up.pairs) >= FEWEST_PAIRS else everything
        calibrations[name] = calibration = calibration_of(result, basis, width)
        print(_row(name, calibration, result, f"{coverage(left_out[name], width):.0%}" if left_out[name] else ""))
    lines = [f"{json.dumps(name)}: {json.dumps(calibration)}" for name, calibration in calibrations.items()]
    projection.CALIBRATION.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    projection.calibrations.cache_clear()
    for row in agreement():
        interval = _text(row["interval_minutes"] or [], ".4g")
        print(
            f"| {row['published']} | {row['samples_per_second']:,.0f} | {row['note']} | {row['minutes']:.4g} "
            f"| {interval} | {row['published_minutes']:.4g} | {row['ratio']:.2f} "
            f"| {row['needed_samples_per_second']:,.0f} |"
        )


def is_modeled(result: Result) -> bool:
    return abs(math.log(statistics.median(result.up.steps))) <= math.log(MOST_BIAS)


_HEAD = """\
| benchmark | pairs | submitters | overlap | published / predicted step | minutes | minutes on fewer GPUs | held out |
|---|---:|---:|---:|---|---|---|---:|"""


def _row(name: str, calibration: Calibration, result: Result, coverage_text: str) -> str:
    fitted = calibration["fitted"]
    back = quantiles(result.back.minutes, result.back.pairs) if result.back.minutes else []
    texts = (_text(fitted["step"]), _text(fitted["minutes"]), _text(back), coverage_text)
    counts = f"{fitted['pairs']} | {fitted['submitters']} | {calibration['overlap']:.2f}"
    return f"| {name} | {counts} | {' | '.join(texts)} |"


def _text(values: Sequence[float], form: str = ".2f") -> str:
    return " to ".join(f"{value:{form}}" for value in values)


if __name__ == "__main__":
    run(main, __doc__)
