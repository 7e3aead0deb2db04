"""Faults by name: each breaks something in a trial and returns the verdict."""

import contextlib
import functools
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from encore.run import hints
from tools.faults.trial import Done, Trial, Verdict, aside, differences, snapshot, steps, traceback_of, verdict_of

Fault = Callable[[Trial], Verdict]
HANG_SECONDS = 15
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)

# -- file systems ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(folder: Path, size: int) -> Iterator[Callable[[str], object]]:
    # Mount a file system of ``size`` bytes; yield a function to remount it with other options
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def mounting(fault: Callable[..., Verdict]) -> Callable[..., Verdict]:
    # A fault that is tried only where this user may mount a file system

    def tried(*arguments: Any) -> Verdict:
        return fault(*arguments) if can_mount() else Verdict("not tried", "mounting needs root")

    return tried


@functools.cache
def can_mount() -> bool:
    # Whether this user may mount a file system
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def full_disk(trial: Trial) -> Verdict:
    # Fill up the disk during the run; resume with free space. 1.5 times the run's space: two checkpoints remain while a
    # third is written.
    size = int(_size(trial.bench.uninterrupted) * trial.moment.uniform(0.1, 1.2))
    if not can_mount():
        return _limited(trial, trial.moment.uniform(0.1, 0.9))
    with mounted(trial.results, max(size, 2**16)) as remount:
        done = trial.do(trial.run_command())
        run_files = list(trial.results.glob("[!.]*/run.json"))
        if done.code == 2 and not run_files:
            return Verdict("refused") if "hint: " in done.output else Verdict("FAULT", done.output[-400:])
        if done.code == 1 and "disk is full" not in done.output and "space" not in done.output:
            return Verdict("FAULT", f"the cause is not named: {done.output[-600:]}")
        remount("size=4g")
        return trial.after(done)


def _limited(trial: Trial, share: float) -> Verdict:
    # The same with a file size limit
    largest = max(path.stat().st_size for path in trial.bench.uninterrupted.rglob("*") if path.is_file())
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest * share), previous[1]))
    try:
        encore = trial.begin()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
    return trial.after(trial.ended(encore))


@mounting
def full_disk_preparation(trial: Trial) -> Verdict:
    # Fill up the disk during a preparation; run it again with free space
    _ = trial.bench.uninterrupted
    folder = trial.folder / "data"
    with mounted(folder, max(2**16, int(_size(trial.bench.data) * trial.moment.uniform(0.1, 0.9)))) as remount:
        done = trial.do(prepare_command(trial, folder))
        if done.code not in (1, 2) or "hint: " not in done.output or traceback_of(done):
            return Verdict("FAULT", f"ends with {done.code}: {done.output[-600:]}")
        remount("size=1g")
        return same_data(trial, trial.do(prepare_command(trial, folder)), folder)


@mounting
def read_only(target: str, trial: Trial) -> Verdict:
    # Make the file system read-only for a new run or a resumed run
    with mounted(trial.results, 4 << 30) as remount:
        if target == "results":
            remount("ro")
            return trial.judged(trial.results, trial.do(trial.run_command()), {})
        run = trial.copied(trial.bench.stopped)
        remount("ro")
        first = trial.resumed(run)
        remount("rw")
        return trial.resumed(run) if first.kind == "refused" else first


@mounting
def read_only_data(trial: Trial) -> Verdict:
    # Train from a data set that cannot be written
    run, data = trial.copied(trial.bench.stopped), trial.bench.data
    with aside(data) as backup, mounted(data, 1 << 30) as remount:
        shutil.copytree(backup, data, dirs_exist_ok=True)
        remount("ro")
        return trial.resumed(run)


# -- data sets ------------------------------------------------------------------------------------------


def truncate(path: Path, trial: Trial) -> None:
    os.truncate(path, trial.moment.randrange(1, path.stat().st_size))


def flip(path: Path, trial: Trial) -> None:
    content = bytearray(path.read_bytes())
    content[trial.moment.randrange(len(content))] ^= 1 << trial.moment.randrange(8)
    path.write_bytes(content)


HARM: dict[str, Callable[[Path, Trial], None]] = {
    "truncated": truncate,
    "flipped": flip,
    "empty": lambda path, trial: os.truncate(path, 0),
    "missing": lambda path, trial: path.unlink(),
}


def harmed_data(how: str, passport: bool, trial: Trial) -> Verdict:
    # Damage a file of the data set: resuming or a full verification must detect it; resume after a repair
    run = trial.copied(trial.bench.stopped)
    with aside(trial.bench.data) as backup:
        shutil.copytree(backup, trial.bench.data)
        names = ["dataset.json"] if passport else _names_of(backup)
        HARM[how](trial.bench.data / trial.moment.choice(names), trial)
        if how == "flipped":
            # A run does not read all files before it starts, which takes an hour for full data sets.
            done = trial.do(shlex.join(["encore", "data", "verify", trial.bench.data.name, str(trial.bench.data)]))
            return Verdict("refused", done.output) if done.code == 2 else Verdict("FAULT", "verify finds nothing")
        return trial.resumed(run)


def _names_of(folder: Path) -> list[str]:
    splits = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))["splits"].values()
    return sorted({file["name"] for split in splits for file in split["files"] if file["bytes"]})


def moved_data(trial: Trial) -> Verdict:
    # Move the data set: the resume is rejected; move it back and resume
    run = trial.copied(trial.bench.stopped)
    with aside(trial.bench.data):
        first = trial.resumed(run)
    return trial.resumed(run) if first.kind == "refused" else Verdict("FAULT", f"without data: {first}")


def prepare_command(trial: Trial, folder: Path) -> str:
    return shlex.join(["encore", "data", "prepare", trial.bench.name, "-o", str(folder)])


def same_data(trial: Trial, done: Done, folder: Path) -> Verdict:
    # Compare a prepared data set with the result without a fault
    _ = trial.bench.uninterrupted  # makes it
    if done.code:
        return Verdict("FAULT", f"prepare ends with {done.code}: {done.output[-400:]}")
    other = [
        name
        for name in _names_of(trial.bench.data)
        if not (folder / name).is_file() or (folder / name).read_bytes() != (trial.bench.data / name).read_bytes()
    ]
    extra = sorted(path.name for path in folder.iterdir() if not (trial.bench.data / path.name).exists())
    problems = [*(f"{name} differs" for name in other), *(f"{name} is left" for name in extra), *trial.left()]
    return verdict_of(problems)


def killed_preparation(number: signal.Signals, trial: Trial) -> Verdict:
    # Interrupt a preparation and run the command again
    folder = trial.folder / "data"
    _ = trial.bench.uninterrupted
    child = trial.spawn(prepare_command(trial, folder))
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(trial.moment.uniform(0.5, 3))
    child.send_signal(number)
    done = trial.ended(child)
    if traceback_of(done):
        return Verdict("FAULT", done.output[-600:])
    return same_data(trial, trial.do(prepare_command(trial, folder)), folder)


def two_preparations(trial: Trial) -> Verdict:
    folder = trial.folder / "data"
    children = [trial.spawn(prepare_command(trial, folder)) for _ in range(2)]
    codes = [child.wait() for child in children]
    return same_data(trial, Done(max(codes), f"exit codes {codes}"), folder)


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
    done, total = len(steps(run)), len(steps(trial.bench.uninterrupted))
    trial.wait_for_records(encore, trial.moment.randrange(min(done + 1, total), total + 1))
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
    # Damage a file in a stopped run and resume it
    return trial.resume_stopped(lambda run: HARM[how](FILES[file](run, trial), trial))


def _harmed_finished(how: str, file: str, trial: Trial) -> Verdict:
    # Damage a file in a finished run and resume it: the result must remain
    run = trial.copied(trial.bench.uninterrupted)
    HARM[how](FILES[file](run, trial), trial)
    original = snapshot(run)
    verdict = trial.resumed(run)
    changed = sorted(name for name, _ in original.items() ^ snapshot(run).items())
    return Verdict("FAULT", f"changed {', '.join(changed)}") if changed and verdict.kind != "FAULT" else verdict


def _without(folder: str, trial: Trial) -> Verdict:
    # Remove a folder from a stopped run and resume it
    return trial.resume_stopped(lambda run: shutil.rmtree(run / folder))


def _all_checkpoints_harmed(trial: Trial) -> Verdict:
    run = trial.copied(trial.bench.stopped)
    for path in (run / "experiment_0" / "checkpoint").glob("*/shared"):
        flip(path, trial)
    first = trial.resumed(run)
    # A second resume must be rejected as well, instead of starting over.
    return trial.resumed(run) if first.kind == "refused" else first


def _moved_run(trial: Trial) -> Verdict:
    run = trial.copied(trial.bench.stopped)
    (trial.results / "to another place").mkdir()
    return trial.resumed(run.rename(trial.results / "to another place" / "run"))


# -- concurrency -------------------------------------------------------------------------------------


def _undisturbed(trial: Trial, runs: list[Path], wrong: list[str]) -> Verdict:
    # Verdict for runs that must stay independent; ``wrong``: problems of the commands
    problems = [
        f"{run.name}: {difference}" for run in runs for difference in differences(run, trial.bench.uninterrupted)
    ]
    return verdict_of([*problems, *trial.left(), *wrong])


def _two_resumes(trial: Trial) -> Verdict:
    # Resume twice concurrently: one runs, the other is rejected or finds a finished run
    run = trial.copied(trial.bench.stopped)
    codes = sorted(child.wait() for child in [trial.spawn(hints.resume(run)) for _ in range(2)])
    return _undisturbed(trial, [run], [] if codes in ([2, 3], [3, 3]) else [f"exit codes {codes}"])


def _resume_of_the_living(trial: Trial) -> Verdict:
    # Resume a running run: rejected, without affecting it
    encore = trial.begin()
    trial.wait_for_moment(encore)
    second = trial.do(hints.resume(trial.run))
    code = encore.wait()
    is_right = code == 3 and second.code in (2, 3) and not traceback_of(second)
    wrong = [] if is_right else [f"exit codes {code} and {second.code}: {second.output[-300:]}"]
    return _undisturbed(trial, [trial.run], wrong)


def _two_runs(trial: Trial) -> Verdict:
    # Start two runs in the same second in one results folder: both get separate run folders
    codes = [child.wait() for child in [trial.begin() for _ in range(2)]]
    runs = sorted(path.parent for path in trial.results.glob("[!.]*/run.json"))
    is_right = codes == [3, 3] and len(runs) == 2
    return _undisturbed(trial, runs, [] if is_right else [f"exit codes {codes}, {len(runs)} run folders"])


# Every fault by name
FAULTS: dict[str, Fault] = {
    **{
        f"{number.name.lower()}-{target}": functools.partial(_signalled, number, target)
        for target in ("encore", "launcher", "rank")
        for number in ENDING
    },
    "sigkill-ranks": functools.partial(_signalled, signal.SIGKILL, "ranks"),
    "sigstop-rank": functools.partial(_signalled, signal.SIGSTOP, "rank"),
    **{f"{number.name.lower()}-early": functools.partial(_early, number) for number in ENDING},
    "sigkill-resume": _resume_killed,
    **{f"{how}-{file}": functools.partial(_harmed, how, file) for file in FILES for how in HARM},
    **{f"{how}-finished-state": functools.partial(_harmed_finished, how, "experiment-state") for how in HARM},
    **{f"{how}-finished-run.json": functools.partial(_harmed_finished, how, "run.json") for how in HARM},
    "no-checkpoints": functools.partial(_without, "experiment_0/checkpoint"),
    "all-checkpoints-flipped": _all_checkpoints_harmed,
    "no-experiment": functools.partial(_without, "experiment_0"),
    "moved-run": _moved_run,
    **{f"{how}-data": functools.partial(harmed_data, how, False) for how in HARM},
    **{f"{how}-passport": functools.partial(harmed_data, how, True) for how in HARM},
    "moved-data": moved_data,
    **{f"{number.name.lower()}-preparation": functools.partial(killed_preparation, number) for number in ENDING},
    "two-preparations": two_preparations,
    "two-resumes": _two_resumes,
    "resume-of-the-living": _resume_of_the_living,
    "two-runs": _two_runs,
    "full-disk": full_disk,
    "full-disk-preparation": full_disk_preparation,
    "read-only-results": functools.partial(read_only, "results"),
    "read-only-run": functools.partial(read_only, "run"),
    "read-only-data": read_only_data,
}

SHORT = ("sigkill-rank", "flipped-shared", "flipped-log", "flipped-run.json")
