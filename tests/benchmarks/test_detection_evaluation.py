"""Average precision next to training in a process of its own; see also tests/in_framework/pytorch/detection.py."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.detection import detections
from benchmarks.detection.detections import Detections
from encore import data, paths
from tests.conftest import records
from tests.trainings import PATIENCE

SPREADS = [0.2, 0.05, 0.0, 0.0]
TARGETS = {"box_ap": 0.95, "mask_ap": 0.95}


@pytest.fixture(scope="module")
def scenes(pytorch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The small data set
    folder = tmp_path_factory.mktemp("scenes") / "ssd"
    data.prepare("ssd", folder, data.Preparation(), pytorch_python, lambda update: None)
    return folder


def test_a_file_keeps_detections(tmp_path: Path) -> None:
    boxes, labels = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32), np.array([3, 1], np.int16)
    for masks in (None, [b"abc", b""]):
        given = Detections(np.array([7, 9]), boxes, np.array([0.5, 0.25], np.float32), labels, masks)
        detections.write(tmp_path / "some.npz", given)
        read = detections.from_bytes((tmp_path / "some.npz").read_bytes())
        assert (
            read.masks == masks and {name: getattr(read, name).dtype for name in detections.DTYPES} == detections.DTYPES
        )
        assert detections.to_bytes(read) == detections.to_bytes(given)


class Started:
    # A run of detection_run.py in the background, on one rank
    def __init__(self, python: Path, scenes: Path, folder: Path, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        content = {"targets": TARGETS, "spreads": SPREADS, "seconds": 0.02, **options}
        program = paths.ROOT / "tests" / "in_framework" / "detection_run.py"
        command = [python, program, scenes, folder, json.dumps(content)]
        environment = {**os.environ, "PYTHONPATH": str(paths.ROOT), "OMP_NUM_THREADS": "1"}
        self.folder = folder
        self.process = subprocess.Popen(
            list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, output

    def evaluator(self) -> psutil.Process:
        # The process that evaluates, once it was given detections
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            children = psutil.Process(self.process.pid).children()
            found = [child for child in children if "evaluation_worker" in " ".join(child.cmdline())]
            if found and list((self.folder / "detections").glob("*.npz")):
                return found[0]
            time.sleep(0.01)
        raise AssertionError(f"no evaluator: {self.process.communicate()[0]}")


def found_in(folder: Path) -> list[Any]:
    return [(each["epoch"], each["qualities"]) for each in records(folder / "metrics.jsonl", "eval")]


@pytest.fixture(scope="module")
def whole(pytorch_python: Path, scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The folder of a run that was left alone
    started = Started(pytorch_python, scenes, tmp_path_factory.mktemp("whole"))
    code, output = started.end()
    assert code == 0, output
    return started.folder


def test_a_run_ends_at_both_targets_with_pictures_of_its_last_evaluation(whole: Path) -> None:
    evaluations = found_in(whole)
    assert evaluations[-1] == (3, {"box_ap": 1.0, "mask_ap": 1.0})
    assert [epoch for epoch, _ in evaluations] == [1, 2, 3]
    assert records(whole / "metrics.jsonl", "end")[0]["outcome"] == "reached"
    assert [path.name for path in (whole / "detections").iterdir()] == ["epoch_0003.npz"]
    lines = list(map(json.loads, (whole / "detections.jsonl").read_text(encoding="utf-8").splitlines()))
    facts = [(each["which"], each["epoch"], each["precision"]) for each in lines]
    assert facts == [("best", 3, 1.0)] * 4 + [("worst", 3, 1.0)] * 4
    for each in lines:
        assert [thing["box"] for thing in each["found"]] and all(thing["runs"] for thing in each["truth"])


def test_several_processes_find_the_same(pytorch_python: Path, scenes: Path, tmp_path: Path, whole: Path) -> None:
    code, output = Started(pytorch_python, scenes, tmp_path / "run", workers=3).end()
    assert code == 0, output
    assert found_in(tmp_path / "run") == found_in(whole)


def test_sigterm_ends_a_run_whose_evaluator_is_busy(
    pytorch_python: Path, scenes: Path, tmp_path: Path, whole: Path
) -> None:
    # The resumed run has the results of all evaluations, also of the one that was interrupted
    started = Started(pytorch_python, scenes, tmp_path / "run", seconds=0.2)
    evaluator = started.evaluator()
    evaluator.suspend()
    started.process.send_signal(signal.SIGTERM)
    code, output = started.end()
    assert code == 0, output
    assert not evaluator.is_running() or evaluator.status() == psutil.STATUS_ZOMBIE
    assert records(tmp_path / "run" / "metrics.jsonl", "end")[0]["outcome"] == "interrupted"
    assert not found_in(tmp_path / "run")
    code, output = Started(pytorch_python, scenes, tmp_path / "run").end()
    assert code == 0, output
    assert found_in(tmp_path / "run") == found_in(whole)


@pytest.mark.parametrize(
    ("number", "concurrently", "found", "hint"),
    [
        (signal.SIGKILL, True, "ended with signal 9 (SIGKILL)\n", "hint: look for its message above"),
        (signal.SIGSTOP, False, "hangs: it gave no heartbeat for ", "hint: look for what stops processes"),
    ],
    ids=["dies", "hangs"],
)
def test_an_evaluator_that_ends_no_evaluation_ends_the_run(
    pytorch_python: Path,
    scenes: Path,
    tmp_path: Path,
    whole: Path,
    number: signal.Signals,
    concurrently: bool,
    found: str,
    hint: str,
) -> None:
    # Whether the run trains on or waits for the result; what resumes it has all results
    started = Started(pytorch_python, scenes, tmp_path / "run", concurrently=concurrently)
    evaluator = started.evaluator()
    evaluator.send_signal(number)
    # What the launcher writes; only now, since loading takes longer.
    (tmp_path / "run" / "ranks").mkdir()
    (tmp_path / "run" / "ranks" / "hang_seconds").write_text("0.6", encoding="ascii")
    code, output = started.end()
    assert code == 1, output
    assert "the process that evaluates epoch " in output and found in output
    assert "expected: the average precision" in output
    assert hint in output and "Traceback" not in output
    (tmp_path / "run" / "ranks" / "hang_seconds").unlink()
    code, output = Started(pytorch_python, scenes, tmp_path / "run", concurrently=concurrently).end()
    assert code == 0, output
    assert found_in(tmp_path / "run") == found_in(whole)


def test_an_evaluator_ends_with_its_training(pytorch_python: Path, scenes: Path, tmp_path: Path) -> None:
    started = Started(pytorch_python, scenes, tmp_path / "run", seconds=0.2, workers=2)
    evaluator = started.evaluator()
    family = [evaluator, *evaluator.children()]
    started.process.kill()
    started.end()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert not alive
