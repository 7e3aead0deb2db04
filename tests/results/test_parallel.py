"""Reading on all cores: the same results in the same order, and a clean end whatever happens to a process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from encore.results.compliance import compliance
from encore.results.compliance.compliance import read_and_check, score_and_check
from encore.results.logs import parallel, reader
from encore.results.scores.score import find_sets, score_folder
from tests.results.result_logs import resnet_v07, write_set

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
    lines = reader._lines

    def counted(*arguments):
        read.append(1)
        return lines(*arguments)

    monkeypatch.setattr(reader, "_lines", counted)
    scores, again = score_and_check(tmp_path)
    assert [score.as_json() for score in scores] == expected
    assert again == reports
    assert any(report.findings for report in reports)
    assert len(read) == len(found) == 7


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
