"""Preparation and verification of data sets in the framework's environment, and checks before a run.

``benchmarks/<benchmark>/prepare.py`` does the work in a child process that reports progress as JSON lines. The host
side starts it, reports its progress, and reads the dataset.json that it writes.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from encore import catalogue, job, paths
from encore.errors import EncoreError, ExitCode, unknown_name
from encore.files import json_objects

PASSPORT = "dataset.json"
PARTS = "parts"  # Folder for an unfinished preparation, inside the data folder
SCHEMA = 1
# Published data sets by name, with their counts and checksums.
PUBLISHED = paths.BENCHMARKS / "common" / "data" / "published_sets.json"
AGAIN = "run the same command again: it resumes where it stopped"
STOP_SECONDS = 10.0  # Time that a child gets to stop after SIGINT
LAST_LINES = 5  # Lines of standard error in the message if a child fails without a reported problem


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Options of ``encore data prepare``; None: default of the benchmark."""

    source: Path | None = None  # Folder with the raw data; None for the toy data set
    name: str | None = None
    workers: int | None = None
    seed: int | None = None
    overwrite: bool = False
    options: tuple[str, ...] = ()  # Options specific to the benchmark, checked by ``prepare.py``


@dataclass(frozen=True, kw_only=True)
class Update:
    """A progress report of a child, or only a ``note``."""

    phase: str = ""
    done: int = 0
    total: int | None = None
    unit: str = "bytes"  # Unit of ``done`` and ``total``
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class DataPassport:
    """Fields of ``dataset.json`` used by the host side."""

    directory: Path
    benchmark: str
    name: str
    id: str  # Hash of the content: equal data have equal ids
    classes: int
    counts: Mapping[str, int]  # Records per split
    files: Mapping[str, int] = field(repr=False)  # Bytes per file
    bytes: int  # Of all files, also of those that are not listed because they are numerous, such as images
    shared_with: tuple[str, ...] = ()  # All benchmarks that read it, where it is more than one
    # Differences from the published data set of that name; empty if identical or if the name is not published
    unearned: str = ""


OnUpdate = Callable[[Update], None]


def preparable() -> list[str]:
    by_folder = {paths.benchmark_folder(name): name for name in catalogue.benchmarks()}
    return sorted(by_folder.get(path.parent, path.parent.name) for path in paths.BENCHMARKS.glob("*/prepare.py"))


def _module(benchmark: str) -> str:
    if benchmark not in preparable():
        raise unknown_name("benchmark", benchmark, preparable())
    return f"benchmarks.{paths.benchmark_folder(benchmark).name}.prepare"


# -- commands -----------------------------------------------------------------------------------------


def prepare_command(python: str, benchmark: str, directory: Path, preparation: Preparation) -> list[str]:
    # The command line that prepares a data set; it can be run directly as well, from the project's root.
    source = [] if preparation.source is None else [str(preparation.source.absolute())]
    command = [python, "-m", _module(benchmark), *source, "-o", str(directory.absolute())]
    for option in ("name", "workers", "seed"):
        value = getattr(preparation, option)
        if value is not None:
            command += ["--" + option, str(value)]
    option_paths = paths_in(preparation.options)
    options = (str(option_paths.get(word, word)) for word in preparation.options)
    return [*command, *(["--overwrite"] if preparation.overwrite else []), *options]


def paths_in(options: Sequence[str]) -> dict[str, Path]:
    """Return existing paths among the benchmark's options, as absolute paths by option."""
    arguments = (word for word in options if not word.startswith("-") and not word.isdecimal())
    return {word: path for word in arguments if (path := Path(word).absolute()).exists()}


def check_options(benchmark: str, preparation: Preparation) -> None:
    # Let the benchmark check its options before setting up anything; its command line needs no framework.
    command = prepare_command(sys.executable, benchmark, Path(), preparation)
    if preparation.options:
        for problem in follow([*command, "--check-options", "--progress", "json"], lambda update: None):
            problem.hint = f"encore data prepare {benchmark} --help"
            raise problem


def own_options(benchmark: str) -> str:
    command = [sys.executable, "-m", _module(benchmark), "--help"]
    text = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=True).stdout
    title = f"options of {benchmark}:"
    return f"{title}{text.partition(title)[2].rstrip()}\n" if title in text else ""


def prepare(
    benchmark: str,
    directory: Path,
    preparation: Preparation,
    runner: Path | job.Command,
    on_update: OnUpdate = lambda update: None,
) -> DataPassport:
    """Prepare a data set, or resume its preparation, and return its DataPassport.

    ``runner`` is the Python interpreter, or a full command that prepares the data elsewhere.

    Raises:
        EncoreError: invalid request (exit code 2), failed (1) or interrupted (130).
    """
    if isinstance(runner, job.Command):
        problems = follow(list(runner.argv), on_update, runner.environment)
    else:
        problems = follow(
            [*prepare_command(str(runner), benchmark, directory, preparation), "--progress", "json"], on_update
        )
    if problems:
        raise problems[0]
    return read_passport(directory)


def verify(
    benchmark: str,
    directory: Path,
    python: Path,
    quick: bool = False,
    on_update: OnUpdate = lambda update: None,
) -> list[EncoreError]:
    command = [str(python), "-m", _module(benchmark), "--progress", "json"]
    command += ["--verify", str(directory.absolute()), *(["--quick"] if quick else [])]
    problems = follow(command, on_update)
    if problems and problems[0].exit_code is not ExitCode.REFUSED:
        raise problems[0]
    return problems


def follow(command: list[str], on_update: OnUpdate, environment: Mapping[str, str] | None = None) -> list[EncoreError]:
    """Run a ``prepare.py``, report its progress, and return its problems, if any."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            child = subprocess.Popen(
                command,
                cwd=paths.ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**(os.environ if environment is None else environment), "PYTHONUNBUFFERED": "1"},
            )
        except OSError as error:
            raise EncoreError(
                f"{command[0]} does not start: {error.strerror}",
                expected="the Python of the framework's environment",
                hint="encore doctor",
            ) from None
        problems: list[EncoreError] = []
        with child, stopped_on_error(child):
            for line in child.stdout or ():
                # Container images print a banner before the command's output.
                if environment is None or line.startswith("{"):
                    problems += _take(line, on_update)
            child.wait()
        return _judge(child.returncode, problems, errors)


def _take(line: str, on_update: OnUpdate) -> Iterator[EncoreError]:
    message: dict[str, Any] = next(json_objects([line]), {"note": line.rstrip()})
    if "error" in message:
        first = message["error"]
        for problem in (first, *first.get("more", ())):
            yield EncoreError(problem["found"], expected=problem["expected"], hint=problem["hint"])
    elif "phase" in message:
        on_update(
            Update(
                phase=message["phase"], done=message["done"], total=message["total"], unit=message.get("unit", "bytes")
            )
        )
    elif "note" in message:
        on_update(Update(note=message["note"]))


def _judge(code: int, problems: list[EncoreError], errors: IO[str]) -> list[EncoreError]:
    if code == 0:
        return []
    if not problems:
        errors.seek(0)
        tail = "\n    ".join(errors.read().splitlines()[-LAST_LINES:])
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        problems = [
            EncoreError(
                f"the preparation ended with {ending}" + (f":\n    {tail}" if tail else ""),
                hint="run the same command again: finished parts are kept",
            )
        ]
    known_codes = (ExitCode.REFUSED, ExitCode.INTERRUPTED)
    for problem in problems:
        problem.exit_code = ExitCode(code) if code in known_codes else ExitCode.FAILED
    return problems


@contextmanager
def stopped_on_error(child: subprocess.Popen[Any]) -> Iterator[None]:
    """Stop the child after an error or Ctrl-C, which raises EncoreError."""
    try:
        yield
    except BaseException as error:
        # Ctrl-C in a terminal signals the process group, but a signal to this process does not reach the child.
        child.send_signal(signal.SIGINT)
        try:
            child.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
        if isinstance(error, KeyboardInterrupt):
            raise EncoreError("interrupted", hint=AGAIN, exit_code=ExitCode.INTERRUPTED) from None
        raise


# -- passports ----------------------------------------------------------------------------------------


def read_passport(directory: Path) -> DataPassport:
    """Read a data set's dataset.json.

    Raises:
        EncoreError: the folder is missing or incomplete, or dataset.json cannot be read.
    """
    path = directory / PASSPORT
    again = f"encore data prepare BENCHMARK -o {directory} --overwrite"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["schema"] != SCHEMA:
            raise EncoreError(f"{path} has schema {manifest['schema']}", expected=f"schema {SCHEMA}", hint=again)
        splits = manifest["splits"]
        files = [file for split in splits.values() for file in split["files"]]
        sizes = [*((file, "bytes") for file in files), *((split, "unlisted_bytes") for split in splits.values())]
        return DataPassport(
            directory=directory,
            benchmark=str(manifest["benchmark"]),
            name=str(manifest["name"]),
            id=str(manifest["id"]),
            classes=len(manifest["classes"]),
            counts={name: int(split["count"]) for name, split in splits.items()},
            files={str(file["name"]): int(file["bytes"]) for file in files},
            shared_with=tuple(map(str, manifest.get("shared_with", ()))),
            bytes=sum(int(part.get(key, 0)) for part, key in sizes),
            unearned=_shortfall(manifest),
        )
    except (FileNotFoundError, NotADirectoryError):
        raise _absent(directory) from None
    except OSError as error:
        raise EncoreError(f"{path}: {error.strerror}", expected="a readable passport", hint=again) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise EncoreError(f"{path} is damaged", expected="a data set's passport", hint=again) from None


def read_manifest(directory: Path, benchmark: str) -> Mapping[str, Any]:
    """Return all fields of dataset.json; empty if it cannot be used for a run, which ``check_data`` reports."""
    try:
        check_data(directory, benchmark)
    except EncoreError:
        return {}
    manifest: dict[str, Any] = json.loads((directory / PASSPORT).read_text(encoding="utf-8"))
    return manifest


def _shortfall(manifest: Mapping[str, Any]) -> str:
    # Differences from the published data set of the same name, by the preparation's criteria.
    published = json.loads(PUBLISHED.read_text(encoding="utf-8")).get(manifest["name"])
    if published is None:
        return ""
    if not published["exactly"]:
        return "no count of it is published"
    least, checksums = published.get("at_least", {}), published.get("checksums", {})
    differing = []
    for path, expected in {**published["exactly"], **least, **checksums}.items():
        actual: Any = manifest
        for key in path.split("."):
            actual = actual.get(key) if isinstance(actual, dict) else None
        actual = len(actual) if isinstance(actual, list) else actual
        if not isinstance(actual, type(expected)) or (actual < expected if path in least else actual != expected):
            differing.append(f"{path} {actual} for {expected if path in checksums else format(expected, ',')}")
    return ", ".join(differing)


def holds(directory: Path, name: str) -> bool:
    """Return whether a folder contains the complete data set of this name."""
    passport = _passport_of(directory)
    return passport is not None and passport.name == name


def _passport_of(directory: Path) -> DataPassport | None:
    with suppress(EncoreError):
        return read_passport(directory)
    return None


def _absent(directory: Path) -> EncoreError:
    if not directory.exists():
        return EncoreError(
            f"no data set in {directory}: no such folder",
            expected="the folder of a prepared data set",
            hint="correct --data; encore data verify lists the existing ones",
        )
    if (directory / PARTS).exists():
        return EncoreError(
            f"the data set in {directory} is incomplete: its preparation has not finished",
            expected="a finished preparation",
            hint="run the same encore data prepare command again: it resumes where it stopped",
        )
    return EncoreError(
        f"{directory} contains no prepared data set: no {PASSPORT}",
        expected="a folder written by encore data prepare",
        hint=f"encore data prepare BENCHMARK {directory} -o OUT if it contains raw data, then --data OUT",
    )


def check_data(directory: Path, benchmark: str) -> DataPassport:
    """Check in milliseconds that a run can use a data folder: dataset.json, benchmark, size of all files.

    Raises:
        EncoreError: it cannot be used, with the fix.
    """
    try:
        passport = read_passport(directory)
    except EncoreError as error:
        error.hint = error.hint.replace("BENCHMARK", benchmark)
        raise
    if benchmark not in (passport.benchmark, *passport.shared_with):
        raise EncoreError(
            f"{directory} contains the data set {passport.name} of {passport.benchmark}",
            expected=f"a data set of {benchmark}",
            hint=f"choose a different folder with --data, or encore data prepare {benchmark}",
        )
    for name, size in passport.files.items():
        path = directory / name
        try:
            with path.open("rb") as file:
                actual_size = os.fstat(file.fileno()).st_size
            problem = f"{path} has changed: {actual_size:,} bytes" if actual_size != size else ""
        except OSError as error:
            problem = f"{path}: {error.strerror}"
        if problem:
            raise EncoreError(
                problem,
                expected=f"a readable file of {size:,} bytes, as recorded in {PASSPORT}",
                hint=f"encore data verify {benchmark} {path.parent} reports more; "
                f"encore data prepare {benchmark} -o {path.parent} --overwrite makes it again",
            )
    return passport


def data_folders() -> list[tuple[str, Path, DataPassport | EncoreError]]:
    folders: list[tuple[str, Path, DataPassport | EncoreError]] = []
    for benchmark in preparable():
        root = paths.default_data(benchmark)
        nested = sorted(path.parent for path in root.parent.glob(f"*/{PASSPORT}"))
        passports = {path: passport for path in nested if path != root and (passport := _passport_of(path))}
        others = [path for path, other in passports.items() if benchmark in (other.benchmark, *other.shared_with)]
        for directory in (root, *others):
            try:
                folders.append((benchmark, directory, check_data(directory, benchmark)))
            except EncoreError as error:
                folders.append((benchmark, directory, error))
    return folders
