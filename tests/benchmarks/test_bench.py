"""How bench.py measures: ratios of loops that take turns, and a loop that fails."""

import pytest

from benchmarks.common.checks import bench
from benchmarks.common.data.problem import Problem


def nothing() -> None:
    """Stand in for a framework's wait for its device."""


def test_each_loop_is_held_against_the_bare_one_of_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine becomes slower from turn to turn, which a ratio must not show."""
    clock = {"time": 0.0, "pace": 1.0}
    monkeypatch.setattr(bench.time, "time", lambda: clock["time"])

    def slow(count: int) -> None:
        clock["pace"] *= 1.5
        clock["time"] += 4 * count * clock["pace"]

    def fast(count: int) -> float:
        clock["time"] += count * clock["pace"]
        return 0.25

    loops = {"bare": slow, "synthetic": fast, "real": fast, "input": fast}
    flops = {"bare": 5e9, "synthetic": 6e9}
    subject = bench.Subject("a", 10, loops, samples={"synthetic": 20}, flops=flops)
    measured, share = bench.measure(subject, nothing, 4, 3)
    assert [measured[name]["ratio"] for name in loops] == pytest.approx([1.0, 8.0, 4.0, 4.0])
    assert {name: each.get("flops_per_sample") for name, each in measured.items()} == {
        "bare": 5e8, "synthetic": 3e8, "real": None, "input": None,
    }  # fmt: skip
    assert measured["synthetic"]["flops_per_second"] == pytest.approx(6e9 / 20 * measured["synthetic"]["median"])
    assert measured["bare"]["median"] == pytest.approx(10 / (4 * 1.5**3))
    assert measured["bare"]["most"] / measured["bare"]["least"] == pytest.approx(1.5**2)
    assert share == 0.25


def test_some_loops_alone() -> None:
    def fails(count: int) -> None:
        raise RuntimeError("not asked for")

    loops = {"bare": fails, "real": fails, "evaluation": bench.repeated(nothing)}
    measured, share = bench.measure(bench.Subject("a", 10, loops), nothing, 1, 1, ["evaluation"])
    assert (list(measured), share) == (["evaluation"], None)
    assert measured["evaluation"]["ratio"] is None, "of a bare loop that was not measured"
    with pytest.raises(Problem, match=r"no loop sythetic\n  expected: bare, real, evaluation"):
        bench.refuse_unknown(bench.Subject("a", 10, loops), ["real", "sythetic"])


def test_a_loop_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(count: int) -> None:
        raise RuntimeError("an illegal memory access")

    loops = {"bare": bench.repeated(nothing), "real": fails, "input": fails}
    with pytest.raises(RuntimeError, match="illegal"):
        bench.measure(bench.Subject("a", 1, loops, {"real": "our step"}), nothing, 4, 1)
    assert capsys.readouterr().err == "failed: our step\n"
