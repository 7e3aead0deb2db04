"""Who runs an experiment: the living are left alone, the dead are taken over, nothing is written before it is known."""

import contextlib
import errno
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from encore import files, paths
from encore.errors import EncoreError
from encore.machine import processes
from encore.run import control, hints, ownership, run_folder, status
from encore.run.run_folder import Experiment, ExperimentState, RunFolder
from encore.slurm import commands, queue
from tests.run_folders import made
from tests.slurm.jobs import in_queue, job


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return made(tmp_path, [None, None], config={"lr": 1})


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def owner_of(process: subprocess.Popen[bytes]) -> ownership.Owner:
    started = processes.started(process.pid)
    return ownership.Owner(
        host=platform.node(), pid=process.pid, process_started=started, job="", cluster="", token="t"
    )


def written(experiment: Experiment, owner: ownership.Owner, age: float = 0.0) -> None:
    record = experiment.folder / ownership.RECORD
    record.write_text(json.dumps(asdict(owner)), encoding="utf-8")
    os.utime(record, (time.time() - age, time.time() - age))


def is_refused(run: RunFolder, said: str, job: str = "") -> None:
    with pytest.raises(EncoreError, match=said) as caught:
        ownership.refuse_owned(run.experiments(), job)
    assert hints.cancel(run.path) in caught.value.hint
    with pytest.raises(EncoreError, match=said), ownership.owned(run.experiments()[0], job):
        pass


def is_free(run: RunFolder, job: str = "") -> None:
    ownership.refuse_owned(run.experiments(), job)
    with ownership.owned(run.experiments()[0], job) as mine:
        assert ownership.renew(run.experiments()[0], mine)
    assert not (run.path / "experiment_0" / ownership.RECORD).exists()


def test_a_living_process_of_this_host_keeps_its_experiment(
    run: RunFolder, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = owner_of(other)
    written(run.experiments()[0], owner, age=10_000)
    is_refused(run, rf"process {other.pid} on .* is running experiment 1")
    with monkeypatch.context() as patch:  # the clock was set since it started
        create_time = psutil.Process.create_time
        patch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + 90)
        is_refused(run, rf"process {other.pid} on .* is running experiment 1")
    # The number belongs to another process by now.
    written(run.experiments()[0], replace(owner, process_started=owner.process_started - 60))
    is_free(run)
    written(run.experiments()[0], owner)
    run.experiments()[0].set_state(ExperimentState(status="reached"))
    ownership.refuse_owned(run.experiments())  # a finished experiment has no owner that matters
    run.experiments()[0].set_state(ExperimentState(status="interrupted"))
    other.kill()
    while psutil.Process(other.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    is_free(run)  # although nobody has waited for it
    other.wait()
    is_free(run)


@pytest.mark.parametrize("clock", [-3600.0, 0.0, 3600.0], ids=["behind", "same", "ahead"])
def test_another_host_is_believed_while_its_record_changes(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, clock: float
) -> None:
    # Whatever the other host's clock says
    experiment = run.experiments()[0]
    owner = ownership.Owner(host="elsewhere", pid=1, process_started=1, job="", cluster="", token=f"lives {clock}")
    age = -clock
    written(experiment, owner, age)

    def renewed(seconds: float) -> None:
        nonlocal age
        age -= 5
        written(experiment, owner, age)

    with monkeypatch.context() as patch:
        # Not of the module time itself: other threads of this process sleep, too.
        patch.setattr(ownership, "time", SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=renewed))
        is_refused(run, "process 1 on elsewhere is running experiment 1")
    monkeypatch.setattr(ownership, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(ownership, "WATCH_SECONDS", 0.01)
    written(experiment, replace(owner, token=f"silent {clock}"), -clock)
    is_free(run)


@pytest.mark.parametrize("whose", ["its own", "one that resumes it", "another cluster's"])
@pytest.mark.parametrize(("state", "refused"), [("PENDING", True), ("COMPLETING", True), ("CANCELLED", False)])
def test_a_job_in_the_queue_owns_its_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, whose: str, state: str, refused: bool
) -> None:
    # After a requeue no process has the run, and no record is there
    cluster = "far" if whose == "another cluster's" else "here"
    run.experiments()[0].set_state(ExperimentState(status="interrupted", job="29", cluster=cluster))
    found = replace(job("29", state, "BeginTime", user="somebody"), partition="debug")
    if whose == "one that resumes it":
        found = replace(found, name="31", number="31", comment=f"encore:{run.path.parent}|{run.path.name}")
    in_queue(monkeypatch, *(([found],) if cluster == "here" else ([], [found])))
    if refused:
        with pytest.raises(EncoreError, match=f"job {found.name} of .*, of somebody, .*{run.path.name}") as caught:
            status.refuse_queued(run, run.experiments())
        assert "encore cancel" in caught.value.hint.replace(str(paths.ROOT / ".venv" / "bin") + "/", "")
    else:
        status.refuse_queued(run, run.experiments())
    status.refuse_queued(run, run.experiments(), job=found.name if whose != "another cluster's" else "29")


@pytest.mark.parametrize(
    ("private", "user", "refused"), [("jobs,usage", 1, True), ("usage", 1, False), ("all", 0, False)]
)
def test_a_job_that_slurm_hides_keeps_its_run(
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
    ("state", "said"),
    [
        ("RUNNING", "job 29 is running experiment 1"),
        ("COMPLETING", "job 29 is running experiment 1"),
        ("PENDING", "job 29 waits in the queue to resume experiment 1"),
        ("FAILED", ""),
        (None, ""),
    ],
)
def test_a_slurm_job_is_asked_for(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, state: str | None, said: str
) -> None:
    in_queue(monkeypatch, [job("29", state)] if state else [])
    owner = ownership.Owner(host="n2", pid=1, process_started=0, job="29", cluster="", token="t")
    written(run.experiments()[0], owner)
    if said:
        is_refused(run, said, job="30")
        written(run.experiments()[0], owner)
    # The job itself, after a requeue.
    is_free(run, job="30" if not said else "29")


def test_an_owner_renews_its_record_and_notices_that_it_was_taken_over(run: RunFolder) -> None:
    experiment = run.experiments()[0]
    record = experiment.folder / ownership.RECORD
    with ownership.owned(experiment, "") as mine:
        # The third: of a file server with another clock.
        for age in (0.0, ownership.RENEWED_SECONDS + 1, -3600):
            written(experiment, mine, age=age)
            assert ownership.renew(experiment, mine)
            assert abs(time.time() - record.stat().st_mtime) < ownership.RENEWED_SECONDS
        record.unlink()
        assert ownership.renew(experiment, mine), "what cannot be read is nobody else's"
        # As the new owner keeps it: fresh.
        written(experiment, replace(mine, token="another"))
        assert not ownership.renew(experiment, mine)
    assert json.loads((experiment.folder / ownership.RECORD).read_text())["token"] == "another"


def test_ranks_that_nobody_follows_are_cancelled_without_a_wait(run: RunFolder, other: subprocess.Popen[bytes]) -> None:
    experiment = run.experiments()[0]
    experiment.set_state(ExperimentState(status="running", started=files.utc_now()))
    (experiment.folder / "heartbeat").mkdir()
    beat = experiment.folder / "heartbeat" / "rank_0"
    beat.write_text(f"{other.pid} {platform.node()} 3 {time.time()}", encoding="ascii")
    is_refused(run, f"processes of experiment 1 still run here without their supervisor: {other.pid}")
    began = time.monotonic()
    said = control.cancel(control.named(str(run.path), run.path.parent))
    assert said[0] == "cancelled experiment 1: its ranks, which nobody followed any more, have ended"
    assert time.monotonic() - began < control.STOP_SECONDS / 2
    # They may end by themselves between the message that names this command and the command.
    (ended, hint) = control.cancel(control.named(str(run.path), run.path.parent))
    assert ended == "nothing to cancel of experiment 1: its ranks have ended"
    assert hint == f"resume with: {hints.resume(run.path)}"


def test_a_folder_that_cannot_be_written_is_refused(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = run.experiments()[0]
    before = sorted(experiment.folder.iterdir())
    no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", lambda number: (_ for _ in ()).throw(no_room))
        with pytest.raises(EncoreError, match="cannot be written: No space left"), ownership.owned(experiment, ""):
            pass
    assert sorted(experiment.folder.iterdir()) == sorted([*before, experiment.folder / ownership.LOCK])
    (experiment.folder / ownership.LOCK).unlink()
    (experiment.folder / ownership.LOCK).mkdir()  # refused to root as well
    with pytest.raises(EncoreError, match="cannot be written: Is a directory"), ownership.owned(experiment, ""):
        pass


@pytest.mark.slow
def test_of_many_that_claim_at_once_one_gets_it(run: RunFolder) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom encore.errors import EncoreError\n"
        "from encore.run import ownership\nfrom encore.run.run_folder import Experiment\n"
        "try:\n    with ownership.owned(Experiment(0, Path(sys.argv[1])), ''):\n        print('mine', flush=True)\n"
        "        input()\nexcept EncoreError:\n    print('refused', flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(run.experiments()[0].folder)]
    pipe = subprocess.PIPE
    children = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(6)]
    said = [child.stdout.readline().strip() for child in children if child.stdout is not None]
    for child in children:
        child.communicate("\n")
    assert sorted(said) == ["mine", *["refused"] * 5]


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no experiment": (lambda run: (run / "experiment_1").rename(run / "gone"), "experiment_1 is missing"),
    "one more": (lambda run: (run / "experiment_2").mkdir(), "has experiment_2, and 2 seeds"),
    "another seed": (
        lambda run: (run / "experiment_1" / "config.json").write_text('{"lr": 1, "seed": 9}'),
        "experiment_1 has a config.json that does not fit",
    ),
    "no configuration": (lambda run: (run / "experiment_0" / "config.json").unlink(), "has no config.json"),
    "a result without a state": (lambda run: (run / "result_0.txt").touch(), "has a result and no state.json"),
    "an ended log without a state": (
        lambda run: (run / "experiment_0" / "result.txt").write_text(':::MLLOG {"key": "run_stop"}'),
        "has a result and no state.json",
    ),
    "a broken state": (lambda run: (run / "experiment_0" / "state.json").write_text("{"), "cannot be read"),
    "another state": (
        lambda run: (run / "experiment_0" / "state.json").write_text('{"status": "fine"}'),
        "does not hold the state",
    ),
    "no schema": (lambda run: (run / "run.json").write_text('{"seeds": [5, 6]}'), "has schema None"),
    "another schema": (lambda run: (run / "run.json").write_text('{"schema": 2}'), "has schema 2"),
    "a passport without data": (
        lambda run: (run / "run.json").write_text('{"schema": 3, "seeds": [5, 6]}'),
        "lacks name, round, system, submission, deviations, nodes, ranks_per_node, runtime, data, config",
    ),
    "a changed passport": (
        lambda run: (run / "run.json").write_text((run / "run.json").read_text().replace(" 6\n", " 7\n")),
        "was changed after it was written",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_that_is_not_whole_is_refused(run: RunFolder, change: str) -> None:
    run.check_whole()
    act, said = CHANGES[change]
    act(run.path)
    with pytest.raises(EncoreError, match=said) as caught:
        run.check_whole()
    assert caught.value.hint


def test_runs_of_the_same_second_get_their_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What two processes see that look before either of them has its folder.
    blind = [tmp_path / "same", tmp_path / "same-2", tmp_path / "same-3"]
    for count in range(3):
        answers = iter(blind)
        monkeypatch.setattr(run_folder, "free_name", lambda results, name, answers=answers: next(answers))
        run = run_folder.create(tmp_path, "x", lambda path: {"schema": 2, "path": path.name}, {}, {}, [count])
        assert json.loads((run.path / "run.json").read_text())["path"] == run.path.name == blind[count].name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["same", "same-2", "same-3"]
