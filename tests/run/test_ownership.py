"""Owners of an experiment: live ones are respected, dead ones replaced, and no file is written before that."""

import contextlib
import errno
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from encore import files
from encore.errors import EncoreError
from encore.machine import processes
from encore.run import control, hints, ownership, run_folder, status
from encore.run.run_folder import Experiment, ExperimentState, RunFolder
from encore.slurm import commands, queue
from tests.command_line import error_of, run_encore
from tests.results.result_logs import write_files
from tests.slurm.jobs import in_queue, job
from tests.trainings import make_run, wait_until


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path, [None, None], config={"lr": 1})


@pytest.fixture
def other(run: RunFolder) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "input()", "--output", str(run.path / "experiment_0")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


ELSEWHERE = ownership.Owner(host="elsewhere", pid=1, process_started=1, job="", cluster="", token="t")


def write_owner(experiment: Experiment, owner: ownership.Owner, age: float = 0.0) -> None:
    write_files(experiment.folder, {ownership.RECORD: asdict(owner)})
    os.utime(experiment.folder / ownership.RECORD, (time.time() - age,) * 2)


def write_heartbeat(experiment: Path, pid: int, started: int) -> None:
    now = time.time()
    write_files(experiment, {"heartbeat/rank_0": f"{pid} {platform.node()} 3 {now} {now} {started}"})


def assert_owned(run: RunFolder, message: str, job: str = "") -> None:
    with pytest.raises(EncoreError, match=message) as error:
        ownership.refuse_owned(run.experiments(), job)
    assert hints.cancel(run.path) in error.value.hint
    with pytest.raises(EncoreError, match=message), ownership.acquire(run.experiments()[0], job):
        pass


def assert_free(run: RunFolder, job: str = "") -> None:
    ownership.refuse_owned(run.experiments(), job)
    with ownership.acquire(run.experiments()[0], job) as owner:
        assert ownership.renew(run.experiments()[0], owner)
    assert not (run.path / "experiment_0" / ownership.RECORD).exists()


def test_live_process_of_this_host_owns_its_experiment(
    run: RunFolder, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, message = run.experiments()[0], rf"process {other.pid} on .* is running experiment 1"
    started, create_time = processes.start_ticks(other.pid), psutil.Process.create_time
    owner = replace(ELSEWHERE, host=platform.node(), pid=other.pid, process_started=started)
    write_owner(experiment, owner, age=10_000)
    assert_owned(run, message)
    # The clock was set after the start
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + 90)
    assert_owned(run, message)
    write_owner(experiment, replace(owner, process_started=started - 60))  # another process with the same number
    assert_free(run)
    write_owner(experiment, owner)
    experiment.set_state(ExperimentState(status="reached"))
    ownership.refuse_owned(run.experiments())  # finished: nobody runs it
    experiment.set_state(ExperimentState(status="interrupted"))
    other.kill()
    wait_until(lambda: psutil.Process(other.pid).status() == psutil.STATUS_ZOMBIE, "the end of the process")
    assert_free(run)


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
def test_process_of_another_host_owns_its_experiment_while_it_renews_the_record(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    # Whatever the other host's clock says
    experiment, ages = run.experiments()[0], itertools.count(-ahead, -5)
    owner = replace(ELSEWHERE, token=f"alive {ahead}")
    write_owner(experiment, owner, next(ages))
    # Not in the module time: other threads of this process sleep, too
    clock = {"time": time.time, "monotonic": time.monotonic}
    renew = SimpleNamespace(**clock, sleep=lambda _: write_owner(experiment, owner, next(ages)))
    with monkeypatch.context() as patch:
        patch.setattr(ownership, "time", renew)
        assert_owned(run, "process 1 on elsewhere is running experiment 1")
    monkeypatch.setattr(ownership, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(ownership, "WATCH_SECONDS", 0.01)
    write_owner(experiment, replace(owner, token=f"silent {ahead}"), -ahead)
    assert_free(run)


@pytest.mark.parametrize("source", ["first job", "resuming job", "job of another cluster"])
@pytest.mark.parametrize(("state", "refused"), [("PENDING", True), ("COMPLETING", True), ("CANCELLED", False)])
def test_job_in_the_queue_owns_its_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, source: str, state: str, refused: bool
) -> None:
    # After a requeue the run has no process and no record
    name, comment = ("31", f"encore:{run.path.parent}|{run.path.name}") if source == "resuming job" else ("29", "")
    place = "far" if source == "job of another cluster" else "here"
    run.experiments()[0].set_state(ExperimentState(status="interrupted", job="29", cluster=place))
    queued = [replace(job(name, state, "BeginTime", user="somebody", comment=comment), partition="debug")]
    in_queue(monkeypatch, *(([], queued) if place == "far" else (queued,)))
    message = f"job {name} of .*, of somebody, .*{run.path.name}"
    with pytest.raises(EncoreError, match=message) if refused else contextlib.nullcontext() as error:
        status.refuse_queued(run, run.experiments())
    assert error is None or error.value.hint.endswith(f"encore cancel {name}")
    status.refuse_queued(run, run.experiments(), job=name)


@pytest.mark.parametrize(
    ("private", "user", "refused"), [("jobs,usage", 1, True), ("usage", 1, False), ("all", 0, False)]
)
def test_job_hidden_by_slurm_owns_its_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, private: str, user: int, refused: bool
) -> None:
    run.experiments()[0].set_state(ExperimentState(status="interrupted", job="29", cluster="here"))
    in_queue(monkeypatch, [])
    monkeypatch.setattr(queue, "this_user", lambda: "somebody")
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(commands, "setting", {"PrivateData": private}.get)
    with pytest.raises(EncoreError, match="job 29 of cluster here") if refused else contextlib.nullcontext():
        status.refuse_queued(run, run.experiments())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("RUNNING", "job 29 is running experiment 1"),
        ("COMPLETING", "job 29 is running experiment 1"),
        ("PENDING", "job 29 is queued to resume experiment 1"),
        ("FAILED", ""),
        (None, ""),
    ],
)
def test_job_of_the_record_owns_its_experiment(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, state: str | None, message: str
) -> None:
    in_queue(monkeypatch, [job("29", state)] if state else [])
    write_owner(run.experiments()[0], replace(ELSEWHERE, job="29"))
    if message:
        assert_owned(run, message, job="30")
    assert_free(run, job="29" if message else "30")  # 29: the job itself after a requeue


def test_owner_renews_its_record_and_notices_another_owner(run: RunFolder) -> None:
    experiment, before = run.experiments()[0], time.time()
    record = experiment.folder / ownership.RECORD
    with ownership.acquire(experiment, "") as owner:
        for age in (ownership.RENEWED_SECONDS + 1, -3600):  # of a file server with another clock
            write_owner(experiment, owner, age=age)
            assert ownership.renew(experiment, owner) and before <= record.stat().st_mtime <= time.time()
        record.unlink()
        assert ownership.renew(experiment, owner), "an unreadable record is not another owner's"
        write_owner(experiment, replace(owner, token="another"))
        assert not ownership.renew(experiment, owner)
    assert json.loads(record.read_text())["token"] == "another"


def test_ranks_without_supervisor_are_cancelled(
    run: RunFolder, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = run.experiments()[0]
    experiment.set_state(ExperimentState(status="running", started=files.utc_now()))
    write_heartbeat(experiment.folder, other.pid, processes.start_ticks(other.pid))
    assert_owned(run, f"processes of experiment 1 still run here without their supervisor: {other.pid}")
    # Nothing is waited for but the end of the process: a second wait raises StopIteration
    waits = iter([other.wait])
    monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: next(waits)()))
    subject = control.find_subject(str(run.path), run.path.parent)
    assert control.cancel(subject)[0] == "cancelled experiment 1: its unsupervised ranks have exited"
    # The ranks may also end by themselves between the message that names this command and the command
    assert control.cancel(subject) == [
        "nothing to cancel in experiment 1: its ranks have ended",
        f"resume with: {hints.resume(run.path)}",
    ]


@pytest.mark.parametrize("difference", ["none", "start time", "command line", "user"])
def test_only_processes_of_the_run_are_signalled(
    run: RunFolder, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, difference: str
) -> None:
    # A heartbeat and a launcher's record may be forged, or name a PID that was reused
    folder = run.experiments()[difference == "command line"].folder
    started = processes.start_ticks(other.pid) + (difference == "start time")
    write_heartbeat(folder, other.pid, started)
    (folder / processes.LAUNCHER).write_text(f"{other.pid} {platform.node()} {started}")
    if difference == "user":
        monkeypatch.setattr(psutil.Process, "uids", lambda process: SimpleNamespace(real=os.geteuid() + 1))
    left = [process.pid for process in processes.left_running(folder)]
    assert left == ([other.pid] if difference == "none" else [])
    assert processes.signal_ranks(folder / "heartbeat", signal.SIGCONT) == len(left)


COMMANDS = (["cancel"], ["run", "--resume"], ["run", "--dry-run", "--resume"], ["submit", "--dry-run", "--resume"])


@pytest.mark.parametrize("command", [*COMMANDS, ["sweep", "--resume"], ["study", "run", "--resume"]])
def test_folder_of_another_user_is_rejected(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    (run.path / "study.json").write_text("{}")
    user, before = os.geteuid(), sorted(run.path.rglob("*"))
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    error = error_of(*command, run.path)
    assert f"{run.path} belongs to" in error.found and "--trust-owner" in error.hint
    assert "belongs to" not in str(run_encore(*command, run.path, "--trust-owner").exception)
    assert sorted(run.path.rglob("*")) == before


def foreign_python(run: Path) -> None:
    (run / "python").touch()
    os.chown(run / "python", 65534, -1)
    run_folder.write_metadata(run, {**files.read_json(run / "run.json"), "python": {"file": str(run / "python")}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: None, ""),
        (lambda run: run.chmod(0o777), "all users can change"),
        (lambda run: (run / "experiment_1" / "config.json").chmod(0o666), "config.json"),
        pytest.param(
            foreign_python,
            "run.json names .*python, which belongs to",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
        ),
    ],
)
def test_folder_that_others_can_change_is_rejected(
    run: RunFolder, change: Callable[[Path], object], message: str
) -> None:
    change(run.path)
    with pytest.raises(EncoreError, match=message) if message else contextlib.nullcontext():
        run_folder.refuse_foreign(run.path)
    run_folder.refuse_foreign(run.path, trust_owner=True)


def test_state_is_not_written_through_symbolic_links(run: RunFolder, tmp_path: Path) -> None:
    victim, experiment = write_files(tmp_path, {"victim": "precious"}) / "victim", run.experiments()[0]
    experiment.log.write_text("log")
    names = ("state.json", ".state.json.writing", processes.LAUNCHER, ownership.LOCK, ownership.RECORD)
    for name in (*names, "../result_0.txt", "../result_0.writing"):
        (experiment.folder / name).symlink_to(victim)
    experiment.set_state(ExperimentState(status="reached"))
    experiment.publish_log()
    processes.note_launcher(experiment.folder, 1)
    with pytest.raises(EncoreError, match="cannot be written"), ownership.acquire(experiment, ""):
        pass
    contents = (victim.read_text(), experiment.result.read_text(), experiment.state().status)
    assert contents == ("precious", "log", "reached")


def test_folder_that_cannot_be_written_is_refused(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = run.experiments()[0]
    lock, before = experiment.folder / ownership.LOCK, {*experiment.folder.iterdir()}
    monkeypatch.setattr(files.os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(EncoreError, match="cannot be written: No space left"), ownership.acquire(experiment, ""):
        pass
    assert {*experiment.folder.iterdir()} == {*before, lock}
    lock.unlink()
    lock.mkdir()  # cannot be opened, not even by root
    with pytest.raises(EncoreError, match="cannot be written: Is a directory"), ownership.acquire(experiment, ""):
        pass


CLAIM = """
import sys
from pathlib import Path
from encore.errors import EncoreError
from encore.run import ownership
from encore.run.run_folder import Experiment
try:
    with ownership.acquire(Experiment(0, Path(sys.argv[1])), ''):
        print('owner', flush=True)
        input()
except EncoreError:
    print('refused', flush=True)
"""


@pytest.mark.slow
def test_one_of_many_concurrent_claims_succeeds(run: RunFolder) -> None:
    command, pipe = [sys.executable, "-c", CLAIM, str(run.experiments()[0].folder)], subprocess.PIPE
    children = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(6)]
    lines = [child.stdout.readline().strip() for child in children if child.stdout is not None]
    assert not any(child.communicate("\n")[0] for child in children)
    assert sorted(lines) == ["owner", *["refused"] * 5]


def write(file: str, text: str) -> Callable[[Path], object]:
    return lambda run: (run / file).write_text(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: (run / "experiment_1").rename(run / "gone"), "experiment_1 is missing"),
        (lambda run: (run / "experiment_2").mkdir(), "has experiment_2, and 2 seeds"),
        (
            write("experiment_1/config.json", '{"lr": 1, "seed": 9}'),
            "experiment_1 has a config.json that does not match",
        ),
        (lambda run: (run / "experiment_0" / "config.json").unlink(), "has no config.json"),
        (write("result_0.txt", ""), "has a result but no state.json"),
        (write("experiment_0/result.txt", ':::MLLOG {"key": "run_stop"}'), "has a result but no state.json"),
        (write("experiment_0/state.json", "{"), "cannot be read"),
        (write("experiment_0/state.json", '{"status": "fine"}'), "does not contain the state"),
        (write("run.json", '{"seeds": [5, 6]}'), "has schema None"),
        (write("run.json", '{"schema": 2}'), "has schema 2"),
        (write("run.json", '{"schema": 3, "seeds": [5, 6]}'), "lacks name, round, nodes, data, configuration, sha256"),
        (
            lambda run: (run / "run.json").write_text((run / "run.json").read_text().replace(" 6\n", " 7\n")),
            "was changed after it was written",
        ),
    ],
)
def test_damaged_run_folder_is_refused(run: RunFolder, change: Callable[[Path], object], message: str) -> None:
    run.check_whole()
    change(run.path)
    with pytest.raises(EncoreError, match=message) as error:
        run.check_whole()
    assert error.value.hint


def test_concurrent_runs_get_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three processes that look for a free name before any of them has created its folder
    names = ["same", "same-2", "same-3"]
    for number in range(3):
        answers = map(tmp_path.joinpath, names)
        monkeypatch.setattr(run_folder, "free_name", lambda results, name, answers=answers: next(answers))
        run_folder.create(tmp_path, "x", lambda path: {"schema": 2, "path": path.name}, {}, {}, [number])
    assert [files.read_json(tmp_path / name / "run.json")["path"] for name in names] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == names
