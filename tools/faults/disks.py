"""Faults of file systems: full, or read-only."""

import contextlib
import functools
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.faults.data_sets import prepare_command, same_data
from tools.faults.trial import Trial, Verdict, aside, traceback_of


@contextlib.contextmanager
def mounted(folder: Path, size: int) -> Iterator[Callable[[str], object]]:
    # Mount a file system of ``size`` bytes; yields what mounts it again with other options
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def mounting(fault: Callable[..., Verdict]) -> Callable[..., Verdict]:
    # A fault that is tried only where this user may mount a file system

    def tried(*given: Any) -> Verdict:
        return fault(*given) if can_mount() else Verdict("not tried", "mounting needs root")

    return tried


@functools.cache
def can_mount() -> bool:
    # Whether this user may mount a file system
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def full_disk(trial: Trial) -> Verdict:
    # Let the disk fill up at some moment of the run; with room again it resumes
    # Once and a half: two checkpoints stay, and a third is written before the first goes.
    size = int(_size(trial.bench.uninterrupted) * trial.moment.uniform(0.1, 1.2))
    if not can_mount():
        return _limited(trial, trial.moment.uniform(0.1, 0.9))
    with mounted(trial.results, max(size, 2**16)) as remount:
        done = trial.do(trial.run_command())
        made = list(trial.results.glob("[!.]*/run.json"))
        if done.code == 2 and not made:
            return Verdict("refused") if "hint: " in done.output else Verdict("FAULT", done.output[-400:])
        if done.code == 1 and "disk is full" not in done.output and "space" not in done.output:
            return Verdict("FAULT", f"the cause is not named: {done.output[-600:]}")
        remount("size=4g")
        return trial.after(done)


def _limited(trial: Trial, share: float) -> Verdict:
    # Do the same with a limit on the size of a file
    largest = max(path.stat().st_size for path in trial.bench.uninterrupted.rglob("*") if path.is_file())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest * share), before[1]))
    try:
        encore = trial.begin()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return trial.after(trial.ended(encore))


@mounting
def full_disk_preparation(trial: Trial) -> Verdict:
    # Let the disk fill up under a preparation; with room again the same command ends it
    _ = trial.bench.uninterrupted
    folder = trial.folder / "data"
    with mounted(folder, max(2**16, int(_size(trial.bench.data) * trial.moment.uniform(0.1, 0.9)))) as remount:
        done = trial.do(prepare_command(trial, folder))
        if done.code not in (1, 2) or "hint: " not in done.output or traceback_of(done):
            return Verdict("FAULT", f"ends with {done.code}: {done.output[-600:]}")
        remount("size=1g")
        return same_data(trial, trial.do(prepare_command(trial, folder)), folder)


@mounting
def read_only(what: str, trial: Trial) -> Verdict:
    # Give a file system that cannot be written for a new run's results, a run that is resumed, or the data
    with mounted(trial.results, 4 << 30) as remount:
        if what == "results":
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
    with aside(data) as whole, mounted(data, 1 << 30) as remount:
        shutil.copytree(whole, data, dirs_exist_ok=True)
        remount("ro")
        return trial.resumed(run)
