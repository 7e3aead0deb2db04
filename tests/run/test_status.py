"""What status, follow and cancel print: of real runs outside of Slurm, and of recorded queues."""

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
from tests.run_folders import PREPARED, made
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

# squeue of Slurm 22.05 on two nodes: an array of four, a run of several hours, jobs of other names.
SQUEUE = """\
2_0¦7¦CANCELLED¦2¦0:00¦2026-11-20T19:17:19¦root¦debug¦Resources¦(null)¦encore-resnet
6¦6¦PENDING¦1¦0:00¦2026-11-20T19:14:27¦root¦debug¦DependencyNeverSatisfied¦(null)¦encore
4¦4¦PENDING¦2¦0:00¦2026-11-20T19:14:27¦root¦debug¦JobHeldUser¦(null)¦encore x|y
2_1¦8¦COMPLETED¦2¦10:00¦2026-11-20T19:14:27¦root¦debug¦None¦(null)¦encore-resnet
2_3¦2¦PENDING¦2¦0:00¦2026-11-20T19:14:27¦root¦debug¦Resources¦(null)¦encore-resnet
2_2¦9¦RUNNING¦2¦0:41¦2026-11-20T19:14:27¦root¦debug¦None¦(null)¦encore-resnet
""".replace("¦", queue.SEPARATOR)


def shown(encore: Encore, results: Path) -> dict[str, Any]:
    done = encore("status", "--results", str(results), "--json", code=0)
    (row,) = json.loads(done.stdout)["runs"]
    return dict(row)


def cancelled_output(run: Path, suspended: Sequence[psutil.Process]) -> str:
    cancel = Started(in_background("cancel", str(run)), run.parent)
    wait_until(lambda: all(is_told(rank, signal.SIGTERM) for rank in suspended), "SIGTERM to the ranks")
    for rank in suspended:
        rank.resume()
    return cancel.ended(0)


# -- real runs ------------------------------------------------------------------------------------------


def test_run_is_shown_followed_and_cancelled_and_goes_on(
    encore: Encore, few_digits: Path, tmp_path: Path, study: Study
) -> None:
    started = Started.run(few_digits, tmp_path, *TINY)
    folder = started.wait_for_step(13)
    run, ranks = folder.parent, started.ranks(folder)
    for rank in ranks:
        rank.suspend()  # in the second epoch: it must not end while it is looked at
    row = shown(encore, tmp_path)
    assert (row["state"], row["epochs"], row["job"], row["targets"]) == ("running", 2, None, {"accuracy": 1.0})
    assert row["seconds"] > 0

    following = (in_background("follow", *words, "--results", str(tmp_path)) for words in ((), (run.name,)))
    left, watching = (Started(each, tmp_path) for each in following)
    begun = [next(line for line in each.process.stdout or () if "epoch" in line) for each in (left, watching)]
    left.process.send_signal(signal.SIGINT)
    assert "it continues" in left.ended(ExitCode.INTERRUPTED) and started.process.poll() is None

    said = cancelled_output(run, ranks)
    assert "a checkpoint was written" in said and f"encore run --resume {run}" in said
    started.ended(ExitCode.INTERRUPTED)
    assert_none_left(ranks)
    watching.ended(ExitCode.INTERRUPTED)
    assert all("experiment 1/1: epoch 2/2" in text for text in begun), begun

    row = shown(encore, tmp_path)
    assert row["state"] == "interrupted" and "a checkpoint was written" in row["reason"]
    again = encore("cancel", run.name, "--results", str(tmp_path))
    assert again.returncode == ExitCode.REFUSED and "does not run: interrupted" in again.stderr

    assert encore("run", "--resume", str(run)).returncode == ExitCode.NOT_REACHED
    assert_same_run(folder, study.of_ranks(2))
    assert shown(encore, tmp_path)["state"] == "not reached"
    assert encore("follow", str(run)).returncode == ExitCode.NOT_REACHED


def test_ranks_of_a_killed_run_are_shown_ended_and_resumed(
    encore: Encore, few_digits: Path, tmp_path: Path, study: Study
) -> None:
    started = Started.run(few_digits, tmp_path, *TINY)
    folder = started.wait_for_step(13)
    ranks, left = started.ranks(folder), processes.family(started.process.pid)[1:]
    for rank in ranks:
        rank.suspend()  # they must not end while they are looked at
    started.process.kill()
    started.process.communicate()
    row = shown(encore, tmp_path)
    assert (row["state"], row["reason"]) == ("running", status.UNSUPERVISED)
    before = (folder / "metrics.jsonl").read_bytes()
    refused = encore("run", "--resume", str(folder.parent))
    assert refused.returncode == ExitCode.REFUSED and "still run here without their supervisor" in refused.stderr
    assert (folder / "metrics.jsonl").read_bytes() == before
    said = cancelled_output(folder.parent, ranks)
    assert "cancelled after its encore run was killed, a checkpoint was written" in said
    assert len(left) > len(ranks)
    assert_none_left(left)
    assert resumed_as_printed(said).returncode == ExitCode.NOT_REACHED
    assert_same_run(folder, study.of_ranks(2))


# -- states ---------------------------------------------------------------------------------------------


RUNNING = ExperimentState(status="running", started="2026-11-20T19:00:00Z", job="12")
STOPPED = ExperimentState(
    status="interrupted", reason="a checkpoint was written", started="2026-11-20T19:00:00Z", job="12"
)
BROKEN = ExperimentState(
    status="failed", reason="rank 1 was killed by SIGKILL", started="2026-11-20T19:00:00Z", job="12"
)


@pytest.mark.parametrize(
    ("state", "found", "answers", "expected"),
    [
        (PREPARED, job("12", "RUNNING"), True, ("starting", "")),
        (RUNNING, job("12", "RUNNING"), True, ("running", "")),
        (RUNNING, job("12", "COMPLETING"), True, ("running", "")),
        (RUNNING, job("12", "TIMEOUT"), True, ("lost", "Slurm: TIMEOUT")),
        (RUNNING, None, True, ("lost", "job 12 is no longer there")),
        # The controller is silent, but the state file was written a moment ago.
        (RUNNING, None, False, ("running", "")),
        # Slurm has requeued the job of a node that died, which wrote nothing any more.
        (RUNNING, job("12", "PENDING", "BeginTime"), True, ("queued", "BeginTime")),
        (STOPPED, job("12", "PENDING", "BeginTime"), True, ("queued", "BeginTime")),
        (STOPPED, job("12", "RUNNING"), True, ("starting", "")),
        (STOPPED, job("12", "CANCELLED"), True, ("interrupted", "a checkpoint was written")),
        (BROKEN, job("12", "RUNNING"), True, ("failed", "rank 1 was killed by SIGKILL")),
        (
            PREPARED,
            job("12", "NODE_FAIL"),
            True,
            ("not started", "Slurm: NODE_FAIL"),
        ),
        (ExperimentState(status="reached"), job("12", "RUNNING"), True, ("reached", "")),
        (ExperimentState(status="not_reached"), None, False, ("not reached", "")),
    ],
)
def test_state_by_state_file_and_queue(
    tmp_path: Path, state: ExperimentState, found: queue.Job | None, answers: bool, expected: tuple[State, str]
) -> None:
    (experiment,) = made(tmp_path, [state], "-job12", "12").experiments()
    assert status.verdict(experiment, found, answers) == expected


@pytest.mark.parametrize(("ahead", "renews"), [(120, True), (-120, True), (120, False), (7200, True)])
def test_a_run_elsewhere_is_watched_where_clocks_may_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, renews: bool
) -> None:
    # The heartbeat and the file server are so many seconds behind the clock here, or before it
    (experiment,) = made(tmp_path, [replace(RUNNING, job="")]).experiments()
    record = experiment.folder / "heartbeat" / "rank_0"
    record.parent.mkdir(exist_ok=True)

    def written(seconds: float) -> None:
        now = time.time() - ahead + seconds
        record.write_text(f"1 elsewhere 5 {now} {now}", encoding="ascii")
        os.utime(experiment.folder / "state.json", (now, now))

    written(0)
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=written if renews else time.sleep)
    monkeypatch.setattr(status, "time", clock)
    monkeypatch.setattr(status, "WATCH_SECONDS", 0.1)
    assert status.is_alive(experiment) is (renews and abs(ahead) < status.CLOCKS_APART_SECONDS)


def test_killed_run_is_lost(tmp_path: Path) -> None:
    run = made(tmp_path, [replace(RUNNING, job="")])
    gone = replace(ownership.this_process(""), process_started=0)
    files.write_json(run.path / "experiment_0" / ownership.RECORD, asdict(gone))
    (row,) = status.rows_of(run, Queue())
    assert (row.state, row.reason) == ("lost", "its processes are gone")
    with pytest.raises(EncoreError, match="does not run: lost"):
        control.cancel(control.named(str(run.path), tmp_path))


def test_run_is_as_the_experiment_that_matters(tmp_path: Path) -> None:
    reached = ExperimentState(status="reached", started="2026-11-20T19:00:00Z", ended="2026-11-20T19:05:00Z")
    prepared, queued = PREPARED, Queue((job("12", "RUNNING"),), True)
    cases = {"a": ([reached, RUNNING], queued), "b": ([reached, reached], Queue()), "c": ([reached, prepared], Queue())}
    rows = {name: status.rows_of(made(tmp_path / name, *given[:1]), given[1])[0] for name, given in cases.items()}
    assert {name: (row.state, row.reason, row.experiment, row.reached) for name, row in rows.items()} == {
        "a": ("running", "", 1, 1),
        "b": ("reached", "", 1, 2),
        "c": ("interrupted", "experiment 2 was never started", 1, 1),
    }
    assert (rows["b"].seconds, describe(rows["b"])) == (300.0, "experiment 2/2  2 reached")


def test_tasks_of_an_array_have_their_own_rows(tmp_path: Path) -> None:
    states = [
        ExperimentState(status="reached", job="12_1"),
        ExperimentState(status="running", started="2026-11-20T19:00:00Z", job="12_3"),
        PREPARED,
    ]
    run = made(tmp_path, states, "-job12", "12_1")
    seen = Queue((job("12_1", "COMPLETED"), job("12_3", "RUNNING"), job("12_5", "PENDING", "Resources")), True)
    reported = [(row.job, row.state, row.reason) for row in status.rows_of(run, seen)]
    assert reported == [("12_1", "reached", ""), ("12_3", "running", ""), ("12_5", "queued", "Resources")]
    assert [each.number for each in control.experiments("12_5", run, seen)] == [2]
    assert [each.number for each in control.experiments("12", run, seen)] == [0, 1, 2]
    # Their rows are all that there is of the job.
    assert len(status.overview(tmp_path, seen, None)) == 3


STATE = "experiment_0/state.json"
DAMAGES = {
    "half": ("run.json", '{"na'), "list": ("run.json", "[]"), "other": ("run.json", '{"slurm": 7}'),
    "word": (STATE, "{}"), "keys": (STATE, '{"status": "running", "more": 1}'), "empty": (STATE, ""),
    "metrics": ("experiment_0/metrics.jsonl", '{"kind": "start"}\n{"kind": "ste'),
}  # fmt: skip


@pytest.mark.slow
def test_damaged_folders_are_rows_and_not_crashes(encore: Encore, tmp_path: Path) -> None:
    for name, (file, text) in DAMAGES.items():
        (made(tmp_path, [RUNNING], f"-{name}").path / file).write_text(text, encoding="utf-8")
    run = made(tmp_path, mark="-name").path
    (run / "experiment_0").rename(run / "experiment_zero")
    (made(tmp_path, mark="-gone").path / "run.json").unlink()
    (tmp_path / "notes").mkdir()
    done = encore("status", "--results", str(tmp_path), "--json", code=0)
    rows = {row["run"].rpartition("-")[2]: row for row in json.loads(done.stdout)["runs"]}
    assert {name for name, row in rows.items() if row["state"] == "damaged"} == set(rows) - {"metrics"}
    assert len(rows) == 9 and encore("status", "--results", str(tmp_path)).returncode == 0


def test_newest_runs_come_first_and_the_living_always(tmp_path: Path) -> None:
    for day in range(10, 20):
        run = made(tmp_path, [ExperimentState(status="reached")])
        run.path.rename(tmp_path / f"202611{day}T100000Z-resnet-mxnet-cpu")
    old = made(tmp_path, [RUNNING], "-job12", "12").path.rename(tmp_path / "20251120T100000Z-resnet-job12")
    rows = status.overview(tmp_path, Queue((job("12", "RUNNING"),), True), 3)
    assert [row.run.name[:8] for row in rows if row.run] == ["20261119", "20261118", "20261117", "20251120"]
    assert len(status.overview(tmp_path, Queue(), None)) == 11
    newest, of_job = control.newest(tmp_path), control.folder_of("12", tmp_path)
    assert (newest.path.name[:8], of_job) == ("20261119", RunFolder(old))


def test_exit_code_is_that_of_the_run() -> None:
    expected: dict[tuple[State, ...], ExitCode] = {
        ("reached", "reached"): ExitCode.REACHED, ("reached", "not reached"): ExitCode.NOT_REACHED,
        ("reached", "lost"): ExitCode.FAILED, ("failed",): ExitCode.FAILED, ("interrupted",): ExitCode.INTERRUPTED,
    }  # fmt: skip
    assert {states: exit_code(states) for states in expected} == expected


# -- Slurm's words --------------------------------------------------------------------------------------


def test_a_job_is_waited_for_from_the_queue_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits, begun, over = job("12", "PENDING", "Resources"), job("12", "RUNNING"), job("12", "TIMEOUT")
    answers = iter([Queue((waits,)), Queue((waits,)), Queue(note="no answer"), Queue((begun, over)), Queue((over,))])
    monkeypatch.setattr(status, "ask", lambda name: next(answers))
    monkeypatch.setattr(commands, "show_job", lambda name: {"StdOut": "slurm-12.out"})
    monkeypatch.setattr(jobs, "QUEUE_SECONDS", 0)
    subject = control.Subject(job="12")
    with pytest.raises(EncoreError, match=f"job 12 ended without a run folder in {tmp_path}: TIMEOUT") as ended:
        jobs._wait_for_folder(jobs.Notices(console(soft_wrap=True)), subject, tmp_path)
    begins = f"job 12 has begun; no run folder in {tmp_path} yet"
    assert capsys.readouterr().out.splitlines() == ["job 12 is queued: Resources", "no answer", begins]
    assert "slurm-12.out" in ended.value.hint and ended.value.exit_code == ExitCode.FAILED


def test_squeue_and_sacct_are_read() -> None:
    queued = {"nodes": 2, "state": "PENDING", "seconds": 0.0, "reason": "Resources", "title": "encore-resnet"}
    by_sacct = (
        f"12|12|CANCELLED by 0|2|00:01:00|2026-11-20T19:14:27|me|debug|None|{queue.COMMENT}/results/of mine|encore"
    )
    text = SQUEUE + "slurm_load_jobs error: something\n" + by_sacct.replace("|", queue.SEPARATOR)

    def read(name: str, number: str, **facts: Any) -> queue.Job:
        known = {"submitted": "2026-11-20T19:14:27", "user": "root", "partition": "debug", **queued, **facts}
        return queue.Job(name=name, number=number, **known)

    found = queue.parse(text)
    assert found == [
        read("2_0", "7", state="CANCELLED", submitted="2026-11-20T19:17:19"),
        read("6", "6", nodes=1, reason="DependencyNeverSatisfied", title="encore"),
        read("4", "4", reason="JobHeldUser", title="encore x|y"),
        read("2_1", "8", state="COMPLETED", seconds=600.0, reason=""),
        read("2_3", "2"),
        read("2_2", "9", state="RUNNING", seconds=41.0, reason=""),
        # The form that sacct(1) describes; no accounting ran where this was written.
        read("12", "12", state="CANCELLED", seconds=60.0, reason="", title="encore", user="me",
             comment="encore:/results/of mine"),
    ]  # fmt: skip
    assert [(each.array, each.task, each.waits, each.has_ended, each.is_encores) for each in found] == [
        ("2", 0, False, True, True), ("6", None, True, False, True), ("4", None, True, False, False),
        ("2", 1, False, True, True), ("2", 3, True, False, True), ("2", 2, False, False, True),
        ("12", None, False, True, True),
    ]  # fmt: skip
    assert found[-1].results == Path("/results/of mine")
    assert [(row.job, row.state, row.reason) for row in status.without_folder(found)] == [
        ("2_0", "cancelled", "its run folder, if any, is elsewhere"),
        ("6", "queued", "DependencyNeverSatisfied"),
        ("2_1", "ended", "Slurm: COMPLETED; its run folder, if any, is elsewhere"),
        ("2_3", "queued", "Resources"),
        ("2_2", "starting", "no run folder yet"),
        ("12", "cancelled", "no run folder in /results/of mine"),
    ]


def test_a_job_is_found_by_the_results_folder_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: list[tuple[str, ...]]
) -> None:
    away, home = tmp_path / "my results", tmp_path / "home"
    run = made(away, [ExperimentState(status="not_reached", job="12")], "-job12")
    study = home / "20261120T101500Z-sweep-resnet"
    point = made(study / "1x2", [ExperimentState(status="reached", job="13")], "-job13")
    (study / "study.json").touch()
    jobs = [
        job("12", "FAILED", title="encore-resnet", comment=f"encore:{away}"),
        job("13", "COMPLETED", title="encore-resnet"),
        job("14", "FAILED", title="encore-resnet", comment=f"encore:{away}"),
        job("15", "FAILED", title="encore-resnet"),
    ]
    in_queue(monkeypatch, jobs)
    rows = {row.job: row for row in status.overview(home, status.ask(), None)}
    assert {name: row.state for name, row in rows.items()} == {
        "12": "not reached", "13": "reached", "14": "failed", "15": "ended",
    }  # fmt: skip
    assert rows["14"].reason == f"no run folder in {away}; Slurm: FAILED"
    for name, folder in (("12", run), ("13", point)):
        found = control.named(name, home).folder
        assert found is not None and found.path == folder.path
    assert control.newest(tmp_path / "nothing here").path == run.path


def test_status_is_true_for_other_users_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A run of somebody else's, in jobs that `squeue --me` does not show
    results, call = tmp_path / "results", SLURM_OF_TWO_USERS.replace("RESULTS", str(tmp_path / "results"))
    for state in (RUNNING, replace(STOPPED, job="13")):
        made(results, [state], f"-job{state.job}", state.job)
    monkeypatch.setattr(queue, "is_there", lambda: True)
    monkeypatch.setattr(queue, "accounted", list)

    def squeue(*command: str) -> str:
        lines = call.splitlines(keepends=True)
        return "".join(line for line in lines if "--me" not in command or "¦me¦" in line).replace("¦", queue.SEPARATOR)

    monkeypatch.setattr(commands, "call", squeue)
    monkeypatch.setattr(queue, "this_user", lambda: "me")
    rows = {row.job: row for row in status.overview(results, status.ask(), None)}
    assert {name: row.state for name, row in rows.items()} == {"12": "running", "13": "queued", "16": "starting"}
    assert (rows["12"].partition, rows["16"].user, rows["16"].benchmark) == ("long", "other", "ncf")
    assert varied_columns([rows["12"]]) == ["user"], "it is not one's own"
    assert varied_columns([replace(rows["12"], user="me")]) == []


SLURM_OF_TWO_USERS = """\
12¦12¦RUNNING¦2¦0:41¦2026-11-20T19:14:27¦other¦long¦None¦encore:RESULTS¦encore-resnet
13¦13¦PENDING¦2¦0:00¦2026-11-20T19:14:27¦other¦debug¦BeginTime¦encore:RESULTS¦encore-resnet
16¦16¦RUNNING¦1¦0:09¦2026-11-20T19:14:27¦other¦debug¦None¦encore:RESULTS¦encore-ncf
17¦17¦RUNNING¦1¦0:09¦2026-11-20T19:14:27¦other¦debug¦None¦encore:/home/other/results¦encore-ncf
"""


@pytest.mark.parametrize(("state", "shown"), [("PENDING", "queued"), ("COMPLETED", "reached")])
def test_a_job_that_resumes_a_run_has_no_row_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, shown: str
) -> None:
    # The second experiment had ended before: the last job of the run is not the last one's.
    first = ExperimentState(status="interrupted" if shown == "queued" else "reached", started=files.utc_now(), job="12")
    run = made(tmp_path, [first, ExperimentState(status="reached", started=files.utc_now(), job="12")], "-job12", "12")
    if shown == "reached":
        run.experiments()[0].set_state(replace(first, job="13"))
    again = job("13", state, title="encore-resnet", comment=f"encore:{tmp_path}|{run.path.name}")
    seen = Queue((job("12", "CANCELLED", title="encore-resnet"), again), True)
    in_queue(monkeypatch, ())
    (row,) = status.overview(tmp_path, seen, None)
    assert (row.state, row.run) == (shown, run.path)
    assert control.folder_of("13", tmp_path / "elsewhere", [again]) == run
    third = replace(again, name="14", number="14")
    rows = status.overview(tmp_path / "elsewhere", Queue((again, third), True), None)
    assert [row.run for row in rows] == [run.path], "one row, however many jobs resumed it"
    # A job of another cluster made a folder of the same number.
    made(tmp_path, [first], "-job13", "13")
    assert control.folder_of("13", tmp_path, [again]) == run


def test_a_point_of_a_sweep_hides_its_cancelled_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = tmp_path / "20261120T101500Z-sweep-resnet"
    made(study / "1x2", [ExperimentState(status="reached", job="20")], "-job20", "20")
    (study / "study.json").touch()
    gone = job("13", "CANCELLED", title="encore-resnet", comment=f"encore:{study / '1x2'}")
    in_queue(monkeypatch, ())
    rows = status.overview(tmp_path, Queue((gone, job("20", "COMPLETED", title="encore-resnet")), True), None)
    assert [(row.job, row.state) for row in rows] == [("20", "reached")]


def test_a_stream_that_was_cut_and_grew_again_is_read_anew(tmp_path: Path) -> None:
    stream, progress = tmp_path / "metrics.jsonl", follow.Progress()
    tail = follow.Tail(stream)
    start = {"kind": "start", "epochs": 6, "steps_per_epoch": 4, "global_batch_size": 8, "targets": {"accuracy": 0.9}}

    def read(*records: dict[str, Any]) -> tuple[object, ...]:
        lines = [json.dumps({"time": 1.0 + number, **record}) + "\n" for number, record in enumerate(records)]
        stream.write_text("".join(lines))
        for record in tail.read():
            progress.add(record)
        return progress.epoch, progress.step, progress.starts, progress.samples_per_second

    steps = [{"kind": "step", "epoch": 1, "step": number, "loss": 1.0} for number in (1, 2, 3)]
    assert read({**start, "resumed_step": 0}, *steps) == (1, 3, 1, 8.0)
    more = ({"kind": "step", "epoch": 6, "step": n, "loss": 0.5} for n in range(21, 25))
    again = ({**start, "resumed_step": 0}, steps[0], {**start, "resumed_step": 20}, *more)
    assert read(*again) == (6, 24, 2, 8.0)
    assert (progress.total_steps, progress.loss, progress.targets) == (24, 0.5, {"accuracy": 0.9})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:41", 41), ("10:00", 600), ("1:00:01", 3601), ("2-01:00:00", 176400), ("INVALID", None), ("", None)],
)
def test_times_of_slurm(text: str, seconds: float | None) -> None:
    assert commands.seconds_of(text) == seconds


# -- cancel in Slurm ------------------------------------------------------------------------------------


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    # Command lines that cancel, in a queue of an array, a job of another name and one of another user
    array = (job("12_0", "RUNNING"), job("12_1", "PENDING", "Resources"))
    others = (job("13", "RUNNING", title="sleep"), job("14", "RUNNING", user="somebody"))
    in_queue(monkeypatch, (*array, *others, job("15", "COMPLETED"), job("16", "PENDING")))
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr(commands, "require", lambda: None)
    monkeypatch.setattr(commands, "call", lambda *command: called.append(command) or "")
    return called


def test_jobs_and_single_tasks_are_cancelled(cancelled: list[tuple[str, ...]], tmp_path: Path) -> None:
    run = made(tmp_path, [RUNNING, PREPARED], "-job12", "12_0")
    reported = control.cancel(control.named("12", tmp_path))
    assert reported[0] == "cancelled job 12, 2 tasks (running)"
    assert reported[-1] == f"resume with: {hints.resume(run.path)}"
    assert "encore submit --resume" in reported[-1].replace(str(paths.ROOT / ".venv" / "bin") + "/", "")
    assert control.cancel(control.named("12_1", tmp_path))[0] == "cancelled job 12_1 (in the queue)"
    # Slurm's own number of the task, and the run folder of the job.
    control.cancel(control.named("12001", tmp_path))
    control.cancel(control.named(str(run.path), tmp_path))
    assert control.cancel(control.named("16", tmp_path))[-1] == "it has no run folder yet: nothing is left of it"
    assert [command[1] for command in cancelled] == ["12", "12_1", "12_1", "12", "16"]
    assert {command[0] for command in cancelled} == {"scancel"}


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("13", r"job 13 \(sleep\) is none of Encore's"),
        ("14", "job 14 belongs to somebody"),
        ("15", "job 15 has ended: COMPLETED"),
        ("99", "no job 99"),
        ("resnet-job12", "no run 'resnet-job12'"),
    ],
)
def test_what_cannot_be_cancelled_is_refused(
    cancelled: list[tuple[str, ...]], tmp_path: Path, name: str, reported: str
) -> None:
    with pytest.raises(EncoreError, match=reported) as refused:
        control.cancel(control.named(name, tmp_path))
    assert refused.value.exit_code == ExitCode.REFUSED and not cancelled
