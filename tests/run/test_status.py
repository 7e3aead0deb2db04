"""`encore status`, `follow` and `cancel`: real runs outside of Slurm, and recorded queues."""

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from encore import files, paths
from encore.cli import jobs
from encore.cli.jobs import describe, exit_code, varied_columns
from encore.cli.layout import console
from encore.errors import EncoreError, ExitCode
from encore.machine import processes
from encore.run import control, follow, hints, ownership, status
from encore.run.run_folder import ExperimentState, RunFolder
from encore.run.status import Queue, State
from encore.slurm import commands, queue
from tests.conftest import TINY, Encore, Study
from tests.run_folders import PREPARED, make_run
from tests.slurm.jobs import in_queue, job
from tests.trainings import (
    Started,
    assert_none_left,
    assert_same_run,
    in_background,
    is_told,
    resumed_as_printed,
    wait_until,
)

# -- real runs ------------------------------------------------------------------------------------------


def status_row(encore: Encore, results: Path) -> dict[str, Any]:
    (row,) = json.loads(encore("status", "--results", str(results), "--json", code=0).stdout)["runs"]
    return dict(row)


def start_and_suspend(data: Path, results: Path) -> tuple[Started, Path, list[psutil.Process]]:
    # In the second epoch, with the ranks suspended: the run must not end before the test is done with it
    started = Started.run(data, results, *TINY)
    folder = started.wait_for_step(13)
    ranks = started.ranks(folder)
    for rank in ranks:
        rank.suspend()
    return started, folder, ranks


def cancel_suspended(run: Path, ranks: Sequence[psutil.Process]) -> str:
    cancel = Started(in_background("cancel", str(run)), run.parent)
    wait_until(lambda: all(is_told(rank, signal.SIGTERM) for rank in ranks), "SIGTERM to the ranks")
    for rank in ranks:
        rank.resume()
    return cancel.ended(0)


@pytest.mark.long
def test_run_is_followed_cancelled_and_resumed(encore: Encore, few_digits: Path, tmp_path: Path, study: Study) -> None:
    started, folder, ranks = start_and_suspend(few_digits, tmp_path)
    run, row = folder.parent, status_row(encore, tmp_path)
    assert (row["state"], row["epochs"], row["job"], row["targets"]) == ("running", 2, None, {"accuracy": 1.0})
    assert row["seconds"] > 0

    followers = [
        Started(in_background("follow", *name, "--results", str(tmp_path)), tmp_path) for name in ((), (run.name,))
    ]
    lines = [next(line for line in follower.process.stdout or () if "epoch" in line) for follower in followers]
    assert all("experiment 1/1: epoch 2/2" in line for line in lines), lines
    followers[0].process.send_signal(signal.SIGINT)
    assert "it continues" in followers[0].ended(ExitCode.INTERRUPTED) and started.process.poll() is None

    output = cancel_suspended(run, ranks)
    assert "a checkpoint was written" in output and f"encore run --resume {run}" in output
    for process in (started, followers[1]):
        process.ended(ExitCode.INTERRUPTED)
    assert_none_left(ranks)
    row = status_row(encore, tmp_path)
    assert row["state"] == "interrupted" and "a checkpoint was written" in row["reason"]
    again = encore("cancel", run.name, "--results", str(tmp_path), code=ExitCode.REFUSED)
    assert "does not run: interrupted" in again.stderr

    encore("run", "--resume", str(run), code=ExitCode.NOT_REACHED)
    assert_same_run(folder, study.of_ranks(2))
    assert status_row(encore, tmp_path)["state"] == "not reached"
    encore("follow", str(run), code=ExitCode.NOT_REACHED)


@pytest.mark.long
def test_ranks_of_a_killed_run_are_cancelled_and_resumed(
    encore: Encore, few_digits: Path, tmp_path: Path, study: Study
) -> None:
    started, folder, ranks = start_and_suspend(few_digits, tmp_path)
    children = processes.family(started.process.pid)[1:]
    started.process.kill()
    started.process.communicate()
    row = status_row(encore, tmp_path)
    assert (row["state"], row["reason"]) == ("running", status.UNSUPERVISED)
    metrics = (folder / "metrics.jsonl").read_bytes()
    refused = encore("run", "--resume", str(folder.parent), code=ExitCode.REFUSED)
    assert "still run here without their supervisor" in refused.stderr
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    output = cancel_suspended(folder.parent, ranks)
    assert "cancelled after its encore run was killed, a checkpoint was written" in output
    assert len(children) > len(ranks)
    assert_none_left(children)
    assert resumed_as_printed(output).returncode == ExitCode.NOT_REACHED
    assert_same_run(folder, study.of_ranks(2))


# -- states ---------------------------------------------------------------------------------------------

STARTED = "2026-11-20T19:00:00Z"
REACHED = ExperimentState(status="reached", started=STARTED, ended="2026-11-20T19:05:00Z", job="12")
RUNNING = ExperimentState(status="running", started=STARTED, job="12")
STOPPED = ExperimentState(status="interrupted", reason="a checkpoint was written", started=STARTED, job="12")
FAILED = ExperimentState(status="failed", reason="rank 1 was killed by SIGKILL", started=STARTED, job="12")


@pytest.mark.parametrize(
    ("state", "slurm_state", "is_answered", "expected"),
    [
        (PREPARED, "RUNNING", True, ("starting", "")),
        (RUNNING, "RUNNING", True, ("running", "")),
        (RUNNING, "COMPLETING", True, ("running", "")),
        (RUNNING, "TIMEOUT", True, ("lost", "Slurm: TIMEOUT")),
        (RUNNING, None, True, ("lost", "job 12 is no longer there")),
        # The controller does not answer, but the state file was written a moment ago.
        (RUNNING, None, False, ("running", "")),
        # Slurm requeued the job after its node died without a word.
        (RUNNING, "PENDING", True, ("queued", "BeginTime")),
        (STOPPED, "PENDING", True, ("queued", "BeginTime")),
        (STOPPED, "RUNNING", True, ("starting", "")),
        (STOPPED, "CANCELLED", True, ("interrupted", "a checkpoint was written")),
        (FAILED, "RUNNING", True, ("failed", "rank 1 was killed by SIGKILL")),
        (PREPARED, "NODE_FAIL", True, ("not started", "Slurm: NODE_FAIL")),
        (REACHED, "RUNNING", True, ("reached", "")),
        (ExperimentState(status="not_reached"), None, False, ("not reached", "")),
    ],
)
def test_state_from_state_file_and_queue(
    tmp_path: Path, state: ExperimentState, slurm_state: str | None, is_answered: bool, expected: tuple[State, str]
) -> None:
    (experiment,) = make_run(tmp_path, [state], "-job12", "12").experiments()
    found = job("12", slurm_state, "BeginTime") if slurm_state else None
    assert status.verdict(experiment, found, is_answered) == expected


@pytest.mark.parametrize(("ahead", "renews"), [(120, True), (-120, True), (120, False), (7200, True)])
def test_run_on_another_host_is_alive_while_its_heartbeat_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, renews: bool
) -> None:
    # The clocks of the host and of the file server are ``ahead`` seconds behind this one
    (experiment,) = make_run(tmp_path, [replace(RUNNING, job="")]).experiments()
    record = experiment.folder / "heartbeat" / "rank_0"
    record.parent.mkdir(exist_ok=True)

    def beat(seconds: float) -> None:
        now = time.time() - ahead + seconds
        record.write_text(f"1 elsewhere 5 {now} {now}", encoding="ascii")
        os.utime(experiment.folder / "state.json", (now, now))

    beat(0)
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=beat if renews else time.sleep)
    monkeypatch.setattr(status, "time", clock)
    monkeypatch.setattr(status, "WATCH_SECONDS", 0.1)
    assert status.is_alive(experiment) is (renews and abs(ahead) < status.CLOCKS_APART_SECONDS)


def test_run_without_processes_is_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path, [replace(RUNNING, job="")])
    owner = replace(ownership.this_process(""), process_started=0)
    files.write_json(run.path / "experiment_0" / ownership.RECORD, asdict(owner))
    (row,) = status.rows_of(run, Queue())
    assert (row.state, row.reason) == ("lost", "its processes are gone")
    with pytest.raises(EncoreError, match="does not run: lost"):
        control.cancel(control.named(str(run.path), tmp_path))


@pytest.mark.parametrize(
    ("states", "jobs", "expected"),
    [
        ([REACHED, RUNNING], [job("12", "RUNNING")], ("running", "", 1, 1)),
        ([REACHED, REACHED], [], ("reached", "", 1, 2)),
        ([REACHED, PREPARED], [], ("interrupted", "experiment 2 was never started", 1, 1)),
    ],
)
def test_row_of_a_run_is_its_current_experiment(
    tmp_path: Path, states: list[ExperimentState], jobs: list[queue.Job], expected: tuple[object, ...]
) -> None:
    row = status.rows_of(make_run(tmp_path, states), Queue(tuple(jobs), bool(jobs)))[0]
    assert (row.state, row.reason, row.experiment, row.reached) == expected
    if row.state == "reached":
        assert (row.seconds, describe(row)) == (300.0, "experiment 2/2  2 reached")


def test_tasks_of_an_array_have_a_row_each(tmp_path: Path) -> None:
    states = [replace(REACHED, job="12_1"), replace(RUNNING, job="12_3"), PREPARED]
    run = make_run(tmp_path, states, "-job12", "12_1")
    tasks = Queue((job("12_1", "COMPLETED"), job("12_3", "RUNNING"), job("12_5", "PENDING", "Resources")), True)
    assert [(row.job, row.state, row.reason) for row in status.rows_of(run, tasks)] == [
        ("12_1", "reached", ""),
        ("12_3", "running", ""),
        ("12_5", "queued", "Resources"),
    ]
    numbers = {
        name: [experiment.number for experiment in control.experiments(name, run, tasks)] for name in ("12_5", "12")
    }
    assert numbers == {"12_5": [2], "12": [0, 1, 2]}
    assert len(status.overview(tmp_path, tasks, None)) == 3


STATE = "experiment_0/state.json"
DAMAGES = {
    "half": ("run.json", '{"na'), "list": ("run.json", "[]"), "other": ("run.json", '{"slurm": 7}'),
    "word": (STATE, "{}"), "keys": (STATE, '{"status": "running", "more": 1}'), "empty": (STATE, ""),
    "metrics": ("experiment_0/metrics.jsonl", '{"kind": "start"}\n{"kind": "ste'),
}  # fmt: skip


@pytest.mark.slow
def test_damaged_folder_is_a_row(encore: Encore, tmp_path: Path) -> None:
    for name, (file, text) in DAMAGES.items():
        (make_run(tmp_path, [RUNNING], f"-{name}").path / file).write_text(text, encoding="utf-8")
    run = make_run(tmp_path, mark="-name").path
    (run / "experiment_0").rename(run / "experiment_zero")
    (make_run(tmp_path, mark="-gone").path / "run.json").unlink()
    (tmp_path / "notes").mkdir()
    rows = json.loads(encore("status", "--results", str(tmp_path), "--json", code=0).stdout)["runs"]
    damaged = {row["run"].rpartition("-")[2]: row["state"] == "damaged" for row in rows}
    assert damaged == {**dict.fromkeys([*DAMAGES, "name", "gone"], True), "metrics": False}
    encore("status", "--results", str(tmp_path), code=0)


def test_newest_runs_come_first_and_unfinished_ones_are_always_shown(tmp_path: Path) -> None:
    for day in range(10, 20):
        make_run(tmp_path, [replace(REACHED, job="")]).path.rename(tmp_path / f"202611{day}T100000Z-resnet-mxnet-cpu")
    old = make_run(tmp_path, [RUNNING], "-job12", "12").path.rename(tmp_path / "20251120T100000Z-resnet-job12")
    rows = status.overview(tmp_path, Queue((job("12", "RUNNING"),), True), 3)
    assert [row.run.name[:8] for row in rows if row.run] == ["20261119", "20261118", "20261117", "20251120"]
    assert len(status.overview(tmp_path, Queue(), None)) == 11
    newest, of_job = control.newest(tmp_path), control.folder_of("12", tmp_path)
    assert (newest.path.name[:8], of_job) == ("20261119", RunFolder(old))


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (("reached", "reached"), ExitCode.REACHED),
        (("reached", "not reached"), ExitCode.NOT_REACHED),
        (("reached", "lost"), ExitCode.FAILED),
        (("failed",), ExitCode.FAILED),
        (("interrupted",), ExitCode.INTERRUPTED),
    ],
)
def test_exit_code_of_follow(states: tuple[State, ...], code: ExitCode) -> None:
    assert exit_code(states) == code


# -- Slurm ----------------------------------------------------------------------------------------------


def test_follow_waits_for_a_queued_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pending, running, timeout = job("12", "PENDING", "Resources"), job("12", "RUNNING"), job("12", "TIMEOUT")
    answers = iter([(pending,), (pending,), "no answer", (running, timeout), (timeout,)])
    monkeypatch.setattr(
        status, "ask", lambda name: Queue(note=jobs) if isinstance(jobs := next(answers), str) else Queue(jobs)
    )
    monkeypatch.setattr(commands, "show_job", lambda name: {"StdOut": "slurm-12.out"})
    monkeypatch.setattr(jobs, "QUEUE_SECONDS", 0)
    with pytest.raises(EncoreError, match=f"job 12 ended without a run folder in {tmp_path}: TIMEOUT") as error:
        jobs._wait_for_folder(jobs.Notices(console(soft_wrap=True)), control.Subject(job="12"), tmp_path)
    running_line = f"job 12 has begun; no run folder in {tmp_path} yet"
    assert capsys.readouterr().out.splitlines() == ["job 12 is queued: Resources", "no answer", running_line]
    assert "slurm-12.out" in error.value.hint and error.value.exit_code == ExitCode.FAILED


# squeue of Slurm 22.05 on two nodes: an array of four, a run of several hours, jobs of other names. The last line has
# the form that sacct(1) describes: no accounting ran there.
QUEUE = """\
2_0¦7¦CANCELLED¦2¦0:00¦2026-11-20T19:17:19¦root¦debug¦Resources¦(null)¦encore-resnet
6¦6¦PENDING¦1¦0:00¦2026-11-20T19:14:27¦root¦debug¦DependencyNeverSatisfied¦(null)¦encore
4¦4¦PENDING¦2¦0:00¦2026-11-20T19:14:27¦root¦debug¦JobHeldUser¦(null)¦encore x|y
2_1¦8¦COMPLETED¦2¦10:00¦2026-11-20T19:14:27¦root¦debug¦None¦(null)¦encore-resnet
2_3¦2¦PENDING¦2¦0:00¦2026-11-20T19:14:27¦root¦debug¦Resources¦(null)¦encore-resnet
2_2¦9¦RUNNING¦2¦0:41¦2026-11-20T19:14:27¦root¦debug¦None¦(null)¦encore-resnet
slurm_load_jobs error: something
12¦12¦CANCELLED by 0¦2¦00:01:00¦2026-11-20T19:14:27¦me¦debug¦None¦COMMENT/results/of mine¦encore
""".replace("¦", queue.SEPARATOR).replace("COMMENT", queue.COMMENT)


def test_output_of_squeue_and_sacct_is_parsed() -> None:
    def parsed(name: str, number: str, **facts: Any) -> queue.Job:
        common = {"submitted": "2026-11-20T19:14:27", "user": "root", "partition": "debug", "nodes": 2}
        common |= {"state": "PENDING", "seconds": 0.0, "reason": "", "title": "encore-resnet"}
        return queue.Job(name=name, number=number, **{**common, **facts})

    jobs = queue.parse(QUEUE)
    assert jobs == [
        parsed("2_0", "7", state="CANCELLED", submitted="2026-11-20T19:17:19", reason="Resources"),
        parsed("6", "6", nodes=1, reason="DependencyNeverSatisfied", title="encore"),
        parsed("4", "4", reason="JobHeldUser", title="encore x|y"),
        parsed("2_1", "8", state="COMPLETED", seconds=600.0),
        parsed("2_3", "2", reason="Resources"),
        parsed("2_2", "9", state="RUNNING", seconds=41.0),
        parsed("12", "12", state="CANCELLED", seconds=60.0, title="encore", user="me",
               comment="encore:/results/of mine"),
    ]  # fmt: skip
    assert [(entry.array, entry.task, entry.waits, entry.has_ended, entry.is_encores) for entry in jobs] == [
        ("2", 0, False, True, True), ("6", None, True, False, True), ("4", None, True, False, False),
        ("2", 1, False, True, True), ("2", 3, True, False, True), ("2", 2, False, False, True),
        ("12", None, False, True, True),
    ]  # fmt: skip
    assert jobs[-1].results == Path("/results/of mine")
    assert [(row.job, row.state, row.reason) for row in status.without_folder(jobs)] == [
        ("2_0", "cancelled", "its run folder, if any, is elsewhere"),
        ("6", "queued", "DependencyNeverSatisfied"),
        ("2_1", "ended", "Slurm: COMPLETED; its run folder, if any, is elsewhere"),
        ("2_3", "queued", "Resources"),
        ("2_2", "starting", "no run folder yet"),
        ("12", "cancelled", "no run folder in /results/of mine"),
    ]


def test_job_is_found_by_the_results_folder_in_its_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: list[tuple[str, ...]]
) -> None:
    away, home = tmp_path / "my results", tmp_path / "home"
    run = make_run(away, [ExperimentState(status="not_reached", job="12")], "-job12")
    study = home / "20261120T101500Z-sweep-resnet"
    point = make_run(study / "1x2", [ExperimentState(status="reached", job="13")], "-job13")
    (study / "study.json").touch()
    jobs = {
        "12": ("FAILED", f"encore:{away}"),
        "13": ("COMPLETED", ""),
        "14": ("FAILED", f"encore:{away}"),
        "15": ("FAILED", ""),
    }
    in_queue(
        monkeypatch,
        [job(name, state, title="encore-resnet", comment=comment) for name, (state, comment) in jobs.items()],
    )
    rows = {row.job: row for row in status.overview(home, status.ask(), None)}
    states = {name: row.state for name, row in rows.items()}
    assert states == {"12": "not reached", "13": "reached", "14": "failed", "15": "ended"}
    assert rows["14"].reason == f"no run folder in {away}; Slurm: FAILED"
    assert [control.named(name, home).folder for name in ("12", "13")] == [run, point]
    assert control.newest(tmp_path / "nothing here").path == run.path


# squeue without --me prints all lines.
SLURM_OF_TWO_USERS = """\
12¦12¦RUNNING¦2¦0:41¦2026-11-20T19:14:27¦other¦long¦None¦encore:RESULTS¦encore-resnet
13¦13¦PENDING¦2¦0:00¦2026-11-20T19:14:27¦other¦debug¦BeginTime¦encore:RESULTS¦encore-resnet
16¦16¦RUNNING¦1¦0:09¦2026-11-20T19:14:27¦other¦debug¦None¦encore:RESULTS¦encore-ncf
17¦17¦RUNNING¦1¦0:09¦2026-11-20T19:14:27¦other¦debug¦None¦encore:/home/other/results¦encore-ncf
"""


def test_runs_of_other_users_have_the_states_of_their_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for state in (RUNNING, replace(STOPPED, job="13")):
        make_run(tmp_path, [state], f"-job{state.job}", state.job)
    squeue = SLURM_OF_TWO_USERS.replace("RESULTS", str(tmp_path)).replace("¦", queue.SEPARATOR)
    monkeypatch.setattr(queue, "is_there", lambda: True)
    monkeypatch.setattr(queue, "accounted", list)
    monkeypatch.setattr(commands, "call", lambda *command: "" if "--me" in command else squeue)
    monkeypatch.setattr(queue, "this_user", lambda: "me")
    rows = {row.job: row for row in status.overview(tmp_path, status.ask(), None)}
    assert {name: row.state for name, row in rows.items()} == {"12": "running", "13": "queued", "16": "starting"}
    assert (rows["12"].partition, rows["16"].user, rows["16"].benchmark) == ("long", "other", "ncf")
    assert [varied_columns([replace(rows["12"], user=user)]) for user in ("other", "me")] == [["user"], []]


@pytest.mark.parametrize(("state", "expected"), [("PENDING", "queued"), ("COMPLETED", "reached")])
def test_job_that_resumes_a_run_shares_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, expected: str
) -> None:
    # The second experiment had ended before: the last job of the run is not that of its last experiment
    reached = ExperimentState(status="reached", started=files.utc_now(), job="12")
    first = replace(reached, status="interrupted") if expected == "queued" else replace(reached, job="13")
    run = make_run(tmp_path, [first, reached], "-job12", "12")
    again = job("13", state, title="encore-resnet", comment=f"encore:{tmp_path}|{run.path.name}")
    in_queue(monkeypatch, ())
    (row,) = status.overview(tmp_path, Queue((job("12", "CANCELLED", title="encore-resnet"), again), True), None)
    assert (row.state, row.run) == (expected, run.path)
    assert control.folder_of("13", tmp_path / "elsewhere", [again]) == run
    jobs = Queue((again, replace(again, name="14", number="14")), True)
    assert [row.run for row in status.overview(tmp_path / "elsewhere", jobs, None)] == [run.path]
    # A job of another cluster made a folder of the same number.
    make_run(tmp_path, [reached], "-job13", "13")
    assert control.folder_of("13", tmp_path, [again]) == run


def test_point_of_a_sweep_hides_its_cancelled_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = tmp_path / "20261120T101500Z-sweep-resnet"
    make_run(study / "1x2", [replace(REACHED, job="20")], "-job20", "20")
    (study / "study.json").touch()
    cancelled = job("13", "CANCELLED", title="encore-resnet", comment=f"encore:{study / '1x2'}")
    in_queue(monkeypatch, ())
    jobs = Queue((cancelled, job("20", "COMPLETED", title="encore-resnet")), True)
    assert [(row.job, row.state) for row in status.overview(tmp_path, jobs, None)] == [("20", "reached")]


def test_rewritten_metrics_are_read_again(tmp_path: Path) -> None:
    tail, progress = follow.Tail(tmp_path / "metrics.jsonl"), follow.Progress()
    start = {"kind": "start", "epochs": 6, "steps_per_epoch": 4, "global_batch_size": 8, "targets": {"accuracy": 0.9}}

    def read(*records: dict[str, Any]) -> tuple[object, ...]:
        lines = [json.dumps({"time": 1.0 + number, **record}) + "\n" for number, record in enumerate(records)]
        (tmp_path / "metrics.jsonl").write_text("".join(lines))
        for record in tail.read():
            progress.add(record)
        return progress.epoch, progress.step, progress.starts, progress.samples_per_second

    steps = [{"kind": "step", "epoch": 1, "step": number, "loss": 1.0} for number in (1, 2, 3)]
    assert read({**start, "resumed_step": 0}, *steps) == (1, 3, 1, 8.0)
    resumed = [{"kind": "step", "epoch": 6, "step": number, "loss": 0.5} for number in range(21, 25)]
    records = ({**start, "resumed_step": 0}, steps[0], {**start, "resumed_step": 20}, *resumed)
    assert read(*records) == (6, 24, 2, 8.0)
    assert (progress.total_steps, progress.loss, progress.targets) == (24, 0.5, {"accuracy": 0.9})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:41", 41), ("10:00", 600), ("1:00:01", 3601), ("2-01:00:00", 176400), ("INVALID", None), ("", None)],
)
def test_seconds_of_slurm_times(text: str, seconds: float | None) -> None:
    assert commands.seconds_of(text) == seconds


# -- cancel in Slurm ------------------------------------------------------------------------------------


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    # Recorded calls of Slurm, whose queue has an array, a job of another name, and one of another user
    tasks = (job("12_0", "RUNNING"), job("12_1", "PENDING", "Resources"))
    others = (job("13", "RUNNING", title="sleep"), job("14", "RUNNING", user="somebody"))
    in_queue(monkeypatch, (*tasks, *others, job("15", "COMPLETED"), job("16", "PENDING")))
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(commands, "require", lambda: None)
    monkeypatch.setattr(commands, "call", lambda *command: calls.append(command) or "")
    return calls


def test_jobs_and_tasks_are_cancelled(cancelled: list[tuple[str, ...]], tmp_path: Path) -> None:
    run = make_run(tmp_path, [RUNNING, PREPARED], "-job12", "12_0")
    # By job, task, Slurm's number of the task, run folder; the last job has no folder yet
    names = ("12", "12_1", "12001", str(run.path), "16")
    lines = [control.cancel(control.named(name, tmp_path)) for name in names]
    assert cancelled == [("scancel", name) for name in ("12", "12_1", "12_1", "12", "16")]
    assert [lines[0][0], lines[0][-1], lines[1][0], lines[4][-1]] == [
        "cancelled job 12, 2 tasks (running)",
        f"resume with: {hints.resume(run.path)}",
        "cancelled job 12_1 (in the queue)",
        "it has no run folder yet: nothing is left of it",
    ]
    assert "encore submit --resume" in lines[0][-1].replace(str(paths.ROOT / ".venv" / "bin") + "/", "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("13", r"job 13 \(sleep\) is none of Encore's"),
        ("14", "job 14 belongs to somebody"),
        ("15", "job 15 has ended: COMPLETED"),
        ("99", "no job 99"),
        ("resnet-job12", "no run 'resnet-job12'"),
    ],
)
def test_cancel_refuses(cancelled: list[tuple[str, ...]], tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(EncoreError, match=message) as error:
        control.cancel(control.named(name, tmp_path))
    assert error.value.exit_code == ExitCode.REFUSED and not cancelled
