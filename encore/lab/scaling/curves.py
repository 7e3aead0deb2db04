"""Minutes to the target over GPUs: from a study, published results, runs, a sweep, or a file.

from encore.lab.scaling.curves import load_curves, options
for option in options("ssd", load_curves(["microway-dgx1-scaling"])["ssd"], gpus=8):
    print(option.gpus, option.minutes, option.how)
"""

import csv
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from encore.errors import EncoreError
from encore.lab.scaling.cost_model import fit_strong_scaling, strong_scaling_point
from encore.lab.scaling.printed_tables import MICROWAY
from encore.results.compare.run_set import load_run_sets
from encore.results.published.published import load_studies
from encore.results.report.measurements import Measurement, measurement_of
from encore.results.report.report import measurements_of_published, measurements_of_study
from encore.results.rules import canonical

DEFAULT = MICROWAY
_COLUMNS = ("benchmark", "gpus", "minutes")

Minutes = dict[int, float]  # measured minutes to the target of one benchmark by number of GPUs, ascending
How = Literal["measured", "interpolated", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Option:
    gpus: int
    minutes: float
    how: How = "measured"
    low: float | None = None  # bounds of the 95 % interval of predicted minutes
    high: float | None = None

    @property
    def work(self) -> float:
        return self.gpus * self.minutes


def load_curves(sources: Sequence[str]) -> dict[str, Minutes]:
    """Return minutes by benchmark; EncoreError if a source is invalid or has different accelerators."""
    curves: dict[str, Minutes] = {}
    kinds: dict[str, str] = {}
    for source in sources:
        for benchmark, gpus, minutes, kind in _read(source):
            if kinds.setdefault(benchmark, kind) != kind:
                raise EncoreError(
                    f"{benchmark} was measured on {kind} and on {kinds[benchmark]}",
                    expected="one kind of accelerator",
                    hint="restrict --curves, such as v0.7/NVIDIA/dgxa100",
                )
            points = curves.setdefault(benchmark, {})
            points[gpus] = min(minutes, points.get(gpus, minutes))
    return {benchmark: dict(sorted(points.items())) for benchmark, points in curves.items()}


def _read(source: str) -> Iterator[tuple[str, int, float, str]]:
    # Yield the benchmark, GPUs, minutes and kind of accelerator of everything that a source measured.
    path = Path(source)
    if path.is_file():
        yield from _read_file(path)
        return
    measured: list[Measurement]
    if path.is_dir():
        measured = [measurement_of(run_set) for run_set in load_run_sets(path)]
    elif source in {study.key for study in load_studies()}:
        measured = measurements_of_study(source)
    elif source == "published":
        raise EncoreError(
            "published results have multiple accelerators",
            expected="a part of their names",
            hint="--curves v0.7/NVIDIA/dgxa100; list: `encore published`",
        )
    elif path.suffix or source.startswith((".", "/")):
        raise EncoreError(f"{source} does not exist", expected="a CSV file or a folder of runs")
    else:
        measured = measurements_of_published(source)
    for run in measured:
        if run.gpus and run.minutes:
            yield run.benchmark, run.gpus, run.minutes, run.system.rpartition("nodes, ")[2]


def _read_file(path: Path) -> Iterator[tuple[str, int, float, str]]:
    # Yield CSV rows with the columns benchmark, gpus and minutes.
    with path.open(encoding="utf-8", newline="", errors="replace") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise EncoreError(
                f"{path} has no column {', '.join(missing)}", expected=f"the columns {','.join(_COLUMNS)}"
            )
        for row in reader:
            gpus, minutes = 0, 0.0
            with suppress(TypeError, ValueError):
                gpus, minutes = int(row["gpus"]), float(row["minutes"])
            if gpus < 1 or not (minutes > 0 and math.isfinite(minutes)) or not row["benchmark"]:
                raise EncoreError(
                    f"{path}, line {reader.line_num}: {','.join(str(row[name]) for name in _COLUMNS)}",
                    expected="a benchmark, a positive integer number of GPUs, positive minutes",
                )
            yield canonical(row["benchmark"]) or row["benchmark"], gpus, minutes, str(path)


def options(benchmark: str, measured: Minutes, gpus: int, extrapolate: bool = False) -> tuple[Option, ...]:
    """Return a benchmark's options on ``gpus`` GPUs: measured counts, and powers of two between them.

    Minutes between two measured counts are interpolated linearly in the logarithms of both. Outside the measured
    range they come from the cost model if ``extrapolate`` is set. Counts that use more GPUs without saving time are
    omitted.
    """
    least, largest = min(measured), max(measured)
    choices = [Option(gpus=n, minutes=minutes) for n, minutes in measured.items() if n <= gpus]
    powers = {2**power for power in range(gpus.bit_length())}
    for n in sorted({*powers, gpus} - set(measured)):
        if least < n < largest:
            choices.append(Option(gpus=n, minutes=interpolate(measured, n), how="interpolated"))
        elif extrapolate:
            guess = fit_strong_scaling(measured).predict(strong_scaling_point(n))
            choices.append(Option(gpus=n, minutes=guess.value, how="predicted", low=guess.low, high=guess.high))
    if not choices:
        raise EncoreError(
            f"{benchmark} was measured on {least} to {largest} GPUs, and there are {gpus}",
            expected=f"at least {least} GPUs",
            hint="measure it on fewer with `encore sweep`, or use the cost model: --extrapolate",
        )
    by_gpus = sorted(choices, key=lambda choice: choice.gpus)
    return tuple(
        option for n, option in enumerate(by_gpus) if all(option.minutes < fewer.minutes for fewer in by_gpus[:n])
    )


def interpolate(measured: Minutes, gpus: int) -> float:
    """Return minutes between two measured counts, linear in the logarithms; ``measured`` has ascending counts."""
    return float(np.exp(np.interp(np.log(gpus), np.log(list(measured)), np.log(list(measured.values())))))
