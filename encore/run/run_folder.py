"""The run folder: single source of truth about a run, written atomically, in formats that other tools can read.

results/20261120T101500Z-resnet-mxnet-cpu/
    run.json            run metadata: command, software, hardware
    system.json         MLPerf system description
    config.json         resolved configuration without the seeds
    result_0.txt        MLPerf log of experiment 0, once finished
    experiment_0/       config.json, result.txt, metrics.jsonl, telemetry.jsonl, state.json, ranks/, ...
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import platform
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, get_args

from encore import files
from encore.errors import EncoreError
from encore.files import plain, read_json, text_of, write_json

Status = Literal["prepared", "running", "reached", "not_reached", "failed", "interrupted"]
STAMP = "%Y%m%dT%H%M%SZ"  # Timestamp at the start of run folder names, UTC
SCHEMA = 3  # Version of run.json
NEEDED = ("name", "round", "nodes", "data", "seeds", "configuration", "sha256")  # Keys that status and resume read
FINISHED: tuple[Status, ...] = ("reached", "not_reached")


@dataclass(frozen=True, kw_only=True)
class ExperimentState:
    """The state of an experiment."""

    status: Status  # Final: reached and not_reached
    reason: str = ""  # Why it failed or was interrupted; empty otherwise
    started: str = ""  # UTC
    ended: str = ""  # UTC
    is_final: bool = False  # Whether resuming would fail in the same way
    job: str = ""  # Last Slurm job: ``12``, or ``12_3`` for an array task; empty outside Slurm
    cluster: str = ""  # Slurm's name of the cluster that numbers the job


@dataclass(frozen=True)
class Experiment:
    number: int
    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.json"

    @property
    def log(self) -> Path:
        return self.folder / "result.txt"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def has_checkpoint(self) -> bool:
        # A folder that was still being written when the ranks were killed is none.
        return any((self.folder / "checkpoint").glob("step_*"))

    @property
    def has_finished(self) -> bool:
        return self.state().status in FINISHED

    @property
    def result(self) -> Path:
        return self.folder.parent / f"result_{self.number}.txt"

    def state(self) -> ExperimentState:
        path = self.folder / "state.json"
        if not path.exists():
            return ExperimentState(status="prepared")
        content = read_json(path)
        with contextlib.suppress(TypeError):
            state = ExperimentState(**content)
            if state.status in get_args(Status):
                return state
        raise EncoreError(f"{path} does not contain the state of an experiment", hint="restore it, or start a new run")

    def set_state(self, state: ExperimentState) -> None:
        write_json(self.folder / "state.json", state)

    def publish_log(self) -> None:
        if self.log.exists():
            with files.replaced(self.result) as target, self.log.open("rb") as log:
                shutil.copyfileobj(log, target)


@dataclass(frozen=True)
class RunFolder:
    path: Path

    def metadata(self) -> dict[str, Any]:
        # Read run.json. EncoreError for a different schema or a file that was changed.
        path = self.path / "run.json"
        content = read_json(path)
        if content.get("schema") != SCHEMA:
            raise EncoreError(
                f"{path} has schema {content.get('schema')}",
                expected=f"schema {SCHEMA}",
                hint="use the version of Encore that created it",
            )
        missing = [name for name in NEEDED if name not in content]
        if missing or content["sha256"] != checksum(content):
            raise EncoreError(
                f"{path} lacks {', '.join(missing)}" if missing else f"{path} was changed after it was written",
                expected="unmodified run metadata",
                hint="restore it, or start a new run",
            )
        return content

    def note_ranks(self, number: int, variables: Mapping[str, str], reported: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the report from an experiment's rank 0 to run.json.

        The library variables are stored for the first experiment only. Reports such as ``choices`` are stored per
        experiment, because experiments may measure again.
        """
        metadata = self.metadata()
        updated = {"rank_environment": dict(variables), **metadata} if variables else dict(metadata)
        for name, report in reported.items():
            if report:
                updated[name] = {**metadata.get(name, {}), str(number): dict(report)}
        if updated != metadata:
            write_metadata(self.path, updated)

    def experiments(self) -> list[Experiment]:
        numbers = sorted(int(f.name[11:]) for f in self.path.glob("experiment_*") if f.name[11:].isdecimal())
        return [Experiment(number, self.path / f"experiment_{number}") for number in numbers]

    def check_whole(self) -> None:
        """Reject a folder with missing experiments, or a finished one without state: its result would be overwritten.

        Raises:
            EncoreError: the first missing or inconsistent file.
        """
        seeds = self.metadata()["seeds"]
        config = read_json(self.path / "config.json")
        experiments = {experiment.number: experiment for experiment in self.experiments()}
        for number, seed in enumerate(seeds):
            problem = _problem_of(experiments.get(number), {**config, "seed": seed})
            if problem:
                raise EncoreError(
                    f"{self.path.name}: experiment_{number} {problem}",
                    expected="an unmodified run folder",
                    hint="restore it from a copy, or start a new run",
                )
        extra = sorted(set(experiments) - set(range(len(seeds))))
        if extra:
            raise EncoreError(
                f"{self.path.name} has experiment_{extra[0]}, and {len(seeds)} seeds in run.json",
                expected="one seed per experiment",
                hint="restore run.json, or start a new run",
            )


def checksum(content: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, default=plain).encode()).hexdigest()


def write_metadata(folder: Path, content: Mapping[str, Any]) -> None:
    write_json(folder / "run.json", {**content, "sha256": checksum(content)})


def _problem_of(experiment: Experiment | None, config: dict[str, Any]) -> str:
    # Why an experiment cannot be resumed; empty if it can.
    if experiment is None:
        return "is missing"
    if not experiment.config.is_file():
        return "has no config.json"
    if read_json(experiment.config) != config:
        return "has a config.json that does not match configuration and seed of the run"
    if (experiment.folder / "state.json").is_file():
        experiment.state()
    elif experiment.result.exists() or '"run_stop"' in text_of(experiment.log):
        return "has a result but no state.json"
    return ""


def create(
    results: Path,
    label: str,
    metadata: Callable[[Path], Mapping[str, Any]],
    system: dict[str, Any],
    config: dict[str, Any],
    seeds: list[int],
    shared_stamp: str | None = None,
) -> RunFolder:
    """Create a run folder with one experiment per seed, atomically.

    ``metadata`` returns the content of run.json for the final path of the folder. Processes with the same
    ``shared_stamp`` get the same folder, whichever is first.
    """
    name = f"{shared_stamp or datetime.now(timezone.utc).strftime(STAMP)}-{label}"
    path = results / name if shared_stamp else free_name(results, name)
    temporary = results / f".{path.name}.{platform.node()}.{os.getpid()}.writing"
    try:
        temporary.mkdir(parents=True)
        write_json(temporary / "system.json", system)
        write_json(temporary / "config.json", config)
        for number, seed in enumerate(seeds):
            folder = temporary / f"experiment_{number}"
            folder.mkdir()
            write_json(folder / "config.json", {**config, "seed": seed})
        write_metadata(temporary, metadata(path))
        while not _renamed(temporary, path) and not shared_stamp:
            # Another run took the name in the same second.
            path = free_name(results, name)
            write_metadata(temporary, metadata(path))
        shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise EncoreError(
            f"the run folder {path} cannot be written: {error.strerror or error}",
            hint="choose a writable folder with free space: --results DIR",
        ) from error
    return RunFolder(path)


def _renamed(temporary: Path, path: Path) -> bool:
    # Rename a folder; False if the name has been taken.
    try:
        temporary.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def free_name(results: Path, name: str) -> Path:
    candidates = (results / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(path for path in candidates if not path.exists())


def refuse_foreign(folder: Path, trust_owner: bool = False) -> None:
    """Reject a run or study folder that another user owns or can change, unless ``trust_owner``.

    Files in it name the programs, hosts and processes that Encore starts and signals.

    Raises:
        EncoreError: the first such file, or a program in run.json that belongs to another user.
    """
    if trust_owner or not folder.exists():
        return
    hint = "check its run.json, then add --trust-owner if you trust this user"
    for path in (
        folder.resolve(),
        *folder.glob("*.json"),
        *folder.glob("experiment_*"),
        *folder.glob("experiment_*/*.json"),
    ):
        status = path.lstat()
        if status.st_uid != os.geteuid():
            owner = files.user_name(status.st_uid)
            raise EncoreError(f"{path} belongs to {owner}", expected="a folder that belongs to you", hint=hint)
        if status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode):
            raise EncoreError(f"all users can change {path}", hint=f"check its content, then: chmod o-w {path}")
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        python = Path(json.loads((folder / "run.json").read_text(encoding="utf-8"))["python"]["file"])
        owner_id = python.stat().st_uid
        if owner_id not in (0, os.geteuid()):
            raise EncoreError(
                f"run.json names {python}, which belongs to {files.user_name(owner_id)}",
                expected="a Python that belongs to you or root",
                hint=hint,
            )


def open_run(path: Path) -> RunFolder:
    if not (path / "run.json").is_file():
        raise EncoreError(
            f"{path} is not a run folder",
            expected="a folder with run.json, such as results/20261120T101500Z-resnet-mxnet-cpu",
            hint="use the path printed at the end of the run",
        )
    return RunFolder(path)
