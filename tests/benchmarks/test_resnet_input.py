"""ResNet's input: batches in every framework, and what the input makes wait."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.run.timing import InputWait
from encore import catalogue, configuration
from tests.trainings import InFramework, result

FRAMEWORKS = ("mxnet", "pytorch", "tensorflow")


@pytest.fixture(scope="module", params=FRAMEWORKS)
def found(request: pytest.FixtureRequest, digits: Path) -> dict[str, Any]:
    # What the program finds in each framework.
    inside: InFramework = request.getfixturevalue(f"in_{request.param}")
    return {"name": request.param, **result(inside("input_batches.py", request.param, str(digits)))}


def test_a_batch_is_copied_in_every_precision_and_layout(found: dict[str, Any]) -> None:
    shapes = {"NHWC 4": [8, 32, 32, 4], "NHWC 3": [8, 32, 32, 3], "NCHW 4": [8, 4, 32, 32], "NCHW 3": [8, 3, 32, 32]}
    types = {"fp16": "float16", "fp32": "float32"}
    assert len(found["batches"]) == 8
    for name, batch in found["batches"].items():
        precision, layout, channels, _ = name.split()
        assert batch == {
            "type": types[precision],
            "shape": shapes[f"{layout} {channels}"],
            "images": True,
            "labels": True,
        }, name


def test_a_gpu_has_a_step_while_the_copy_before_it_is_waited_for(found: dict[str, Any]) -> None:
    # DALI is asked for a batch after the last one is copied, and nothing waits for all that the GPU has to do.
    assert found["drains"] == 0
    wanted = ["run", "convert", "step", "copied"] * 3 if found["name"] == "tensorflow" else []
    assert found["calls"][:11] == wanted[:11]


def queued(fetches: list[float], steps: list[float]) -> float:
    # Share of the time that a device waits which has a queue: Python fetches the next batch while a step runs.
    fetched = done = waited = 0.0
    for fetch, step in zip(fetches, steps, strict=True):
        fetched += fetch
        waited += max(0.0, fetched - done)
        done = max(fetched, done) + step
    return waited / done


def in_turn(fetches: list[float], steps: list[float]) -> float:
    # The same where a step is done when it returns.
    return sum(fetches) / (sum(fetches) + sum(steps))


def test_the_share_of_waiting_is_that_of_an_idle_device(found: dict[str, Any]) -> None:
    assert set(found["shares"]) == {"0.0", "0.03", "0.1"}
    kinds = {"own": queued if found["name"] == "mxnet" else in_turn, "simulated": queued}
    for seconds, tries in found["shares"].items():
        for kind, expected in kinds.items():
            # Another process may take the core between two sleeps, in one try or another: what is wrong is always so.
            off = [shares[kind].pop("share") - expected(**shares[kind]) for shares in tries]
            assert min(map(abs, off)) < 0.1, (seconds, kind, off)


def test_an_error_of_a_queued_step_ends_the_training() -> None:
    # The watch of the device may be the first to hear of it.
    def finish() -> None:
        raise RuntimeError("out of memory")

    wait = InputWait(finish)
    with pytest.raises(RuntimeError, match="out of memory"):
        wait.fetch(lambda: None)
        wait.take()


def test_only_later_submissions_resize_with_antialiasing() -> None:
    choice = catalogue.choose("resnet")
    systems = [system for system in catalogue.systems(choice) if system.kind in ("submitted", "later")]
    found = [configuration.resolve(choice, each, each.nodes, each.gpus_per_node, []) for each in systems]
    assert {each.system.system for each in found if each.get("antialias")} == {"dgxh100", "dgxh100_n8", "h200"}
