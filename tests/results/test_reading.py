"""The reader of logs: damaged and foreign text, memory, and reading in several processes."""

import gzip
import os
import random
import signal
import subprocess
import sys
import threading
import tracemalloc
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from encore.results.audit.audit import audit_score
from encore.results.logs import parallel, reader
from encore.results.logs.reader import MAX_LINE, parse_line, read_events
from encore.results.logs.run_log import Reason, read_run
from encore.results.scores.score import Score, judge_folder, score_folder, score_runs
from tests import bombs
from tests.results.result_logs import mllog, mutate, resnet_v05, resnet_v07, write_files, write_set
from tests.trainings import wait_until


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "result_0.txt"


@pytest.mark.parametrize(("end", "minutes"), [(10, None), (30, None), (-300, None), (-5, 40.0)])
def test_truncated_gzip(end: int, minutes: float | None, log: Path) -> None:
    log.write_bytes(gzip.compress(resnet_v07().encode(), mtime=0)[:end])
    assert read_run(log).minutes == minutes


# A quadratic search would take hours here.
@pytest.mark.slow
@pytest.mark.parametrize("piece", [':::MLLOG {"a', ":::MLL 1 a: {'", ":::MLPv0.5.0 a 1 (", ":::MLLOG {'", ":::ML"])
def test_line_full_of_damaged_events(piece: str) -> None:
    assert [*parse_line(piece * (MAX_LINE // len(piece)))] == []


def test_line_without_end_takes_constant_memory(log: Path) -> None:
    log.write_text(f"{mllog('run_start')}:::MLLOG {{{'x' * 64 * MAX_LINE}\n{mllog('seed', 3)}")
    tracemalloc.start()
    events = [(event.key, event.line) for event in read_events(log)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (events, peak < 12 * MAX_LINE) == ([("run_start", 1), ("seed", 3)], True)


@pytest.mark.parametrize("piece", [b"\n", b"x"])
def test_compressed_log_of_a_gibibyte_is_rejected(piece: bytes, log: Path) -> None:
    log.write_bytes(bombs.compressed(piece, resnet_v07().encode()))
    with bombs.is_fast():
        run, has_mark = read_run(log), reader.has_mark(log)
    assert (has_mark, run.minutes, run.reason) == (True, None, Reason.UNREADABLE)
    assert "its content has more than" in run.explanation


@pytest.mark.parametrize(("mark", "end"), [*product(["", "MLPerf: resnet\n"], ["\n", "\r\n", ""])])
def test_lines_across_blocks(mark: str, end: str, log: Path) -> None:
    # Events at every seventh place of a block's edge; a mark of another dialect switches the search
    event, number = mllog("seed", 3).rstrip("\n"), mark.count("\n") + 2
    for shift in range(0, 2 * len(event), 7):
        noise = "x" * (reader._BLOCK - len(event) - len(mark) - len(end or "\n") + shift - len(event)) + "\n"
        log.write_bytes((mark + noise + event + (end or "\n") + "\n" + event + end).encode())
        assert [(found.key, found.line) for found in read_events(log)] == [("seed", number), ("seed", number + 2)]


PREFIXES = ("", "0: ", "[1]:::M", "MLPerf: ", "é \ufffd")
SUFFIXES = ("", "\r", " x", ":::ML", ':::MLLOG {"time_ms": 1', "MLPerf: a [", "\udc80")


@pytest.mark.parametrize(("prefix", "suffix"), [*product(PREFIXES, SUFFIXES)])
def test_fast_and_slow_parser_agree(prefix: str, suffix: str, log: Path) -> None:
    metadata = ({}, {"lineno": None}, {"lineno": "x"}, {"a": -7})
    lines = [
        (prefix + mllog("seed", None, **values).rstrip("\n") + suffix).encode("utf-8", "surrogateescape")
        for values in metadata
        for _ in (1, 2)
    ]
    log.write_bytes(b"\n".join([*lines, b""]))
    damaged: list[int] = []
    events = [*read_events(log, lambda number, _: damaged.append(number))]
    decoded = [line.decode("utf-8", "replace") for line in lines]
    assert events == [event for number, line in enumerate(decoded, 1) for event in parse_line(line, number)]
    assert [number + 1 for number in damaged[::2]] == damaged[1::2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "round_", "minutes"), [(resnet_v07(40.0), "v0.7", 40.0), (resnet_v05(134.0), "v0.5", 134.0)]
)
def test_mutated_logs_are_rejected_or_right(text: str, round_: str, minutes: float, log: Path) -> None:
    times = {line for line in text.encode().split(b"\n") if b"run_start" in line or b"run_stop" in line}
    for seed in range(200):
        mutant = mutate(text.encode(), random.Random(seed))
        log.write_bytes(mutant)
        run = read_run(log, round_)
        audit_score(score_runs(log.parent, [run]))
        is_same = times == {line for line in mutant.split(b"\n") if b"run_start" in line or b"run_stop" in line}
        assert bool(run.reason) if run.minutes is None else not is_same or run.minutes == pytest.approx(minutes)


# --- several processes ------------------------------------------------------------------------------------

READ = """
import os, signal, sys, time
from pathlib import Path
from encore.results.logs import parallel
from encore.errors import EncoreError

parallel._WORTHWHILE = 0

def read(path):
    (path.parent / f"pid-{os.getpid()}").touch()
    if path.name == "deadly.txt":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(sys.argv[2]))
    return os.getpid(), path.name

if __name__ == "__main__":
    try:
        for pid, name in parallel.map_files(read, sorted(Path(sys.argv[1]).glob("*.txt"))):
            print(pid != os.getpid(), name, flush=True)
    except EncoreError as error:
        print(error)
    except KeyboardInterrupt:
        print("interrupted")
"""
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="reads in processes on two cores or more")


def start_reader(folder: Path, sleep: float = 0.0) -> subprocess.Popen[str]:
    # Not this process: it has threads, and is therefore not forked
    command = [sys.executable, "-c", READ, str(folder), str(sleep)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], start_new_session=True, **pipes)


def write_numbered(folder: Path, count: int) -> list[str]:
    files = {f"{number:02}.txt": "x" * (1000 if number % 7 == 0 else 10) for number in range(count)}
    write_files(folder, files)
    return [*files]


def workers(folder: Path) -> list[psutil.Process]:
    # Processes that have read a file and still run
    processes = [each for each in psutil.process_iter(["status"]) if (folder / f"pid-{each.pid}").exists()]
    return [process for process in processes if process.info["status"] != psutil.STATUS_ZOMBIE]


@needs_two_cores
def test_killed_worker_is_an_error_and_leaves_no_process(tmp_path: Path) -> None:
    write_numbered(tmp_path, 20)
    (tmp_path / "deadly.txt").touch()
    out, err = start_reader(tmp_path).communicate(timeout=300)
    assert ("a process that read logs was killed" in out, err) == (True, "")
    wait_until(lambda: not workers(tmp_path), "no worker is left")


@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    write_numbered(tmp_path, 100)
    process = start_reader(tmp_path, 0.5)
    wait_until(lambda: len(workers(tmp_path)) > 1, "two workers have read a file")
    # A terminal sends Ctrl-C to the process group
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=300)
    assert (err, number == signal.SIGKILL or out.endswith("interrupted\n")) == ("", True)
    wait_until(lambda: not workers(tmp_path), "no worker is left")


def judge(score: Score) -> tuple[dict[str, object], int]:
    return score.as_json(audit_score(score)), os.getpid()


@needs_two_cores
def test_sets_are_judged_in_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        write_set(tmp_path / f"{number:02}" / "resnet", [resnet_v07(minutes + number) for minutes in (40.0, 41.0)])
    expected = [judge(score)[0] for score in score_folder(tmp_path)]
    monkeypatch.setattr(parallel, "_WORTHWHILE", 0)
    monkeypatch.setattr("encore.machine.node.cores", lambda: 2)
    # Threads of earlier tests in this process, such as heartbeats, would prevent the fork
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    progress = Mock()
    results, pids = zip(*judge_folder(tmp_path, judge, on_read=progress), strict=True)
    assert [*results] == expected and len(expected) == 20 and os.getpid() not in pids
    assert progress.call_count == 20
