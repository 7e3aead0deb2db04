"""The faults, by name: each takes a trial, breaks something in it, and returns the verdict."""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from encore.run import hints
from tools.faults import data_sets, disks
from tools.faults.data_sets import HARM, flip
from tools.faults.trial import Trial, Verdict, differences, snapshot, steps, traceback_of, verdict_of

Fault = Callable[[Trial], Verdict]
HANG_SECONDS = 15

# -- signals --------------------------------------------------------------------------------------------


def _targets(trial: Trial, encore: subprocess.Popen[str], target: str) -> list[int]:
    # The processes that a signal is for
    ranks = trial.ranks()
    if target == "rank":
        return [trial.moment.choice(ranks)]
    if target == "ranks":
        return ranks
    family = [process.pid for process in trial.processes() if process.pid not in (encore.pid, *ranks)]
    return family[:1] if target == "launcher" else [encore.pid]


def _signalled(number: signal.Signals, target: str, trial: Trial) -> Verdict:
    # Send a signal at some moment of the training, wait for the end, resume as it was printed
    trial.options.extend(["--hang-seconds", str(HANG_SECONDS)] if number == signal.SIGSTOP else [])
    encore = trial.begin()
    trial.wait_for_moment(encore)
    for pid in _targets(trial, encore, target):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return trial.after(trial.ended(encore), killed=(number, target) == (signal.SIGKILL, "encore"))


def _early(number: signal.Signals, trial: Trial) -> Verdict:
    # Send a signal before the first step
    encore = trial.begin()
    while encore.poll() is None and not list(trial.results.glob("[!.]*/run.json")):
        time.sleep(0.01)
    with contextlib.suppress(subprocess.TimeoutExpired):
        encore.wait(trial.moment.uniform(0, 2))
    encore.send_signal(number)
    return trial.after(trial.ended(encore), killed=number == signal.SIGKILL)


def _resume_killed(trial: Trial) -> Verdict:
    # Kill the resume as well
    run = trial.copied(trial.bench.stopped)
    encore = trial.spawn(hints.resume(run))
    done, every = len(steps(run)), len(steps(trial.bench.uninterrupted))
    trial.wait_for_records(encore, trial.moment.randrange(min(done + 1, every), every + 1))
    encore.kill()
    return trial.after(trial.ended(encore), killed=True)


# -- files ----------------------------------------------------------------------------------------------


def _checkpoint(run: Path, pattern: str, trial: Trial) -> Path:
    newest = sorted((run / "experiment_0" / "checkpoint").glob("step_*"))[-1]
    return trial.moment.choice(sorted(newest.glob(pattern)))


FILES: dict[str, Callable[[Path, Trial], Path]] = {
    "shared": lambda run, trial: _checkpoint(run, "shared", trial),
    "rank": lambda run, trial: _checkpoint(run, "rank_[0-9]", trial),
    "checkpoint-state": lambda run, trial: _checkpoint(run, "state.json", trial),
    "checksum": lambda run, trial: _checkpoint(run, "*.sha256", trial),
    "metrics": lambda run, trial: run / "experiment_0" / "metrics.jsonl",
    "log": lambda run, trial: run / "experiment_0" / "result.txt",
    "run.json": lambda run, trial: run / "run.json",
    "config.json": lambda run, trial: run / "config.json",
    "experiment-config": lambda run, trial: run / "experiment_0" / "config.json",
    "experiment-state": lambda run, trial: run / "experiment_0" / "state.json",
}


def _harmed(how: str, file: str, trial: Trial) -> Verdict:
    # Harm a file of a stopped run and resume it
    return trial.resume_stopped(lambda run: HARM[how](FILES[file](run, trial), trial))


def _harmed_finished(how: str, file: str, trial: Trial) -> Verdict:
    # Harm a file of a finished run and resume it: its result stays in any case
    run = trial.copied(trial.bench.uninterrupted)
    HARM[how](FILES[file](run, trial), trial)
    before = snapshot(run)
    verdict = trial.resumed(run)
    changed = sorted(name for name, _ in before.items() ^ snapshot(run).items())
    return Verdict("FAULT", f"changed {', '.join(changed)}") if changed and verdict.kind != "FAULT" else verdict


def _without(folder: str, trial: Trial) -> Verdict:
    # Remove a folder of a stopped run and resume it
    return trial.resume_stopped(lambda run: shutil.rmtree(run / folder))


def _all_checkpoints_harmed(trial: Trial) -> Verdict:
    run = trial.copied(trial.bench.stopped)
    for path in (run / "experiment_0" / "checkpoint").glob("*/shared"):
        flip(path, trial)
    first = trial.resumed(run)
    # What is refused once is refused again, and not begun anew over what is there.
    return trial.resumed(run) if first.kind == "refused" else first


def _moved_run(trial: Trial) -> Verdict:
    run = trial.copied(trial.bench.stopped)
    (trial.results / "to another place").mkdir()
    return trial.resumed(run.rename(trial.results / "to another place" / "run"))


# -- two at once ----------------------------------------------------------------------------------------


def _two_resumes(trial: Trial) -> Verdict:
    # Resume twice at once: one runs, the other is refused, or finds nothing left to do
    run = trial.copied(trial.bench.stopped)
    codes = sorted(child.wait() for child in [trial.spawn(hints.resume(run)) for _ in range(2)])
    found = [*differences(run, trial.bench.uninterrupted), *trial.left()]
    if codes not in ([2, 3], [3, 3]):
        found.append(f"exit codes {codes}")
    return verdict_of(found)


def _resume_of_the_living(trial: Trial) -> Verdict:
    # Resume a run that runs: refused, and the run does not notice
    encore = trial.begin()
    trial.wait_for_moment(encore)
    second = trial.do(hints.resume(trial.run))
    code = encore.wait()
    found = [*differences(trial.run, trial.bench.uninterrupted), *trial.left()]
    if code != 3 or second.code not in (2, 3) or traceback_of(second):
        found.append(f"exit codes {code} and {second.code}: {second.output[-300:]}")
    return verdict_of(found)


def _two_runs(trial: Trial) -> Verdict:
    # Start two runs in the same second with one results folder: each gets its own
    codes = [child.wait() for child in [trial.begin() for _ in range(2)]]
    runs = sorted(path.parent for path in trial.results.glob("[!.]*/run.json"))
    found = [
        f"{run.name}: {each}" for run in runs for each in differences(run, trial.bench.uninterrupted)
    ] + trial.left()
    if codes != [3, 3] or len(runs) != 2:
        found.append(f"exit codes {codes}, {len(runs)} run folders")
    return verdict_of(found)


# Every fault by name
FAULTS: dict[str, Fault] = {
    **{
        f"{number.name.lower()}-{target}": functools.partial(_signalled, number, target)
        for target in ("encore", "launcher", "rank")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    },
    "sigkill-ranks": functools.partial(_signalled, signal.SIGKILL, "ranks"),
    "sigstop-rank": functools.partial(_signalled, signal.SIGSTOP, "rank"),
    **{
        f"{number.name.lower()}-early": functools.partial(_early, number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    },
    "sigkill-resume": _resume_killed,
    **{f"{how}-{file}": functools.partial(_harmed, how, file) for file in FILES for how in HARM},
    **{f"{how}-finished-state": functools.partial(_harmed_finished, how, "experiment-state") for how in HARM},
    **{f"{how}-finished-run.json": functools.partial(_harmed_finished, how, "run.json") for how in HARM},
    "no-checkpoints": functools.partial(_without, "experiment_0/checkpoint"),
    "all-checkpoints-flipped": _all_checkpoints_harmed,
    "no-experiment": functools.partial(_without, "experiment_0"),
    "moved-run": _moved_run,
    **{f"{how}-data": functools.partial(data_sets.harmed_data, how, False) for how in HARM},
    **{f"{how}-passport": functools.partial(data_sets.harmed_data, how, True) for how in HARM},
    "moved-data": data_sets.moved_data,
    **{
        f"{number.name.lower()}-preparation": functools.partial(data_sets.killed_preparation, number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    },
    "two-preparations": data_sets.two_preparations,
    "two-resumes": _two_resumes,
    "resume-of-the-living": _resume_of_the_living,
    "two-runs": _two_runs,
    "full-disk": disks.full_disk,
    "full-disk-preparation": disks.full_disk_preparation,
    "read-only-results": functools.partial(disks.read_only, "results"),
    "read-only-run": functools.partial(disks.read_only, "run"),
    "read-only-data": disks.read_only_data,
}

SHORT = ("sigkill-rank", "flipped-shared", "flipped-log", "flipped-run.json")
