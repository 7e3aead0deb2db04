"""`encore status`, `follow` and `cancel`: real runs outside of Slurm, and recorded queues."""

import io
import json
import os
import platform
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import psutil
import pytest
from pydantic import ValidationError
from rich.console import Console

from encore import catalogue, files, paths
from encore.cli import jobs, layout, progress_display
from encore.cli.jobs import describe, exit_code
from encore.cli.progress_display import facts
from encore.errors import EncoreError, ExitCode
from encore.machine import node, processes
from encore.results import peaks
from encore.run import control, evaluate, follow, hints, ownership, run_folder, status
from encore.slurm import commands, queue, step
from tests.command_line import output_of, run_encore
from tests.conftest import TINY, Encore, Study
from tests.results.result_logs import resnet_v07, write_files
from tests.slurm.jobs import in_queue, job
from tests.trainings import (
    PREPARED,
    Started,
    assert_none_left,
    assert_same_run,
    in_background,
    is_told,
    make_run,
    resumed_as_printed,
    wait_until,
)

# -- real runs ------------------------------------------------------------------------------------------


def rows_in(encore: Encore, results: Path) -> list[dict[str, Any]]:
    return list(json.loads(encore("status", "--results", str(results), "--json", code=0).stdout)["runs"])


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
    run, (row,) = folder.parent, rows_in(encore, tmp_path)
    facts = (row["state"], row["epochs"], row["job"], row["targets"], row["seconds"] > 0)
    assert facts == ("running", 2, None, {"accuracy": 1.0}, True)

    followers = [
        Started(in_background("follow", *name, "--results", str(tmp_path)), tmp_path) for name in ((), (run.name,))
    ]
    lines = [next(line for line in follower.process.stdout or () if "epoch" in line) for follower in followers]
    assert all("experiment 1/1: epoch 2/2" in line for line in lines), lines
    followers[0].process.send_signal(signal.SIGINT)
    assert "the run continues" in followers[0].ended(ExitCode.INTERRUPTED) and started.process.poll() is None

    output = cancel_suspended(run, ranks)
    assert "a checkpoint was written" in output and f"encore run --resume {run}" in output
    for process in (started, followers[1]):
        process.ended(ExitCode.INTERRUPTED)
    assert_none_left(ranks)
    (row,) = rows_in(encore, tmp_path)
    assert row["state"] == "interrupted" and "a checkpoint was written" in row["reason"]
    refusal = encore("cancel", run.name, "--results", str(tmp_path), code=ExitCode.REFUSED).stderr
    assert "does not run: interrupted" in refusal

    encore("run", "--resume", str(run), code=ExitCode.NOT_REACHED)
    assert_same_run(folder, study.of_ranks(2))
    assert [row["state"] for row in rows_in(encore, tmp_path)] == ["not reached"]
    encore("follow", str(run), code=ExitCode.NOT_REACHED)


@pytest.mark.long
def test_ranks_of_a_killed_run_are_cancelled_and_resumed(
    encore: Encore, few_digits: Path, tmp_path: Path, study: Study
) -> None:
    started, folder, ranks = start_and_suspend(few_digits, tmp_path)
    children = processes.family(started.process.pid)[1:]
    started.process.kill()
    started.process.communicate()
    assert [(row["state"], row["reason"]) for row in rows_in(encore, tmp_path)] == [("running", status.UNSUPERVISED)]
    metrics = (folder / "metrics.jsonl").read_bytes()
    refusal = encore("run", "--resume", str(folder.parent), code=ExitCode.REFUSED).stderr
    assert "still run here without their supervisor" in refusal
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    output = cancel_suspended(folder.parent, ranks)
    assert "cancelled after its encore run was killed, a checkpoint was written" in output
    assert len(children) > len(ranks)
    assert_none_left(children)
    assert resumed_as_printed(output).returncode == ExitCode.NOT_REACHED
    assert_same_run(folder, study.of_ranks(2))


# -- states ---------------------------------------------------------------------------------------------

STARTED = "2026-11-20T19:00:00Z"
REACHED = run_folder.ExperimentState(status="reached", started=STARTED, ended="2026-11-20T19:05:00Z", job="12")
RUNNING = run_folder.ExperimentState(status="running", started=STARTED, job="12")
STOPPED = run_folder.ExperimentState(status="interrupted", reason="a checkpoint was written", started=STARTED, job="12")
FAILED = run_folder.ExperimentState(status="failed", reason="rank 1 was killed by SIGKILL", started=STARTED, job="12")


@pytest.mark.parametrize(
    ("state", "slurm_state", "is_answered", "expected"),
    [
        (PREPARED, "RUNNING", True, ("starting", "")),
        (RUNNING, "RUNNING", True, ("running", "")),
        (RUNNING, "COMPLETING", True, ("running", "")),
        (RUNNING, "TIMEOUT", True, ("lost", "Slurm: TIMEOUT")),
        (RUNNING, None, True, ("lost", "job 12 no longer exists")),
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
        (run_folder.ExperimentState(status="not_reached"), None, False, ("not reached", "")),
    ],
)
def test_state_from_state_file_and_queue(
    tmp_path: Path,
    state: run_folder.ExperimentState,
    slurm_state: str | None,
    is_answered: bool,
    expected: tuple[status.State, str],
) -> None:
    (experiment,) = make_run(tmp_path, [state], "-job12", "12").experiments()
    found = job("12", slurm_state, "BeginTime") if slurm_state else None
    assert status.state_of(experiment, found, is_answered) == expected


@pytest.mark.parametrize(("ahead", "renews"), [(120, True), (-120, True), (120, False), (7200, True)])
def test_run_on_another_host_is_alive_while_its_heartbeat_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, renews: bool
) -> None:
    # The clocks of the host and of the file server are ``ahead`` seconds behind this one
    (experiment,) = make_run(tmp_path, [replace(RUNNING, job="")]).experiments()

    def beat(seconds: float) -> None:
        write_heartbeats(experiment.folder, "elsewhere", ahead - seconds)
        os.utime(experiment.folder / "state.json", (time.time() - ahead + seconds,) * 2)

    beat(0)
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=beat if renews else time.sleep)
    monkeypatch.setattr(status, "time", clock)
    monkeypatch.setattr(status, "WATCH_SECONDS", 0.1)
    assert status.is_alive(experiment) is (renews and abs(ahead) < status.CLOCKS_APART_SECONDS)


def test_run_without_processes_is_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path, [replace(RUNNING, job="")])
    owner = replace(ownership.this_process(""), process_started=0)
    files.write_json(run.path / "experiment_0" / ownership.RECORD, asdict(owner))
    assert [(row.state, row.reason) for row in status.rows_of(run, status.Queue())] == [
        ("lost", "its processes have exited")
    ]
    with pytest.raises(EncoreError, match="does not run: lost"):
        control.cancel(control.find_subject(str(run.path), tmp_path))


@pytest.mark.parametrize(
    ("states", "jobs", "expected"),
    [
        ([REACHED, RUNNING], [job("12", "RUNNING")], ("running", "", 1, 1)),
        ([REACHED, REACHED], [], ("reached", "", 1, 2)),
        ([REACHED, PREPARED], [], ("interrupted", "experiment 2 was never started", 1, 1)),
    ],
)
def test_row_of_a_run_is_its_current_experiment(
    tmp_path: Path, states: list[run_folder.ExperimentState], jobs: list[queue.Job], expected: tuple[object, ...]
) -> None:
    row = status.rows_of(make_run(tmp_path, states), status.Queue(tuple(jobs), bool(jobs)))[0]
    assert (row.state, row.reason, row.experiment, row.reached) == expected
    assert row.state != "reached" or (row.seconds, describe(row)) == (300.0, "run 2/2  2 reached")


def test_tasks_of_an_array_have_a_row_each(tmp_path: Path) -> None:
    run = make_run(tmp_path, [replace(REACHED, job="12_1"), replace(RUNNING, job="12_3"), PREPARED], "-job12", "12_1")
    tasks = status.Queue((job("12_1", "COMPLETED"), job("12_3", "RUNNING"), job("12_5", "PENDING", "Resources")), True)
    assert [(row.job, row.state, row.reason) for row in status.rows_of(run, tasks)] == [
        ("12_1", "reached", ""),
        ("12_3", "running", ""),
        ("12_5", "queued", "Resources"),
    ]
    numbers = [[entry.number for entry in control.experiments(name, run, tasks)] for name in ("12_5", "12")]
    assert numbers == [[2], [0, 1, 2]]
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
    (make_run(tmp_path, mark="-name").path / "experiment_0").rename(tmp_path / "notes")
    (make_run(tmp_path, mark="-gone").path / "run.json").unlink()
    damaged = {row["run"].rpartition("-")[2]: row["state"] == "damaged" for row in rows_in(encore, tmp_path)}
    assert damaged == {**dict.fromkeys([*DAMAGES, "name", "gone"], True), "metrics": False}
    encore("status", "--results", str(tmp_path), code=0)


def test_newest_runs_come_first_and_unfinished_ones_are_always_shown(tmp_path: Path) -> None:
    for day in range(10, 20):
        make_run(tmp_path, [replace(REACHED, job="")]).path.rename(tmp_path / f"202611{day}T100000Z-resnet-mxnet-cpu")
    old = make_run(tmp_path, [RUNNING], "-job12", "12").path.rename(tmp_path / "20251120T100000Z-resnet-job12")
    rows = status.overview(tmp_path, status.Queue((job("12", "RUNNING"),), True), 3)
    assert [row.run.name[:8] for row in rows if row.run] == ["20261119", "20261118", "20261117", "20251120"]
    newest, found = control.newest(tmp_path), control.folder_of("12", tmp_path)
    assert (newest.path, found) == (rows[0].run, run_folder.RunFolder(old))


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
def test_exit_code_of_follow(states: tuple[status.State, ...], code: ExitCode) -> None:
    assert exit_code(states) == code


# -- Slurm ----------------------------------------------------------------------------------------------


def test_follow_waits_for_a_queued_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pending, running, timeout = job("12", "PENDING", "Resources"), job("12", "RUNNING"), job("12", "TIMEOUT")
    queues = [(pending,), (pending,), (), (running, timeout), (timeout,)]
    answers = iter([status.Queue(queued, note="" if queued else "no answer") for queued in queues])
    monkeypatch.setattr(status, "ask", lambda name: next(answers))
    monkeypatch.setattr(commands, "show_job", lambda name: {"StdOut": "slurm-12.out"})
    monkeypatch.setattr(jobs, "QUEUE_SECONDS", 0)
    with pytest.raises(EncoreError, match=f"job 12 finished without a run folder in {tmp_path}: TIMEOUT") as error:
        jobs._wait_for_folder(jobs.Notices(layout.console(soft_wrap=True)), control.Subject(job="12"), tmp_path)
    running_line = f"job 12 is running; no run folder in {tmp_path} yet"
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


def test_output_of_squeue_and_sacct_is_parsed(recorded: Callable[[str, object], None]) -> None:
    jobs, properties = queue.parse(QUEUE), ("array", "task", "is_pending", "is_finished", "is_encore_job")
    recorded("queue.json", {
        "jobs": [[*asdict(entry).values(), *(getattr(entry, name) for name in properties)] for entry in jobs],
        "without a folder": [(row.job, row.state, row.reason) for row in status.without_folder(jobs)],
    })  # fmt: skip
    assert jobs[-1].results == Path("/results/of mine")


def test_job_is_found_by_the_results_folder_in_its_comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away, home = tmp_path / "my results", tmp_path / "home"
    run = make_run(away, [run_folder.ExperimentState(status="not_reached", job="12")], "-job12")
    study = home / "20261120T101500Z-sweep-resnet"
    point = make_run(study / "1x2", [run_folder.ExperimentState(status="reached", job="13")], "-job13")
    (study / "study.json").touch()
    jobs = {
        "11": ("CANCELLED", f"encore:{point.path.parent}"),  # hidden: another job trained this point of the sweep
        "12": ("FAILED", f"encore:{away}"),
        "13": ("COMPLETED", ""),
        "14": ("FAILED", f"encore:{away}"),
        "15": ("FAILED", ""),
    }
    in_queue(
        monkeypatch,
        [job(name, state, title="encore-resnet", comment=comment) for name, (state, comment) in jobs.items()],
    )
    assert {row.job: (row.state, row.reason) for row in status.overview(home, status.ask(), None)} == {
        "12": ("not reached", ""),
        "13": ("reached", ""),
        "14": ("failed", f"no run folder in {away}; Slurm: FAILED"),
        "15": ("ended", "Slurm: FAILED; its run folder, if any, is elsewhere"),
    }
    names = ("12", "13", point.path.name)
    assert [control.find_subject(name, home).folder for name in names] == [run, point, point]
    assert control.newest(tmp_path / "nothing here").path == run.path


def test_job_that_resumes_a_run_shares_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = run_folder.ExperimentState(status="interrupted", started=files.utc_now(), job="12")
    run = make_run(tmp_path, [stopped], "-job12", "12")
    again = job("13", "PENDING", title="encore-resnet", comment=f"encore:{tmp_path}|{run.path.name}")
    in_queue(monkeypatch, ())
    for results in (tmp_path, tmp_path / "elsewhere"):
        rows = [(row.state, row.run) for row in status.overview(results, status.Queue((again,), True), None)]
        assert (rows, control.folder_of("13", results, [again])) == ([("queued", run.path)], run)


def test_rewritten_metrics_are_read_again(tmp_path: Path) -> None:
    tail, progress = follow.Tail(tmp_path / "metrics.jsonl"), follow.Progress()
    run_start, resumed = (
        start({"accuracy": 0.9}, resumed_step=step, epochs=3, global_batch_size=8) for step in (0, 20)
    )
    steps = [training_step(number, float(number)) for number in (1, 2, 3, 21, 22, 23, 24)]
    for records, expected in (
        ((run_start, *steps[:3]), (1, 3, 5 / 3, 1, 8.0)),
        ((run_start, steps[0], resumed, *steps[3:]), (3, 24, 5 / 24, 2, 8.0)),
    ):
        write_files(tmp_path, {"metrics.jsonl": list(records)})
        for record in tail.read():
            progress.add(record)
        state = (progress.epoch, progress.step, progress.loss, progress.starts, progress.samples_per_second)
        assert state == expected and (progress.total_steps, progress.targets) == (30, {"accuracy": 0.9})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:41", 41), ("10:00", 600), ("1:00:01", 3601), ("2-01:00:00", 176400), ("INVALID", None), ("", None)],
)
def test_seconds_of_slurm_times(text: str, seconds: float | None) -> None:
    assert commands.parse_seconds(text) == seconds


# -- cancel in Slurm ------------------------------------------------------------------------------------


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Mock:
    # Calls of Slurm, whose queue has an array, a job of another name, and one of another user
    tasks = (job("12_0", "RUNNING"), job("12_1", "PENDING", "Resources"))
    others = (job("13", "RUNNING", title="sleep"), job("14", "RUNNING", user="somebody"))
    in_queue(monkeypatch, (*tasks, *others, job("15", "COMPLETED"), job("16", "PENDING")))
    monkeypatch.setattr(commands, "require", lambda: None)
    monkeypatch.setattr(commands, "call", call := Mock(return_value=""))
    return call


def test_jobs_and_tasks_are_cancelled(slurm: Mock, tmp_path: Path) -> None:
    run = make_run(tmp_path, [RUNNING, PREPARED], "-job12", "12_0")
    # By job, task, Slurm's number of the task, run folder; the last job has no folder yet
    names = ("12", "12_1", "12001", run.path.name[:16], "16")
    lines = [control.cancel(control.find_subject(name, tmp_path)) for name in names]
    assert slurm.call_args_list == [call("scancel", name) for name in ("12", "12_1", "12_1", "12", "16")]
    assert [lines[0][0], lines[0][-1], lines[1][0], lines[4][-1]] == [
        "cancelled job 12, 2 tasks (running)",
        f"resume with: {hints.resume(run.path)}",
        "cancelled job 12_1 (in the queue)",
        "it does not have a run folder yet: nothing to resume",
    ]
    assert "encore submit --resume" in lines[0][-1].replace(str(paths.ROOT / ".venv" / "bin") + "/", "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("13", r"job 13 \(sleep\) was not submitted by Encore"),
        ("14", "job 14 belongs to somebody"),
        ("15", "job 15 has ended: COMPLETED"),
        ("99", "no job 99"),
        ("resnet-job12", "no run 'resnet-job12'"),
    ],
)
def test_cancel_refuses(slurm: Mock, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(EncoreError, match=message) as error:
        control.cancel(control.find_subject(name, tmp_path))
    assert error.value.exit_code == ExitCode.REFUSED and not slurm.called


STEPS = {
    "node": "n1", "step": 9, "steps": 9, "window": 40.0, "median": 1.0, "p99": 1.0, "input": 0.0, "cpu": 1.0,
    "delayed": 0.0,
}  # fmt: skip


def write_steps(experiment: Path, *waits: float, age: float = 5.0) -> None:
    times = [{"time": time.time() - seconds} for seconds in (age + 40.0, age)]
    for rank, share in enumerate(waits):
        lines = [{**STEPS, **moment, "local_rank": rank, "waiting": share} for moment in times]
        write_files(experiment, {f"steps/rank_{rank}.jsonl": lines})


def write_heartbeats(experiment: Path, host: str, *ages: float) -> None:
    for rank, alive in enumerate(time.time() - age for age in ages):
        write_files(experiment, {f"heartbeat/rank_{rank}": f"1 {host} 9 {alive:.3f} {alive:.3f} 0\n"})


def test_status_and_follow_show_the_rank_that_waits_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = make_experiment(tmp_path, "running", "", start({}))
    monkeypatch.setattr(status, "forecast_of", lambda experiment: None)
    monkeypatch.setattr(follow, "SLOW_SECONDS", 0.0)
    slow = "rank 1 is slow (n1, device 1): the others wait 60% of their time, it 10%"
    for age, expected in ((5.0, slow), (300.0, "")):
        write_steps(experiment.folder, 0.6, 0.1, age=age)
        row = status._progress(replace(status.overview(tmp_path, status.Queue(), None)[0], state="running"))
        texts = (row.slow, row.as_json()["slow"], follow.SlowRankWatch(experiment.folder).look())
        assert texts == (expected,) * 3 and (slow in describe(row)) is bool(expected)


@pytest.mark.parametrize(
    ("host", "age", "is_slow"), [(platform.node(), 8.0, True), ("n7", 8.0, False), ("n7", 95.0, True)]
)
def test_suspended_rank_is_slow(tmp_path: Path, host: str, age: float, is_slow: bool) -> None:
    write_heartbeats(tmp_path, host, 0.1, age)
    text = follow.slow_rank(tmp_path)
    assert text.startswith("rank 1 is slow (process 1 on ") == is_slow, text


def test_lines_of_a_run_are_not_repeated() -> None:
    screen = Console(file=io.StringIO(), width=80, soft_wrap=True)
    resumed = start({"accuracy": 0.95}, epochs=3, damaged={"step_00000008": "rank_1 is missing"})
    view, progress = progress_display.RunView(screen), progress_of(resumed, training_step(4, 1.0))
    view.start("experiment 1/1")
    for slow in ("", "rank 1 is slow", "rank 1 is slow", ""):
        progress.slow, view._next = slow, 0.0
        view.update(progress)
    progress.add(evaluation(1, accuracy=0.9))
    view.update(progress)
    assert screen.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "experiment 1/1: starting",
        "checkpoint step_00000008 is damaged (rank_1 is missing): experiment 1/1 resumed from an earlier one, step 4",
        "experiment 1/1: epoch 1/3  loss 1.2500",
        "experiment 1/1: rank 1 is slow",
        "experiment 1/1: epoch 1/3  quality 0.9000 of 0.95 (epoch 1)  loss 1.2500",
    ]


BOX_AND_MASK = {"box": 0.377, "mask": 0.339}


@pytest.mark.parametrize(
    ("targets", "scale", "expected"),
    [
        ({"accuracy": 0.95}, {}, "epoch 2/12  max. 0:09:00 left  quality 0.9000 of 0.95"),
        ({"box": 0.377}, {"epochs": 1, "steps_per_epoch": 2000}, "768 of 128,000 samples  max. 2:45:40 left  quality"),
        (BOX_AND_MASK, {}, "epoch 2/12  max. 0:09:00 left  box 0.9000 of 0.377, mask 0.9000 of"),
    ],
    ids=["epochs", "samples", "two targets"],
)
def test_line_of_80_columns_has_the_time_left_and_the_quality(
    targets: dict[str, float], scale: dict[str, int], expected: str
) -> None:
    screen = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None, legacy_windows=False)
    qualities = dict.fromkeys(targets, 0.9)
    progress = progress_of({**start(targets), **scale}, evaluation(1, **qualities), training_step(12, 60.0))
    with progress_display.RunView(screen) as view:
        view.start("experiment 1/1")
        view.update(progress)
    (line,) = re.findall(r"1/1 [^\r\n]*max.*", screen.file.getvalue())  # type: ignore[attr-defined]
    assert len(line) <= 80 and expected in line


def test_other_nodes_of_a_job_are_sampled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "name", lambda: "n1")
    jobs = [queue.Allocation(job=name, nodes=("n1", "n2", "n3", "n4")) for name in ("7", "JOB")]
    command, *none = (step.samplers(*of_job, tmp_path) for of_job in ((jobs[0], 3), (jobs[0], 1), (jobs[1], 2)))
    assert {"srun", "--nodes=2", "--nodelist=n2,n3", "--overlap", "encore.machine.telemetry"} <= set(*command)
    assert none == [(), ()]


def test_doctor_without_a_job_checks_this_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    report = json.loads(output_of("doctor", "--nodes", "--quick", "--disk", tmp_path, "--json"))
    assert [entry["node"] for entry in report["nodes"]] == [node.name()]
    assert (tmp_path / "encore" / "gate" / f"{node.name()}.json").exists()
    assert run_encore("doctor", "--quick").exit_code == 1


def start(targets: dict[str, float], **fields: Any) -> dict[str, Any]:
    scale = {"ranks": 2, "global_batch_size": 64, "steps_per_epoch": 10, "epochs": 12}
    return {"kind": "start", "time": 0.0, **scale, "targets": targets, "resumed_step": 0, **fields}


def evaluation(epoch: int, **qualities: float) -> dict[str, Any]:
    return {"kind": "eval", "time": 9.0, "epoch": epoch, "qualities": qualities, "seconds": 1.0}


def training_step(number: int, time: float) -> dict[str, Any]:
    return {"kind": "step", "time": time, "epoch": 1 + (number - 1) // 10, "step": number, "loss": 5.0 / number}


def progress_of(*records: dict[str, Any]) -> follow.Progress:
    progress = follow.Progress()
    for record in records:
        progress.add(record)
    return progress


# 20 of 120 steps and an evaluation in 100 s: steps 2 to 10 took 8 s, steps 12 to 20 took 5 s
FIRST_EPOCH = [training_step(2, 102.0), training_step(4, 104.0), training_step(10, 110.0)]
TWO_EPOCHS = [*FIRST_EPOCH, evaluation(1, accuracy=0.5), training_step(12, 195.0), training_step(20, 200.0)]


def two_qualities(targets: dict[str, float] = BOX_AND_MASK) -> catalogue.Benchmark:
    resnet = catalogue.choose("resnet").benchmark.model_dump()
    qualities = {
        "box": {"title": "box mAP", "config": "box_target", "log_name": "BBOX"},
        "mask": {"title": "mask mAP", "config": "mask_target", "log_name": "SEGM"},
    }
    rounds = {"v0.7": {"targets": targets, "runs": 5}}
    return catalogue.Benchmark.model_validate({**resnet, "qualities": qualities, "rounds": rounds})


def make_experiment(
    results: Path, state: run_folder.Status, log: str, *records: dict[str, Any]
) -> run_folder.Experiment:
    ended = replace(REACHED, status=state, job="")
    (experiment,) = make_run(results, [ended], config={"quality_target": 0.759}).experiments()
    write_files(experiment.folder, {experiment.metrics.name: list(records), experiment.log.name: log})
    experiment.publish_log()
    return experiment


PERPLEXITY = start({"log_perplexity": 3.3}, epochs=1, steps_per_epoch=2000, global_batch_size=32)
LAST_STEP = {"kind": "step", "time": 1.0, "epoch": 1, "step": 382, "loss": 3.5, "learning_rate": 0.1}


@pytest.mark.parametrize(
    ("records", "text"),
    [
        (
            [start({"accuracy": 0.95}, time=100.0, batch_unit="token positions"), *FIRST_EPOCH],
            "epoch 1/12  loss 0.5000  64 token positions/s",
        ),
        # The quality keeps its epoch in the next one; the remaining time includes evaluations
        (
            [start({"accuracy": 0.95}, time=100.0), *TWO_EPOCHS],
            "epoch 2/12  max. 0:08:20 left  quality 0.5000 of 0.95 (epoch 1)  loss 0.2500  102 samples/s",
        ),
        (
            [start(BOX_AND_MASK), evaluation(4, box=0.31, mask=0.28)],
            "epoch 1/12  box 0.3100 of 0.377, mask 0.2800 of 0.339 (epoch 4)",
        ),
        ([PERPLEXITY], "0 of 64,000 samples"),
        # The records of steps are written later than those of evaluations
        (
            [PERPLEXITY, LAST_STEP, {**evaluation(1, log_perplexity=3.4), "step": 384}],
            "12,224 of 64,000 samples  quality 3.4000 of 3.3 (after 12,288 samples)  loss 3.5000",
        ),
        (
            [PERPLEXITY, LAST_STEP, evaluation(1, log_perplexity=3.4)],
            "12,224 of 64,000 samples  quality 3.4000 of 3.3 (after 12,224 samples)  loss 3.5000",
        ),
    ],
)
def test_live_line_names_its_numbers(records: list[dict[str, Any]], text: str) -> None:
    assert facts(progress_of(*records)) == text


def test_speed_is_compared_with_the_data_sheet() -> None:
    known = peaks.utilization(24.5e9, 63_601, "samples", "NVIDIA H200", "fp16", 8)
    unknown = peaks.utilization(1.2e6, 50.0, "token positions", "", "fp32", 2)
    assert known["mfu"] == pytest.approx(24.5e9 * 63_601 / (8 * 989.5e12))
    assert [peaks.sentence(utilization) for utilization in (known, unknown)] == [
        "24.5 GFLOP per sample x 63,601 samples/s = 1.56 PFLOP/s: MFU 19.7% of the 7.92 PFLOP/s of NVIDIA H100 "
        "and H200 data sheets, SXM",
        "1.2 MFLOP per token position x 50.0 token positions/s = 60 MFLOP/s; no data sheet of the device is known",
    ]


DATA_SHEETS = [
    ("NVIDIA GB200", "fp8", 5000),
    ("NVIDIA B200", "bf16", 2250),
    ("NVIDIA H100 80GB HBM3", "tf32", 494.5),
    ("NVIDIA H100 PCIe", "fp16", 756.5),
    ("NVIDIA A100-SXM4-80GB", "bf16", 312),
    ("Tesla V100-SXM2-32GB", "fp16", 125),
    ("Tesla V100-SXM2-32GB", "bf16", None),
    ("NVIDIA H100 NVL", "fp16", 835.5),
    ("NVIDIA H200 NVL", "bf16", 835.5),
    ("NVIDIA H200", "bf16", 989.5),
    ("NVIDIA B300 SXM6 AC", "fp8", 4500),
    ("NVIDIA GB300", "fp8", 5000),
    ("AMD Instinct MI325X", "bf16", 1307.4),
    ("AMD Instinct MI355X", "fp8", 5033.2),
    ("NVIDIA GeForce RTX 4090", "fp16", None),
]


def test_data_sheets_of_gpus() -> None:
    found = [(gpu, precision, peaks.peak_of(gpu, precision)) for gpu, precision, _ in DATA_SHEETS]
    assert [(gpu, precision, peak and peak[0] / 1e12) for gpu, precision, peak in found] == DATA_SHEETS


def test_start_reports_parts_over_budget() -> None:
    budget = {"imports": 12.0, "compile": 10.0, "rest": 38.0}
    times = ({"imports": 8.0, "compile": 52.04}, {"imports": 8.0})
    assert [progress_display.start({"seconds": seconds, "budget": budget}) for seconds in times] == [
        "startup took 60.0 s (budget 60 s): compile 52.0 s (budget 10 s)",
        "startup took 8.0 s (budget 60 s)",
    ]


def test_cost_of_checkpoints() -> None:
    saves = [
        {"kind": "checkpoint", "time": 1.0, "step": 10, "seconds": 0.25},
        {"kind": "checkpoint_written", "time": 3.0, "step": 10, "seconds": 2.0},
        {"kind": "checkpoint", "time": 4.0, "step": 20, "seconds": 0.5},
        {"kind": "checkpoint_written", "time": 7.0, "step": 20, "seconds": 3.0},
        {"kind": "checkpoint", "time": 9.0, "step": 20, "seconds": 9.0},  # at the end of the run
    ]
    written = [progress_of(start(BOX_AND_MASK), *records).written for records in (saves, [saves[0], saves[-1]])]
    cost = "2 checkpoints stopped training for 0.8 s, and took 5.0 s to write"
    assert (progress_display.checkpoints(written[0]), written[1]) == (cost, {})


@pytest.mark.parametrize(
    ("state", "minutes", "epochs", "accuracy", "line"),
    [
        ("reached", pytest.approx(40.0), 8, 0.7605, "quality 0.7605 of 0.759  epoch 8/12"),
        ("interrupted", None, 0, 0.3, "quality 0.3000 of 0.759  epoch 1/12"),
    ],
)
def test_finished_run_shows_its_log_and_another_its_metrics(
    tmp_path: Path, state: run_folder.Status, minutes: float | None, epochs: int, accuracy: float, line: str
) -> None:
    # The last evaluation is in the log only
    records = (start({"accuracy": 0.759}), evaluation(4, accuracy=0.3))
    experiment = make_experiment(tmp_path, state, resnet_v07(40.0, quality=(0.3, 0.7605)), *records)
    (result,) = evaluate.evaluate_run(run_folder.RunFolder(experiment.folder.parent))
    times = (result.minutes, result.epochs, result.planned_epochs, result.log is None)
    assert times == (minutes, epochs, 12, minutes is None)
    assert (result.qualities, result.targets) == ({"accuracy": accuracy}, {"accuracy": 0.759})
    assert [describe(row) for row in status.overview(tmp_path, status.Queue(), None)] == [line]


def test_qualities_are_read_from_a_log_by_their_log_names(tmp_path: Path) -> None:
    log = resnet_v07(40.0).replace('"value": "resnet"', '"value": "maskrcnn"')
    log = log.replace('"value": 0.7605', '"value": {"BBOX": 0.381, "SEGM": 0.3435}')
    experiment = make_experiment(tmp_path, "reached", log, start(BOX_AND_MASK))
    files.write_json(experiment.config, {"box_target": 0.377, "mask_target": 0.339})
    result = evaluate.evaluate_experiment(experiment, two_qualities())
    expected = ({"box": 0.381, "mask": 0.3435}, BOX_AND_MASK, pytest.approx(40.0))
    assert (result.qualities, result.targets, result.minutes) == expected
    with pytest.raises(ValidationError, match=r"round v0\.7 needs a target for each of box, mask"):
        two_qualities({"box": 0.377})
