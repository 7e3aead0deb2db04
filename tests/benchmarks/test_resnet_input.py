"""Input of ResNet: batches in every framework, order of the copies, and the share of the time waiting for batches."""

from pathlib import Path
from typing import Any

import pytest

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


def share_with_queue(fetches: list[float], steps: list[float]) -> float:
    # Python fetches the next batch while a step runs
    fetched = done = waited = 0.0
    for fetch, step in zip(fetches, steps, strict=True):
        fetched += fetch
        waited += max(0.0, fetched - done)
        done = max(fetched, done) + step
    return waited / done


def share_without_queue(fetches: list[float], steps: list[float]) -> float:
    return sum(fetches) / (sum(fetches) + sum(steps))


@pytest.mark.long
def test_share_of_waiting_is_that_of_an_idle_device(measured: dict[str, Any]) -> None:
    assert set(measured["shares"]) == {"0.0", "0.03", "0.1"}
    own = share_with_queue if measured["framework"] == "mxnet" else share_without_queue
    for seconds, tries in measured["shares"].items():
        for kind, expected in {"own": own, "simulated": share_with_queue}.items():
            # Another process may take the core between two sleeps of one try, a wrong formula is wrong in all three
            errors = [abs(shares[kind]["share"] - expected(**times_of(shares[kind]))) for shares in tries]
            assert min(errors) < 0.1, (seconds, kind, errors)


def times_of(measurement: dict[str, Any]) -> dict[str, list[float]]:
    return {name: value for name, value in measurement.items() if name != "share"}


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
