"""Measurements of bench.py: ratios of alternating loops, a choice of loops, and a loop that fails."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.common.checks import bench
from benchmarks.common.data.problem import Problem
from encore import catalogue
from encore import configuration as configurations
from encore.configuration import Configuration
from encore.containers import compatibility
from encore.containers.checks import check
from encore.containers.runtimes import Target
from encore.machine import node
from encore.machine.node import Gpu


def synchronize() -> None:
    """Device synchronization on the CPU."""


def fail(count: int) -> None:
    raise RuntimeError("an illegal memory access")


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
    assert {name: (entry["ratio"], entry.get("flops_per_sample")) for name, entry in measured.items()} == {
        "bare": (pytest.approx(1), 5e8),
        "synthetic": (pytest.approx(8), 3e8),
        "real": (pytest.approx(4), None),
        "input": (pytest.approx(4), None),
    }
    assert measured["synthetic"]["flops_per_second"] == pytest.approx(6e9 / 20 * measured["synthetic"]["median"])
    assert measured["bare"]["median"] == pytest.approx(10 / (4 * 1.5**3))
    assert measured["bare"]["most"] / measured["bare"]["least"] == pytest.approx(1.5**2)
    assert share == 0.25


def test_only_the_requested_loops_are_measured() -> None:
    subject = bench.Subject("a", 10, {"bare": fail, "real": fail, "evaluation": bench.repeated(synchronize)})
    measured, share = bench.measure(subject, synchronize, 1, 1, ["evaluation"])
    assert (list(measured), share) == (["evaluation"], None)
    assert measured["evaluation"]["ratio"] is None, "without the bare loop"
    with pytest.raises(Problem, match=r"no loop sythetic\n  expected: bare, real, evaluation"):
        bench.refuse_unknown(subject, ["real", "sythetic"])


def test_failing_loop_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    loops = {"bare": bench.repeated(synchronize), "real": fail, "input": fail}
    with pytest.raises(RuntimeError, match="illegal"):
        bench.measure(bench.Subject("a", 1, loops, {"real": "our step"}), synchronize, 4, 1)
    assert capsys.readouterr().err == "failed: our step\n"


def configured(name: str, *settings: str, system: str = "dgxa100") -> Configuration:
    choice = catalogue.choose(name)
    return configurations.resolve(choice, catalogue.find_system(choice, system, "v0.7"), 1, 8, list(settings))


def gpu(gib: float) -> Gpu:
    return Gpu(index=0, name="NVIDIA X", memory_gib=gib, driver="550.54", compute_capability="8.0")


def memory_check(name: str, gib: float, *settings: str) -> Any:
    return compatibility.check_memory(configured(name, *settings), gpu(gib))


@pytest.mark.parametrize(
    ("name", "batch", "precision", "gib"),
    [
        # Submitted: config_DGX1.sh of v0.6, config_DGXA100.sh of v0.7.
        ("resnet", 208, "fp16", 15.8),
        ("resnet", 408, "fp16", 39.6),
        # NVIDIA/DeepLearningExamples: PyTorch/Classification/ConvNets/configs.yml, DGX-1 with 16 GB and DGX-2 with 32.
        ("resnet-pytorch", 256, "fp16", 15.8),
        ("resnet-pytorch", 112, "fp32", 15.8),
        ("resnet-pytorch", 256, "fp32", 31.7),
        # TensorFlow/Classification/ConvNets/resnet50v1.5/README.md, DGX-1 with 16 GB.
        ("resnet-tensorflow", 256, "fp16", 15.8),
        ("resnet-tensorflow", 128, "fp32", 15.8),
    ],
)
def test_published_batch_sizes_fit(name: str, batch: int, precision: str, gib: float) -> None:
    settings = f"batch_size={batch}", f"precision={precision}", "dali_prefetch=3"
    assert memory_check(name, gib, *settings).level == "OK"


def test_batch_beyond_the_memory_is_refused_with_the_largest_that_fits() -> None:
    refused = memory_check("resnet", 39.6, "batch_size=1024")
    assert (refused.level, refused.found, refused.hint) == (
        "FAIL",
        "about 50.1 GiB needed by the model, NVIDIA X has 39.6 GiB",
        "--set batch_size=755, another global batch",
    )
    levels = [memory_check("resnet", 39.6, f"batch_size={size}").level for size in (755, 756)]
    assert levels == ["OK", "WARN"]
    with_accumulation = memory_check("resnet-pytorch", 39.6, "batch_size=1024").hint
    assert with_accumulation == "--set accumulation_steps=2, which keeps the global batch"


@pytest.mark.parametrize(("gib", "level"), [(39.6, "WARN"), (79.0, "OK"), (0.0, "OK")], ids=["near", "fits", "unknown"])
def test_memory_near_the_limit_is_a_warning(gib: float, level: str) -> None:
    assert memory_check("resnet-pytorch", gib, "precision=fp32").level == level


def test_memory_is_checked_for_runs_on_the_host() -> None:
    machine = dataclasses.replace(node.this_node(), gpus=(gpu(80.0),))
    target = Target(python=catalogue.paths.ROOT / "python")
    results = check(target, configured("resnet-pytorch", "batch_size=4096"), machine, [])
    assert [result.level for result in results if result.name == "GPU memory"] == ["FAIL"]
