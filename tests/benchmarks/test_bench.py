"""How bench.py measures: ratios of loops that take turns, and a loop that fails."""

from __future__ import annotations

import time

import pytest

from benchmarks.common import bench


def nothing() -> None:
    """Stand in for a framework's wait for its device."""


def test_each_loop_is_held_against_the_bare_one_of_its_turn() -> None:
    def slow(count: int) -> None:
        time.sleep(0.02 * count)

    def fast(count: int) -> float:
        time.sleep(0.005 * count)
        return 0.25

    loops = {"bare": slow, "synthetic": fast, "real": fast, "input": fast}
    measured, share = bench.measure(bench.Subject("a", 10, loops), nothing, 4, 3)
    assert measured["bare"]["ratio"] == 1.0
    assert 1.5 < measured["real"]["ratio"] < 4.5
    assert measured["bare"]["least"] <= measured["bare"]["median"] <= 10 / 0.02
    assert share == 0.25


def test_a_loop_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(count: int) -> None:
        raise RuntimeError("an illegal memory access")

    loops = {"bare": bench.repeated(nothing), "real": fails, "input": fails}
    with pytest.raises(RuntimeError, match="illegal"):
        bench.measure(bench.Subject("a", 1, loops, {"real": "our step"}), nothing, 4, 1)
    assert capsys.readouterr().err == "failed: our step\n"
