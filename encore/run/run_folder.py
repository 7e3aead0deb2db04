"""The run folder, which is the truth about a run: written atomically, readable by any other tool.

results/20261120T101500Z-resnet-mxnet-cpu/
    run.json            passport: what was run, with what, where
    system.json         MLPerf system description
    config.json         resolved configuration without the seeds
    result_0.txt        MLPerf log of experiment 0, when it has ended
    experiment_0/       config.json, result.txt, metrics.jsonl, telemetry.jsonl, state.json, ranks/, ...
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from encore.errors import EncoreError
from encore.files import read_json, write_json

Status = Literal["prepared", "running", "reached", "not_reached", "failed", "interrupted"]
STAMP = "%Y%m%dT%H%M%SZ"
"""Time at the start of a run folder's name, in UTC."""
FINISHED: tuple[Status, ...] = ("reached", "not_reached")


@dataclass(frozen=True, kw_only=True)
class ExperimentState:
    """The state of one experiment."""

    status: Status
    reason: str = ""
    """Why it failed or was interrupted; empty otherwise."""
    started: str = ""
    ended: str = ""
    job: str = ""
    """Slurm job in which it ran last: ``12``, or ``12_3`` for a task of an array; empty outside of Slurm."""


@dataclass(frozen=True)
class Experiment:
    """One experiment of a run: a training with its own seed."""

    number: int
    folder: Path

    @property
    def config(self) -> Path:
        """config.json with the seed."""
        return self.folder / "config.json"

    @property
    def log(self) -> Path:
        """MLPerf log while it is written."""
        return self.folder / "result.txt"

    @property
    def metrics(self) -> Path:
        """Metrics stream of rank 0."""
        return self.folder / "metrics.jsonl"

    @property
    def result(self) -> Path:
        """MLPerf log of the ended experiment."""
        return self.folder.parent / f"result_{self.number}.txt"

    def state(self) -> ExperimentState:
        """Return the current state; ``prepared`` when there is none yet."""
        path = self.folder / "state.json"
        if not path.exists():
            return ExperimentState(status="prepared")
        return ExperimentState(**json.loads(path.read_text(encoding="utf-8")))

    def set_state(self, state: ExperimentState) -> None:
        """Replace the state."""
        write_json(self.folder / "state.json", asdict(state))

    def publish_log(self) -> None:
        """Copy the log to the place where result files are looked for."""
        if self.log.exists():
            temporary = self.result.with_suffix(".writing")
            shutil.copyfile(self.log, temporary)
            temporary.replace(self.result)


@dataclass(frozen=True)
class RunFolder:
    """A run folder that exists."""

    path: Path

    def passport(self) -> dict[str, Any]:
        """Read run.json."""
        return read_json(self.path / "run.json")

    def experiments(self) -> list[Experiment]:
        """Return experiments in order."""
        folders = sorted(self.path.glob("experiment_*"), key=lambda f: int(f.name.rsplit("_", 1)[1]))
        return [Experiment(int(folder.name.rsplit("_", 1)[1]), folder) for folder in folders]


def create(
    results: Path,
    label: str,
    passport: Callable[[Path], dict[str, Any]],
    system: dict[str, Any],
    config: dict[str, Any],
    seeds: list[int],
    shared_stamp: str | None = None,
) -> RunFolder:
    """Make a new run folder with one experiment per seed; it appears whole or not at all.

    ``passport`` is asked for the content of run.json once the folder's name is known. Processes that give the
    same ``shared_stamp`` get the same folder, whichever of them comes first.
    """
    stamp = shared_stamp or datetime.now(timezone.utc).strftime(STAMP)
    path = results / f"{stamp}-{label}" if shared_stamp else free_name(results, f"{stamp}-{label}")
    temporary = results / f".{path.name}.{platform.node()}.{os.getpid()}.writing"
    try:
        temporary.mkdir(parents=True)
        write_json(temporary / "system.json", system)
        write_json(temporary / "config.json", config)
        for number, seed in enumerate(seeds):
            folder = temporary / f"experiment_{number}"
            folder.mkdir()
            write_json(folder / "config.json", {**config, "seed": seed})
        write_json(temporary / "run.json", passport(path))
        temporary.rename(path)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if shared_stamp and (path / "run.json").exists():
            return RunFolder(path)
        raise EncoreError(
            f"the run folder {path} cannot be written: {error.strerror or error}",
            remedy="give a folder that you may write to, with free space: --results DIR",
        ) from error
    return RunFolder(path)


def free_name(results: Path, name: str) -> Path:
    """Return a folder called ``name`` in ``results`` that is not there yet; with a number where that is taken."""
    candidate = results / name
    number = 2
    while candidate.exists():
        candidate = results / f"{name}-{number}"
        number += 1
    return candidate


def open_run(path: Path) -> RunFolder:
    """Return the run folder at ``path``; EncoreError if there is none or it is not whole."""
    if not (path / "run.json").is_file():
        raise EncoreError(
            f"{path} is no run folder",
            expected="a folder with run.json, such as results/20261120T101500Z-resnet-mxnet-cpu",
            remedy="give the path that the run printed at its end",
        )
    return RunFolder(path)
