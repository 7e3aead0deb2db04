"""Input of ResNet: batches in every framework, order of the copies, and the time that a device waits for batches."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.run import timing
from benchmarks.common.run.timing import InputWait
from encore import catalogue, configuration
from tests.trainings import result


@pytest.fixture(scope="module", params=["mxnet", "pytorch", "tensorflow"])
def measured(request: pytest.FixtureRequest, digits: Path) -> dict[str, Any]:
    """Output of input_batches.py in a framework."""
    run = request.getfixturevalue(f"in_{request.param}")
    return {"framework": request.param, **result(run("input_batches.py", request.param, str(digits)))}


def test_batch_is_copied_in_every_precision_and_layout(measured: dict[str, Any]) -> None:
    shapes = {"NHWC 4": [8, 32, 32, 4], "NHWC 3": [8, 32, 32, 3], "NCHW 4": [8, 4, 32, 32], "NCHW 3": [8, 3, 32, 32]}
    types = {"fp16": "float16", "fp32": "float32"}
    assert len(measured["batches"]) == 8
    for name, batch in measured["batches"].items():
        precision, layout, channels, _ = name.split()
        shape = shapes[f"{layout} {channels}"]
        assert batch == {"type": types[precision], "shape": shape, "images": True, "labels": True}, name


def test_step_is_queued_before_the_copy_of_its_batch_is_awaited(measured: dict[str, Any]) -> None:
    # DALI is asked for a batch after the last one is copied; nothing waits for all work of the GPU
    assert measured["drains"] == 0
    calls = ["run", "convert", "step", "copied"] * 3 if measured["framework"] == "tensorflow" else []
    assert measured["calls"][:11] == calls[:11]


def test_only_the_fetch_time_of_an_idle_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, is_idle = SimpleNamespace(now=1.0), threading.Event()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    wait = InputWait(is_idle.wait)

    def fetch(seconds_until_idle: float | None, seconds_after: float) -> None:
        if seconds_until_idle is not None:
            clock.now += seconds_until_idle
            is_idle.set()
            assert wait._watch is not None
            wait._watch.join()
        clock.now += seconds_after

    wait.fetch(lambda: fetch(None, 2.0))  # the device is busy during all of it
    wait.fetch(lambda: fetch(3.0, 0.5))  # the device becomes idle half a second before the end
    assert (wait.take(), wait.take(), wait.total) == (0.5, 0.0, 0.5)
    wait = InputWait()  # every step is finished when it returns
    wait.fetch(lambda: fetch(None, 0.25))
    assert (wait.take(), wait.total) == (0.25, 0.25)


def test_error_of_a_queued_step_stops_the_training() -> None:
    # The thread that waits for the device may be the first to get it
    def finish() -> None:
        raise RuntimeError("out of memory")

    wait = InputWait(finish)
    with pytest.raises(RuntimeError, match="out of memory"):
        wait.fetch(lambda: None)
        wait.take()


def test_only_later_submissions_resize_with_antialiasing() -> None:
    choice = catalogue.choose("resnet")
    systems = [system for system in catalogue.systems(choice) if system.kind in ("submitted", "later")]
    configs = [configuration.resolve(choice, system, system.nodes, system.gpus_per_node, []) for system in systems]
    assert {config.system.system for config in configs if config.get("antialias")} == {"dgxh100", "dgxh100_n8", "h200"}
