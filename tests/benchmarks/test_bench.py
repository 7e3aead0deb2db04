"""Measurements of bench.py: ratios of alternating loops, a choice of loops, and a loop that fails."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.common.checks import bench
from benchmarks.common.data.problem import Problem
from encore import catalogue
from encore.containers import compatibility
from encore.containers.checks import check
from encore.containers.runtimes import Target
from encore.machine import node
from encore.machine.node import Gpu
from tests.trainings import resolved


def fail(count: int) -> None:
    raise RuntimeError("an illegal memory access")


def synchronize() -> None:
    """Device synchronization on the CPU."""


def test_ratio_is_independent_of_a_machine_that_slows_down(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"time": 0.0, "pace": 1.0}
    monkeypatch.setattr(bench.time, "time", lambda: clock["time"])

    def slow(count: int) -> None:
        clock["pace"] *= 1.5
        clock["time"] += 4 * count * clock["pace"]

    def fast(count: int) -> float:
        clock["time"] += count * clock["pace"]
        return 0.25

    loops: dict[str, Callable[[int], float | None]] = {"bare": slow, "synthetic": fast, "real": fast, "input": fast}
    subject = bench.Subject("a", 10, loops, samples={"synthetic": 20}, flops={"bare": 5e9, "synthetic": 6e9})
    measured, share = bench.measure(subject, synchronize, 4, 3)
    found = {name: (entry["ratio"], entry.get("flops_per_sample")) for name, entry in measured.items()}
    ratios = {"bare": (1, 5e8), "synthetic": (8, 3e8), "real": (4, None), "input": (4, None)}
    assert found == {name: (pytest.approx(ratio), flops) for name, (ratio, flops) in ratios.items()}
    bare, synthetic = measured["bare"], measured["synthetic"]
    median = bare["median"], bare["most"] / bare["least"], synthetic["flops_per_second"], share
    assert median == pytest.approx((10 / (4 * 1.5**3), 1.5**2, 6e9 / 20 * synthetic["median"], 0.25))


def test_only_the_requested_loops_are_measured() -> None:
    subject = bench.Subject("a", 10, {"bare": fail, "real": fail, "evaluation": bench.repeated(synchronize)})
    measured, share = bench.measure(subject, synchronize, 1, 1, ["evaluation"])
    # No ratio without the bare loop
    assert ({name: entry["ratio"] for name, entry in measured.items()}, share) == ({"evaluation": None}, None)
    with pytest.raises(Problem, match=r"no loop sythetic\n  expected: bare, real, evaluation"):
        bench.refuse_unknown(subject, ["real", "sythetic"])


def test_failing_loop_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    loops = {"bare": bench.repeated(synchronize), "real": fail, "input": fail}
    with pytest.raises(RuntimeError, match="illegal"):
        bench.measure(bench.Subject("a", 1, loops, {"real": "our step"}), synchronize, 4, 1)
    assert capsys.readouterr().err == "failed: our step\n"


def gpu(gib: float) -> Gpu:
    return Gpu(index=0, name="NVIDIA X", memory_gib=gib, driver="550.54", compute_capability="8.0")


def memory_check(name: str, gib: float, *settings: str) -> Any:
    return compatibility.check_memory(resolved(name, "dgxa100", "v0.7", 8, *settings, nodes=1), gpu(gib))


@pytest.mark.parametrize(
    ("name", "gib", "settings", "level"),
    [
        # Submitted: config_DGX1.sh of v0.6, config_DGXA100.sh of v0.7.
        ("resnet", 15.8, "batch_size=208 precision=fp16 dali_prefetch=3", "OK"),
        ("resnet", 39.6, "batch_size=408 precision=fp16 dali_prefetch=3", "OK"),
        # NVIDIA/DeepLearningExamples: PyTorch/Classification/ConvNets/configs.yml, DGX-1 with 16 GB and DGX-2 with 32.
        ("resnet-pytorch", 15.8, "batch_size=256 precision=fp16 dali_prefetch=3", "OK"),
        ("resnet-pytorch", 15.8, "batch_size=112 precision=fp32 dali_prefetch=3", "OK"),
        ("resnet-pytorch", 31.7, "batch_size=256 precision=fp32 dali_prefetch=3", "OK"),
        # TensorFlow/Classification/ConvNets/resnet50v1.5/README.md, DGX-1 with 16 GB.
        ("resnet-tensorflow", 15.8, "batch_size=256 precision=fp16 dali_prefetch=3", "OK"),
        ("resnet-tensorflow", 15.8, "batch_size=128 precision=fp32 dali_prefetch=3", "OK"),
        ("resnet", 39.6, "batch_size=755", "OK"),
        ("resnet", 39.6, "batch_size=756", "WARN"),
        # Near the limit, not near, and a GPU whose memory is not known
        ("resnet-pytorch", 39.6, "precision=fp32", "WARN"),
        ("resnet-pytorch", 79.0, "precision=fp32", "OK"),
        ("resnet-pytorch", 0.0, "precision=fp32", "OK"),
    ],
)
def test_memory_is_checked(name: str, gib: float, settings: str, level: str) -> None:
    assert memory_check(name, gib, *settings.split()).level == level


def test_batch_beyond_the_memory_is_refused_with_the_largest_that_fits() -> None:
    refused = memory_check("resnet", 39.6, "batch_size=1024")
    with_accumulation = memory_check("resnet-pytorch", 39.6, "batch_size=1024")
    assert (refused.level, refused.found, refused.hint, with_accumulation.hint) == (
        "FAIL",
        "about 50.1 GiB needed by the model, NVIDIA X has 39.6 GiB",
        "--set batch_size=755, another global batch",
        "--set accumulation_steps=2, which keeps the global batch",
    )


def test_memory_is_checked_for_runs_on_the_host() -> None:
    machine = dataclasses.replace(node.this_node(), gpus=(gpu(80.0),))
    target = Target(python=catalogue.paths.ROOT / "python")
    results = check(target, resolved("resnet-pytorch", "dgxa100", "v0.7", 8, "batch_size=4096", nodes=1), machine, [])
    assert [result.level for result in results if result.name == "GPU memory"] == ["FAIL"]
