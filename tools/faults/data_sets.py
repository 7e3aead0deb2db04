"""Faults of data sets and of their preparation, and what harms a file."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tools.faults.trial import Done, Trial, Verdict, aside, traceback_of, verdict_of


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
    # Harm a file of the data set: resuming refuses it, or reading every byte finds it; whole again, it resumes
    run = trial.copied(trial.bench.stopped)
    with aside(trial.bench.data) as whole:
        shutil.copytree(whole, trial.bench.data)
        names = ["dataset.json"] if passport else _names_of(whole)
        HARM[how](trial.bench.data / trial.moment.choice(names), trial)
        if how == "flipped":
            # A run does not read every byte before it starts: at the size of the full sets that takes an hour.
            done = trial.do(shlex.join(["encore", "data", "verify", trial.bench.data.name, str(trial.bench.data)]))
            return Verdict("refused", done.output) if done.code == 2 else Verdict("FAULT", "verify finds nothing")
        return trial.resumed(run)


def _names_of(folder: Path) -> list[str]:
    splits = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))["splits"].values()
    return sorted({file["name"] for split in splits for file in split["files"] if file["bytes"]})


def moved_data(trial: Trial) -> Verdict:
    # Move the data set: refused; moved back, the run resumes
    run = trial.copied(trial.bench.stopped)
    with aside(trial.bench.data):
        first = trial.resumed(run)
    return trial.resumed(run) if first.kind == "refused" else Verdict("FAULT", f"without data: {first}")


def prepare_command(trial: Trial, folder: Path) -> str:
    return shlex.join(["encore", "data", "prepare", trial.bench.name, "-o", str(folder)])


def same_data(trial: Trial, done: Done, folder: Path) -> Verdict:
    # Judge a preparation by the files of the one that nothing happened to
    _ = trial.bench.uninterrupted  # makes it
    if done.code:
        return Verdict("FAULT", f"prepare ends with {done.code}: {done.output[-400:]}")
    other = [
        name
        for name in _names_of(trial.bench.data)
        if not (folder / name).is_file() or (folder / name).read_bytes() != (trial.bench.data / name).read_bytes()
    ]
    more = sorted(path.name for path in folder.iterdir() if not (trial.bench.data / path.name).exists())
    found = [*(f"{name} differs" for name in other), *(f"{name} is left" for name in more), *trial.left()]
    return verdict_of(found)


def killed_preparation(number: signal.Signals, trial: Trial) -> Verdict:
    # Stop a preparation at some moment, and give the command again
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
