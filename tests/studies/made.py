"""Measurements whose times follow a rule, in a folder as a measured study leaves it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from encore import files
from encore.lab.studies import folder as folders
from encore.lab.studies.definition import Point, Study
from encore.lab.studies.folder import MEASUREMENT, Folder

WEIGHTS = {"lenet": 70_753_070, "alexnet": 50_844_008, "googlenet": 6_998_552, "inception-v3": 23_817_352}


def measurement(point: Point, seconds: float, spread: float = 0.01) -> dict[str, Any]:
    weights = WEIGHTS.get(str(point.axes["network"]), 1_795_131)
    blocks = [seconds * factor for factor in (1 - spread, 1.0, 1 + spread)]
    ranks = int(point.axes["ranks"])
    memory = [1000.0 + 10 * int(point.axes["batch_size"]), *[900.0 + 10 * int(point.axes["batch_size"])] * (ranks - 1)]
    return {
        "schema": 1,
        "config": dict(point.config),
        "network": {
            "convolutions": 2, "fully_connected": 2, "weights": weights, "output": [2, 10],
            "sizes": {"a": weights // 2, "b": weights - weights // 2},
        },
        "first_step_seconds": 2 * seconds,
        "steps_per_block": 4,
        "step_seconds": blocks,
        "stages": {
            "fp_bp": [0.7 * each for each in blocks], "wu": [0.3 * each for each in blocks], "step": blocks,
            "metric": [0.2 * each for each in blocks],
        },
        "operators": {"fp": 0.2 * seconds, "bp": 0.4 * seconds, "wu": 0.2 * seconds},
        "memory_mib": {"empty": [200.0] * ranks, "before_training": [400.0] * ranks, "training": memory},
        "wall_seconds": 5.0,
    }  # fmt: skip


def folder(
    study: Study,
    results: Path,
    seconds: Callable[[Point], float | None],
    shift: Callable[[Point, int], float] = lambda point, number: 1 + 0.01 * (number % 2),
) -> Folder[Study]:
    """Return a folder in which the points for which ``seconds`` is not None are done, each pass ``shift`` as long."""
    made = folders.create(study, f"study-{study.name}", results)
    for point in study.points():
        value = seconds(point)
        for number in range(1, study.passes + 1) if value is not None else ():
            made.at(point, number).mkdir(parents=True)
            files.write_json(made.at(point, number) / MEASUREMENT, measurement(point, value * shift(point, number)))
    return made
