"""Measurements of bench.py: ratios of alternating loops, a choice of loops, and a loop that fails."""

from collections.abc import Callable

import pytest

from benchmarks.common.checks import bench
from benchmarks.common.data.problem import Problem


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
    flops = {"bare": 5e9, "synthetic": 6e9}
    subject = bench.Subject("a", 10, loops, samples={"synthetic": 20}, flops=flops)
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
