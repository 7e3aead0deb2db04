"""The reader: every dialect, everything else that is in logs, and nothing that could break it."""

import gzip
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encore.results.audit.judge import audit_score
from encore.results.compliance import compliance, official
from encore.results.compliance.compliance import read_and_check, score_and_check
from encore.results.logs import parallel, reader
from encore.results.logs.reader import MAX_LINE, Event, parse_line, read_events
from encore.results.logs.run_log import read_run
from encore.results.scores.score import Score, find_sets, judge_folder, score_folder
from tests.results.mutants import check_mutant, mutate
from tests.results.result_logs import START_MS, mllog, resnet_v05, resnet_v07, write_set


def parsed(text: str | bytes, tmp_path: Path) -> list[Event]:
    path = tmp_path / "result_0.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_events(path))


def test_gzip_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    whole = gzip.compress(resnet_v07().encode())
    for length in (10, 30, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:length])
        assert read_run(path).minutes is None or length == len(whole) - 5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        ":::MLLOG",
        ":::MLLOG \n:::MLL \n:::MLPv0.5.0 \nMLPerf: ",
        ":::MLLOG null\n:::MLLOG []\n:::MLLOG 7\n",
        ':::MLLOG {"key": 3}\n:::MLLOG {"key": null, "time_ms": 1}\n',
        ':::MLLOG {"key": "a", "time_ms": NaN}\n:::MLLOG {"key": "a", "time_ms": 1e999}\n',
        ':::MLLOG {"key": "a", "time_ms": ' + "9" * 5000 + "}\n",
        ':::MLLOG {"key": "a", "time_ms": true, "metadata": [1], "namespace": {}}\n',
        ":::MLLOG " + "[" * 100_000 + "\n",
        ':::MLLOG {"key": "a", "value": ' + "[" * 5000 + "]" * 5000 + "}\n",
        ":::MLL 1.2.3 run_start: {}\n:::MLL 1 run_start: nothing\n",
        ":::MLPv0.5.0 resnet 1.2.3 (a:1) run_start\n:::MLPv0.5.0 resnet 1 (a:" + "1" * 5000 + ") run_start\n",
        "MLPerf: resnet [99/99/99 99:99:99], run_start\n",
        "::::MLLOG:::MLLOG:::MLL:::ML\n" * 3,
    ],
)
def test_foreign_text_never_raises(text: str, tmp_path: Path) -> None:
    for event in parsed(text, tmp_path):
        assert event.time_s is None or abs(event.time_s) < float("inf")
    assert read_run(tmp_path / "result_0.txt").minutes is None


def test_a_line_without_end_takes_constant_memory(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    with path.open("wb") as file:
        file.write(mllog("run_start").encode())
        file.write(b":::MLLOG {")
        for _ in range(64):
            file.write(b"x" * MAX_LINE)
        file.write(b"\n" + mllog("seed", 3).encode())
    tracemalloc.start()
    found = [(event.key, event.line) for event in read_events(path)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [("run_start", 1), ("seed", 3)]
    assert peak < 12 * MAX_LINE


@pytest.mark.parametrize("mark", ["", "MLPerf: resnet\n"])
@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_lines_across_blocks_are_read_as_lines(mark: str, end: str, tmp_path: Path) -> None:
    """Events at every place of a block's edge, at all numbers of lines, whichever way the block is looked through."""
    path, event = tmp_path / "result_0.txt", mllog("seed", 3).rstrip("\n")
    for shift in range(0, 2 * len(event), 7):
        noise = "x" * (reader._BLOCK - len(event) - len(mark) - len(end or "\n") + shift - len(event)) + "\n"
        path.write_bytes((mark + noise + event + (end or "\n") + "\n" + event + end).encode())
        number = mark.count("\n") + 2
        assert [(each.key, each.line) for each in read_events(path)] == [("seed", number), ("seed", number + 2)], shift


@pytest.mark.slow
def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    peaks = []
    for copies in (200, 2000):
        path = tmp_path / f"{copies}.txt"
        noise = "loss 0.1 images/s 2300\n" * 500
        path.write_text(resnet_v07() + (mllog("throughput", 1.0, START_MS + 1) * 20 + noise) * copies)
        tracemalloc.start()
        read_run(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.2


@pytest.mark.slow
@pytest.mark.parametrize("piece", [':::MLLOG {"a', ":::MLL 1 a: {'", ":::MLPv0.5.0 a 1 (", ":::MLLOG {'", ":::ML"])
def test_a_line_full_of_damaged_events_is_read_in_linear_time(piece: str) -> None:
    text = piece * (MAX_LINE // len(piece))
    start = time.process_time()
    list(parse_line(text))
    assert time.process_time() - start < 20


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("utf-8", "replace")))
def test_random_text_after_each_mark(text: str) -> None:
    for mark in (":::MLLOG ", ":::MLL ", ":::MLPv0.5.0 ", "MLPerf: ", ":::MLLOG {"):
        for event in parse_line(mark + text):
            assert isinstance(event.key, str)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), dialect=st.sampled_from(["v0.5", "v0.7"]))
def test_mutated_logs_are_refused_or_right(seed: int, dialect: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = resnet_v07(40.0) if dialect == "v0.7" else resnet_v05(134.0)
    original = text.encode()
    mutant = mutate(original, random.Random(seed))
    path = tmp_path_factory.mktemp("mutant") / "result_0.txt"
    check_mutant(original, mutant, 40.0 if dialect == "v0.7" else 134.0, path)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    prefix=st.sampled_from(["", "0: ", "[1]:::M", "MLPerf: ", "é \ufffd"]),
    suffix=st.sampled_from(["", "\r", " x", ":::ML", ':::MLLOG {"time_ms": 1', "MLPerf: a [", "\udc80"]),
    metadata=st.dictionaries(st.sampled_from(["lineno", "a"]), st.none() | st.integers() | st.text(max_size=5)),
)
def test_the_short_way_through_a_line_is_the_long_way(
    prefix: str, suffix: str, metadata: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    line = prefix + mllog("seed", None, **metadata).rstrip("\n") + suffix
    data = line.encode("utf-8", "surrogateescape")
    path = tmp_path_factory.getbasetemp() / "short.txt"
    path.write_bytes(data + b"\n" + data + b"\n")
    damaged: list[int] = []
    long = [list(parse_line(data.decode("utf-8", "replace"), number)) for number in (1, 2)]
    assert list(read_events(path, lambda number, _: damaged.append(number))) == [*long[0], *long[1]]
    assert damaged.count(1) == damaged.count(2)


@pytest.mark.slow
def test_many_seeds_are_read_in_linear_time(tmp_path: Path) -> None:
    taken = {}
    for name, seeds in (("one", [1] * 30_000), ("distinct", range(30_000))):
        path = tmp_path / f"{name}.txt"
        path.write_text("".join(mllog("seed", seed) for seed in seeds))
        start = time.process_time()
        run = read_run(path)
        taken[name] = time.process_time() - start
        assert len(run.seeds) == min(len(set(seeds)), 4096)
    assert taken["distinct"] < 4 * taken["one"]


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
    files = sorted(Path(sys.argv[1]).glob("*.txt"))
    try:
        for pid, name in parallel.map_files(read, files):
            print(pid != os.getpid(), name, flush=True)
    except EncoreError as error:
        print(error)
    except KeyboardInterrupt:
        print("interrupted")
"""
ROOT = Path(__file__).parents[2]


def start(folder: Path, sleep: float = 0.0) -> subprocess.Popen[str]:
    # A process of its own: pytest's has threads, and is therefore not forked.
    command = [sys.executable, "-c", READ, str(folder), str(sleep)]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def files(folder: Path, count: int) -> list[str]:
    names = [f"{number:02}.txt" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_text("x" * (1000 if number % 7 == 0 else 10))
    return names


def workers_left(folder: Path) -> list[int]:
    pids = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in _status(pid)]


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "\nState:\tZ"


def wait_for(condition, seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="reads in processes on two cores or more")


@needs_two_cores
def test_results_of_other_processes_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    names = files(tmp_path, 40)
    out, err = start(tmp_path).communicate(timeout=120)
    assert out.splitlines() == [f"True {name}" for name in names]
    assert err == ""


@needs_two_cores
def test_a_killed_worker_is_an_error_and_leaves_no_process(tmp_path: Path) -> None:
    files(tmp_path, 20)
    (tmp_path / "deadly.txt").touch()
    out, err = start(tmp_path).communicate(timeout=120)
    assert "a process that read logs was killed" in out
    assert err == ""
    assert wait_for(lambda: not workers_left(tmp_path))


@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    files(tmp_path, 100)
    process = start(tmp_path, 0.5)
    assert wait_for(lambda: len(workers_left(tmp_path)) > 1)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does for Ctrl-C
    else:
        process.kill()
    out, err = process.communicate(timeout=120)
    assert err == ""
    assert number == signal.SIGKILL or out.endswith("interrupted\n")
    assert wait_for(lambda: not workers_left(tmp_path))


def test_few_logs_are_read_in_this_process_and_their_bytes_counted(tmp_path: Path) -> None:
    names = files(tmp_path, 3)
    progress: list[tuple[int, int]] = []
    paths = [tmp_path / name for name in names]
    found = list(parallel.map_files(lambda path: (os.getpid(), path.name), paths, lambda *each: progress.append(each)))
    assert found == [(os.getpid(), name) for name in names]
    assert progress == [(1000, 1020), (1010, 1020), (1020, 1020)]


def test_score_and_check_are_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path / "resnet", [resnet_v07(minutes) for minutes in (40.0, 41.0, 42.0, 43.0, 44.0)])
    write_set(tmp_path / "other", [resnet_v07(40.0), "no event in here\n"])
    expected = [score.as_json() for score in score_folder(tmp_path)]
    found = [file for _, each in find_sets(tmp_path) for file in each]
    reports = [read_and_check(file)[1] for file in found]
    read: list[int] = []
    lines = reader._marked_lines

    def counted(*arguments):
        read.append(1)
        return lines(*arguments)

    monkeypatch.setattr(reader, "_marked_lines", counted)
    scores, again = score_and_check(tmp_path)
    assert [score.as_json() for score in scores] == expected
    assert again == reports
    assert any(report.findings for report in reports)
    assert len(read) == len(found) == 7


@needs_two_cores
def test_sets_are_judged_in_other_processes_as_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        logs = [resnet_v07(minutes + number) for minutes in (40.0, 41.0, 42.0, 43.0, 44.0)]
        write_set(tmp_path / f"{number:02}" / "resnet", logs)
    expected = [score.as_json(audit_score(score)) for score in score_folder(tmp_path)]
    monkeypatch.setattr(parallel, "_WORTHWHILE", 0)
    monkeypatch.setattr("encore.machine.node.cores", lambda: 2)
    pids = set()
    assert [found for found, pid in judge_folder(tmp_path, _judged) if not pids.add(pid)] == expected
    assert len(expected) == 20 and os.getpid() not in pids


def _judged(score: Score) -> tuple[dict[str, object], int]:
    return score.as_json(audit_score(score)), os.getpid()


def test_alternatives_have_one_order() -> None:
    collector = official._collector_class()("training", "6.0.0", False, False)
    for names in ("'block_stop' or 'epoch_stop'", "'epoch_stop' or 'block_stop'"):
        collector.put_message(f"Required AT_LEAST_ONE occurrence of {names}")
    ((_, message, _),) = collector.collected()
    assert message == "Required AT_LEAST_ONE occurrence of 'block_stop' or 'epoch_stop'"


def test_a_rule_file_is_parsed_once_and_a_rule_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlperf_logging.compliance_checker import mlp_compliance

    before = dict(vars(mlp_compliance))
    path = tmp_path / "result_0.txt"
    path.write_text(resnet_v07())
    compliance.check(path)
    monkeypatch.setattr("yaml.load", lambda *_, **__: pytest.fail("parsed again"))
    monkeypatch.setattr("builtins.compile", lambda *_, **__: pytest.fail("compiled again"))
    compliance.check(path)
    assert dict(vars(mlp_compliance)) == before
