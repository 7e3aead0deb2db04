"""The lines of a rank's step times, from threads that work, wait and fetch."""

import hashlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.run import step_times
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.step_times import StepTimes
from benchmarks.common.run.timing import InputWait

RANKS = Ranks(3, 4, 1, 2, None)
WAIT = InputWait()
BLOCK = bytes(2**22)


def compute(is_over: Callable[[], bool]) -> None:
    # Outside of the interpreter's lock, as the threads of libraries do: one that waits for the lock sleeps.
    while not is_over():
        hashlib.sha256(BLOCK)


def compute_for(seconds: float) -> None:
    end = time.process_time() + seconds
    compute(lambda: time.process_time() >= end)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text(encoding="utf-8").splitlines()]


def measured(folder: Path, step: Callable[[StepTimes], None], communicating: set[str] | None) -> dict[str, Any]:
    times = StepTimes(folder / "steps", RANKS, WAIT, communicating)
    times.start()
    for number in range(4):
        step(times)
        times.add(range(2 * number, 2 * number + 2))
    times.end()
    (found,) = lines(folder / "steps" / "rank_3.jsonl")
    return found


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "SAMPLE_SECONDS", 0.05)
    # One line each, however slow the machine is at that moment.
    monkeypatch.setattr(step_times, "FIRST_SECONDS", 600.0)


def idle(times: StepTimes) -> None:
    time.sleep(0.3)


def others() -> set[str]:
    # What other tests of this process have left does not belong to the rank.
    mine = str(threading.get_native_id())
    return step_times.threads() - {mine}


def seen(folder: Path, measure: Callable[[Path], bool]) -> None:
    # What others do on these cores can hide it, but not always.
    assert any(measure(folder / f"attempt_{number}") for number in range(10))


def test_a_rank_that_computes_does_not_wait_and_one_that_sleeps_does(tmp_path: Path) -> None:
    def shows(folder: Path) -> bool:
        busy = measured(folder / "busy", lambda times: compute_for(0.3), others())
        waits = measured(folder / "waits", idle, others())
        is_clear = bool(busy["waiting"] < 0.3 < 0.7 < waits["waiting"])
        return is_clear and busy["cpu"] > 0.5 and waits["cpu"] < busy["cpu"]

    seen(tmp_path, shows)
    for found in (lines(path)[0] for path in tmp_path.glob("*/*/steps/rank_3.jsonl")):
        assert (found["step"], found["steps"], found["local_rank"]) == (8, 8, 1)
        assert 0.1 < found["median"] <= found["p99"]


def test_a_rank_that_fetches_waits_for_data_and_not_for_others(tmp_path: Path) -> None:
    def fetch(times: StepTimes) -> None:
        with times.fetching():
            WAIT.fetch(lambda: time.sleep(0.3))

    def shows(folder: Path) -> bool:
        found = measured(folder, fetch, others())
        return bool(found["waiting"] < 0.2 and found["input"] > 0.8)

    seen(tmp_path, shows)


def test_threads_of_a_library_that_spin_are_no_work(tmp_path: Path) -> None:
    ends = threading.Event()
    spinning = threading.Thread(target=compute, args=(ends.is_set,))
    spinning.start()
    assert spinning.native_id is not None
    excluded = others() | {str(spinning.native_id)}

    def shows(folder: Path) -> bool:
        counted = measured(folder / "counted", idle, excluded - {str(spinning.native_id)})
        waits = measured(folder / "excluded", idle, excluded)
        return bool(counted["waiting"] < 0.3 < 0.5 < waits["waiting"])

    try:
        seen(tmp_path, shows)
    finally:
        ends.set()
        spinning.join()


def test_threads_of_a_rank_on_a_gpu_say_nothing(tmp_path: Path) -> None:
    found = measured(tmp_path, idle, None)
    assert (found["waiting"], found["input"]) == (None, 0.0) and found["steps"] == 8


def test_a_line_comes_while_the_training_lasts_and_none_without_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_times, "FIRST_SECONDS", 0.05)
    times, path = StepTimes(tmp_path, RANKS, WAIT, set()), tmp_path / "rank_3.jsonl"
    time.sleep(0.2)
    assert lines(path) == []
    times.start()
    times.add(range(1))
    end = time.monotonic() + 60
    while not lines(path) and time.monotonic() < end:
        time.sleep(0.02)
    assert [found["steps"] for found in lines(path)] == [1]
    times.end()
    assert len(lines(path)) == 1
