"""Average precision, computed in a second process during training, and failures of that process.

The precision itself is tested in tests/in_framework/pytorch/detection.py.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.detection import detections
from benchmarks.detection.detections import Detections
from encore import paths
from tests.conftest import records
from tests.preparing import write_files
from tests.trainings import PATIENCE, Started, assert_none_left, wait_until

SPREADS = [0.2, 0.05, 0.0, 0.0]
TARGETS = {"box_ap": 0.95, "mask_ap": 0.95}


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def scenes(pytorch_python: Path, toy: Callable[[str], Path]) -> Path:
    return toy("ssd")


@pytest.mark.parametrize("masks", [None, [b"abc", b""]])
def test_detections_round_trip(tmp_path: Path, masks: list[bytes] | None) -> None:
    boxes, labels = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32), np.array([3, 1], np.int16)
    written = Detections(np.array([7, 9]), boxes, np.array([0.5, 0.25], np.float32), labels, masks)
    detections.write(tmp_path / "some.npz", written)
    read = detections.from_bytes((tmp_path / "some.npz").read_bytes())
    assert {name: getattr(read, name).dtype for name in detections.DTYPES} == detections.DTYPES
    assert (read.masks, detections.to_bytes(read)) == (masks, detections.to_bytes(written))


def start(python: Path, scenes: Path, folder: Path, **options: Any) -> Started:
    # Start detection_run.py in the background, on one rank
    folder.mkdir(exist_ok=True)
    content = {"targets": TARGETS, "spreads": SPREADS, "seconds": 0.02, **options}
    program = paths.ROOT / "tests" / "in_framework" / "detection_run.py"
    command = [*map(str, (python, program, scenes, folder)), json.dumps(content)]
    environment = {**os.environ, "PYTHONPATH": str(paths.ROOT), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return Started(subprocess.Popen(command, env=environment, **pipes), folder)


def evaluator_of(started: Started) -> psutil.Process:
    # The process that evaluates, once it has received detections
    def workers() -> list[psutil.Process]:
        has_detections = any((started.results / "detections").glob("*.npz"))
        children = psutil.Process(started.process.pid).children() if has_detections else []
        return [child for child in children if "evaluation_worker" in " ".join(child.cmdline())]

    wait_until(lambda: bool(workers()), "an evaluator")
    return workers()[0]


def results(folder: Path) -> list[Any]:
    return [(record["epoch"], record["qualities"]) for record in records(folder / "metrics.jsonl", "eval")]


@pytest.fixture(scope="module")
def reference(pytorch_python: Path, scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    started = start(pytorch_python, scenes, tmp_path_factory.mktemp("reference"))
    started.ended(0)
    return started.results


def test_run_ends_at_both_targets_and_records_detections_of_its_last_evaluation(reference: Path) -> None:
    evaluations, outcome = results(reference), records(reference / "metrics.jsonl", "end")[0]["outcome"]
    files = [path.name for path in (reference / "detections").iterdir()]
    assert ([epoch for epoch, _ in evaluations], evaluations[-1][1], outcome, files) == (
        [1, 2, 3], {"box_ap": 1.0, "mask_ap": 1.0}, "reached", ["epoch_0003.npz"]
    )  # fmt: skip
    lines = list(map(json.loads, (reference / "detections.jsonl").read_text(encoding="utf-8").splitlines()))
    images = [(line["which"], line["epoch"], line["precision"]) for line in lines]
    assert images == [("best", 3, 1.0)] * 4 + [("worst", 3, 1.0)] * 4
    assert all(detection["box"] for line in lines for detection in line["found"])
    assert all(line["found"] and all(truth["runs"] for truth in line["truth"]) for line in lines)


def test_interrupted_evaluation_is_repeated_by_the_resumed_run(
    pytorch_python: Path, scenes: Path, tmp_path: Path, reference: Path
) -> None:
    started = start(pytorch_python, scenes, tmp_path, seconds=0.2)
    evaluator = evaluator_of(started)
    evaluator.suspend()
    started.process.send_signal(signal.SIGTERM)
    started.ended(0)
    assert_none_left([evaluator])
    assert (records(tmp_path / "metrics.jsonl", "end")[0]["outcome"], results(tmp_path)) == ("interrupted", [])
    start(pytorch_python, scenes, tmp_path, workers=3).ended(0)
    assert results(tmp_path) == results(reference), "they depend on the number of processes"


@pytest.mark.parametrize(
    ("number", "concurrently", "problem", "hint"),
    [
        (signal.SIGKILL, True, "ended with signal 9 (SIGKILL)\n", "hint: see its message above"),
        (signal.SIGSTOP, False, "hangs: it gave no heartbeat for ", "hint: find out what stops processes"),
    ],
    ids=["dies", "hangs"],
)
def test_failed_evaluator_ends_the_run(
    pytorch_python: Path,
    scenes: Path,
    tmp_path: Path,
    reference: Path,
    number: signal.Signals,
    concurrently: bool,
    problem: str,
    hint: str,
) -> None:
    started = start(pytorch_python, scenes, tmp_path, concurrently=concurrently)
    evaluator_of(started).send_signal(number)
    # Written by the launcher; the start of the evaluator may take longer than this
    write_files(tmp_path, {"ranks/hang_seconds": "0.6"})
    output = started.ended(1)
    parts = ("the process that evaluates epoch ", problem, "expected: the average precision", hint)
    assert [part for part in parts if part not in output] == [] and "Traceback" not in output, output
    write_files(tmp_path, {"ranks/hang_seconds": None})
    start(pytorch_python, scenes, tmp_path, concurrently=concurrently).ended(0)
    assert results(tmp_path) == results(reference)


def test_evaluator_ends_with_its_training(pytorch_python: Path, scenes: Path, tmp_path: Path) -> None:
    started = start(pytorch_python, scenes, tmp_path, seconds=0.2, workers=2)
    evaluator = evaluator_of(started)
    processes = [evaluator, *evaluator.children()]
    started.process.kill()
    started.process.communicate()
    assert psutil.wait_procs(processes, timeout=PATIENCE)[1] == []
