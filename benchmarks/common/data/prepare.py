"""Command line and life cycle of every preparation: lock the folder, resume or start over, write, manifest last.

A benchmark's ``prepare.py`` declares a DataSet. Its writer module, imported only if something is written, implements

    list_source(args, progress)                 list the source, with its ``fingerprint``
    write(listing, args, scratch, progress)     write the files to ``scratch`` and return a Content

Files in ``scratch`` are available when an interrupted command is run again, except files with a process id as
suffix, which a worker had not finished.
"""

import argparse
import errno
import fcntl
import importlib
import json
import os
import platform
import re
import shutil
import signal
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Dict, Iterator, Mapping, NamedTuple, NoReturn, Optional, Sequence, Tuple

from benchmarks.common.data import manifest, published
from benchmarks.common.data.manifest import FILE_NAME, PARTS
from benchmarks.common.data.problem import INTERRUPTED, Problem, disk_problem
from benchmarks.common.data.progress import Progress, human_bytes


def opens(module: str) -> manifest.Check:
    """Return a check that calls a module's ``open_data``, which requires numpy."""

    def check(directory: Path, _: manifest.Manifest) -> Sequence[Problem]:
        try:
            importlib.import_module(module).open_data(directory)
        except Problem as problem:
            return [problem]
        return []

    return check


@dataclass(frozen=True)
class DataSet:
    """A benchmark's data set declaration."""

    benchmark: str
    source: str  # description of the raw data
    files: Tuple[str, ...]  # file names, without the manifest
    add_options: Callable[[argparse._ArgumentGroup], None]  # adds benchmark-specific options
    writer: str  # name of the writer module: only this one may need more than the standard library
    check: manifest.Check = lambda directory, manifest: ()  # check that --verify makes in addition to sizes and hashes
    optional: Tuple[str, ...] = ()  # files that depend on the source
    folders: Tuple[str, ...] = ()  # names of folders that are written, with files that the manifest need not list
    # Compares files in ``folders`` with an array of the data set.
    check_unlisted: manifest.CheckUnlisted = lambda directory, manifest, quick, add: ()
    # Whether the writer looks for evaluation samples that are trained on, by ``source_checks.overlap``.
    compares: bool = True
    # Module whose ``view`` returns the samples for sample_checks.find; may require numpy.
    samples: str = ""
    # All benchmarks that use this data set, including this one; the manifest has the name of the first.
    shared_with: Tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return f"benchmarks.{self.benchmark.replace('-', '_')}.prepare"

    @property
    def outputs(self) -> Tuple[str, ...]:
        return (*self.files, *self.folders)


class Listing(NamedTuple):
    """Preparation source."""

    source: Any  # defined by the writer
    fingerprint: str  # hash of everything that determines the output


class Split(NamedTuple):
    samples: int
    files: Sequence[str]
    facts: Mapping[str, Any] = {}  # kept with the split in the manifest


class Content(NamedTuple):
    """Writer result, with the manifest's fields."""

    name: str
    splits: Mapping[str, Split]
    summary: str  # counts, for the last line
    how: Mapping[str, Any]
    tool: Mapping[str, str]  # versions that the bytes depend on
    classes: Sequence[str] = ()
    facts: Mapping[str, Any] = {}
    described: Sequence[manifest.File] = ()  # files hashed while writing


# -- command line --------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Problem(message, "", f"{self.prog} --help")


def number(minimum: int, maximum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{value} is not from {minimum} to {maximum}")
        return value

    return number


def fraction(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def parse(data_set: DataSet, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options; raise a Problem that lists the valid ones."""
    parser = _Parser(
        prog=f"python -m {data_set.module}", description=f"Prepare or verify {data_set.benchmark}'s data set."
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--output", "-o", dest="to", type=Path, metavar="DIR", help="folder to prepare the data set in")
    action.add_argument("--verify", type=Path, metavar="DIR", help="check a prepared data set")
    add = parser.add_argument
    add("origin", nargs="?", type=Path, metavar="SOURCE", help=f"{data_set.source}; without it, the toy data set")
    add("--name", help="name of the data set; default: name of the source")
    add("--workers", type=number(1, 1024), default=len(os.sched_getaffinity(0)), help="processes, at most")
    add("--seed", type=number(0, 2**63 - 1), default=0, help="random seed")
    add("--overwrite", action="store_true", help="replace a different data set in DIR")
    add("--quick", action="store_true", help="verify without reading every byte")
    add("--progress", choices=("plain", "json"), default="plain")
    # Used by the host before it creates an environment or starts a container.
    add("--check-options", action="store_true", help=argparse.SUPPRESS)
    group = parser.add_argument_group(f"options of {data_set.benchmark}")
    data_set.add_options(group)
    if data_set.compares:
        group.add_argument(
            "--allow-overlap", action="store_true", help="accept evaluation data that is also in the training set"
        )
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        takes = " ".join(re.findall(r"--[a-z-]+", parser.format_usage()))
        raise Problem(
            f"unrecognized arguments: {' '.join(unknown)}",
            f"the options of {data_set.benchmark}: {takes}",
            f"{parser.prog} --help",
        )
    return args


def main(data_set: DataSet, argv: Optional[Sequence[str]] = None) -> int:
    """Run a ``prepare.py`` command line; return its exit code."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, _interrupt)
    argv = sys.argv[1:] if argv is None else argv
    progress = Progress(as_json=re.search("--progress[ =]json", " ".join(argv)) is not None)
    try:
        args = parse(data_set, argv)
        if args.check_options:
            return 0
        if args.verify is not None:
            return verify(data_set, args.verify, args.quick, progress)
        return prepare(data_set, args, progress)
    except Problem as problem:
        return progress.fail(problem)
    except KeyboardInterrupt:
        return progress.fail(Problem("interrupted", "", "run the same command again to resume", INTERRUPTED))
    except BrokenPipeError:
        # The reader of the progress has exited. Redirect stdout, so that the final flush does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED
    except OSError as error:
        if error.errno is None:
            raise
        return progress.fail(disk_problem(error, args.to or args.verify))


def _interrupt(number: int, frame: Optional[FrameType]) -> None:
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)  # a second one must not disturb the stopping
    raise KeyboardInterrupt


# -- preparation ----------------------------------------------------------------------------------------


def problems_of(data_set: DataSet, directory: Path, quick: bool, add: manifest.Add) -> Sequence[Problem]:
    """Return the differences between a data folder and its manifest; ``quick`` does not read any file."""
    problems = manifest.verify(directory, quick, data_set.benchmark, add, data_set.check)
    return problems or data_set.check_unlisted(directory, manifest.read(directory), quick, add)


def verify(data_set: DataSet, directory: Path, quick: bool, progress: Progress) -> int:
    content = manifest.read(directory)
    total = manifest.total_bytes(content)
    problems = problems_of(data_set, directory, quick, progress.counter("verify", total))
    problems = problems or sample_problems(data_set, directory, progress)
    if problems:
        return progress.fail(*problems)
    counts = ", ".join(f"{split['count']:,} {name}" for name, split in content["splits"].items())
    how = "quick look" if quick else "every byte"
    progress.end(
        directory / FILE_NAME, f"{directory} is complete ({how}): {content['name']}, {counts}, {human_bytes(total)}"
    )
    return 0


def sample_problems(data_set: DataSet, directory: Path, progress: Progress) -> Sequence[Problem]:
    """Check samples in a complete data set for preparation errors; reads only a limited part."""
    try:
        from benchmarks.common.data import sample_checks
    except ModuleNotFoundError as error:
        progress.note(f"{error.name} is not installed in this Python: samples were not checked")
        return []
    module: Any = importlib.import_module(data_set.samples)
    content = manifest.read(directory)
    try:
        return sample_checks.find(module.view(directory, content), directory, bool(content["how"].get("in_both")))
    except Problem as problem:
        return [problem]
    except (IndexError, ValueError, OverflowError) as error:
        text = f"{directory}: samples have invalid references: {error}"
        return [Problem(text, "consistent arrays", manifest.prepare_again(directory))]


def prepare(data_set: DataSet, args: argparse.Namespace, progress: Progress) -> int:
    """Make the data set that the command line asks for, or resume making it."""
    try:
        writer: Any = importlib.import_module(data_set.writer)
    except ModuleNotFoundError as error:
        raise Problem(
            f"{error.name} is not installed in this Python",
            str(error.name),
            "use the Python of the framework's environment, or install it into this one",
        ) from None
    created = [folder for folder in (args.to, *args.to.parents) if not folder.exists()]
    try:
        check_places(data_set, args.to, args.origin)
        listing = writer.list_source(args, progress)
        if is_complete(data_set, args.to, listing.fingerprint, args.overwrite):
            return _nothing_to_do(args.to, progress)
        with claim(args.to, progress) as (scratch, waited):
            if waited and is_complete(data_set, args.to, listing.fingerprint, overwrite=False):
                return _nothing_to_do(args.to, progress)
            resume_or_start_over(data_set, args.to, listing.fingerprint, progress)
            try:
                content = writer.write(listing, args, scratch, progress)
                path = publish(data_set, content, listing.fingerprint, scratch, progress)
            except Problem as problem:
                finished = [entry for entry in scratch.iterdir() if entry.name not in ("lock", "plan.json")]
                if not (problem.keeps and finished):
                    shutil.rmtree(scratch, ignore_errors=True)  # a waiting preparation may create a new lock
                raise
            finally:
                _remove_unfinished(scratch)  # they may have filled the disk
    finally:
        for folder in created:
            with suppress(OSError):  # something is in it
                folder.rmdir()
    progress.end(path, f"{path}: {manifest.read(args.to)['name']}, {content.summary}")
    return 0


def _nothing_to_do(to: Path, progress: Progress) -> int:
    progress.note(f"nothing to do: {to} was prepared from the same source with the same options")
    progress.end(to / FILE_NAME, str(to / FILE_NAME))
    return 0


def check_places(data_set: DataSet, to: Path, origin: Optional[Path]) -> None:
    """Create the target folder; reject one that is in the source or not writable."""
    elsewhere = "choose another folder: -o DIR"
    if origin is not None and not origin.exists():
        raise Problem(f"{origin} does not exist", data_set.source, "name an existing file or folder")
    if origin is not None and origin.resolve() in (to.resolve(), *to.resolve().parents):
        raise Problem(f"{to} is inside the source {origin}", "a folder outside it", elsewhere)
    try:
        to.mkdir(parents=True, exist_ok=True)
        if not os.access(to, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise Problem(f"cannot write to {to}: {error.strerror}", "a writable folder", elsewhere) from None


def check_room(directory: Path, needed: int) -> None:
    """Refuse to start when the disk of ``directory`` has less than ``needed`` bytes free."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise Problem(
            f"{human_bytes(free)} free on the disk of {directory}",
            f"about {human_bytes(needed)} for the data set",
            f"free {human_bytes(needed - free)} or choose another folder: -o DIR",
            keeps=True,
        )


def is_complete(data_set: DataSet, to: Path, fingerprint: str, overwrite: bool) -> bool:
    """Return whether ``to`` already contains this data set; reject a different one without ``overwrite``."""
    try:
        present = manifest.read(to)
    except Problem:
        present = None
    same = present is not None and present["how"].get("source") == fingerprint
    if same and not problems_of(data_set, to, True, lambda size: None):
        return not overwrite
    foreign = [name for name in (*data_set.outputs, FILE_NAME) if (to / name).exists()]
    is_ours = (to / PARTS / "plan.json").exists()
    if overwrite or not foreign or (is_ours and present is None):
        return False
    if present is None:
        message = f"{to} holds {', '.join(foreign)} without a manifest that can be read"
    elif same:
        message = f"{to} holds this data set, but its files have changed since"
    else:
        message = f"{to} contains the data set {present['name']}, prepared from another source or with other options"
    raise Problem(message, "an empty folder, or this data set", "choose another folder: -o DIR, or add --overwrite")


@contextmanager
def claim(to: Path, progress: Progress) -> Iterator[Tuple[Path, bool]]:
    """Lock the folder; yield the folder for unfinished parts, and whether this process had to wait.

    If another preparation has the lock, wait until it exits, which removes the lock file.
    """
    scratch, waited = to / PARTS, False
    while True:
        # The other preparation may have failed and removed the folder, or just exited.
        with suppress(FileNotFoundError):
            scratch.mkdir(parents=True, exist_ok=True)
            lock = (scratch / "lock").open("wb")
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if not waited:
                    progress.note(f"another preparation is writing in {to}: waiting for its end")
                waited = True
                fcntl.lockf(lock, fcntl.LOCK_EX)
            if os.path.samestat((scratch / "lock").stat(), os.fstat(lock.fileno())):
                break
    with lock:
        try:
            yield scratch, waited
        finally:
            with suppress(OSError):
                (scratch / "lock").unlink()
                scratch.rmdir()  # fails where something unfinished is in it


def resume_or_start_over(data_set: DataSet, to: Path, fingerprint: str, progress: Progress) -> None:
    """Keep an unfinished preparation's parts if source and options are the same, else remove them."""
    scratch = to / PARTS
    plan, new_plan = scratch / "plan.json", json.dumps({"source": fingerprint}).encode()
    saved_plan = plan.read_bytes() if plan.exists() else None
    finished = [to / name for name in data_set.outputs if (to / name).exists()]
    if saved_plan == new_plan:
        _remove_unfinished(scratch)
        for path in finished:  # moved already when the preparation was interrupted
            path.replace(scratch / path.name)
        return
    if saved_plan is not None:
        progress.note("starting over: the source or the options have changed since the unfinished preparation")
    leftovers = [path for path in scratch.iterdir() if path.name != "lock"]
    for path in ((to / FILE_NAME), *leftovers, *finished):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
    plan.write_bytes(new_plan)


def _remove_unfinished(scratch: Path) -> None:
    for path in scratch.glob("*.*"):  # none where the scratch folder is gone, after the work
        if path.suffix[1:].isdigit():
            # A worker from a killed preparation may be about to rename it.
            with suppress(FileNotFoundError):
                path.unlink()


def publish(data_set: DataSet, content: Content, fingerprint: str, scratch: Path, progress: Progress) -> Path:
    described = {file["name"]: file for file in content.described}
    left_out = {name for name in data_set.optional if not (scratch / name).exists()}
    names = [name for name in data_set.files if name not in {*described, *left_out}]
    add = progress.counter("checksum", sum((scratch / name).stat().st_size for name in names))
    described.update((name, manifest.describe_file(scratch / name, add)) for name in names)
    splits: Dict[str, Any] = {}
    for key, split in content.splits.items():
        files = [described[name] for name in split.files]
        splits[key] = {"count": split.samples, "files": files, **split.facts}
    tool = {"name": data_set.module, "python": platform.python_version(), **content.tool}
    fields = {
        "benchmark": (*data_set.shared_with, data_set.benchmark)[0],
        "shared_with": list(data_set.shared_with),
        "name": content.name,
        "classes": list(content.classes),
        "splits": splits,
        "facts": dict(content.facts),
        "how": {"source": fingerprint, **content.how, "tool": tool},
    }
    shortfall = published.shortfall(fields)
    if shortfall:
        progress.note(f"named {published.OWN!r}, not {content.name}: {shortfall}")
        fields["name"] = published.OWN
    for name in (entry for entry in data_set.outputs if entry not in left_out):
        (scratch / name).replace(scratch.parent / name)
    path = manifest.write(fields, scratch.parent)
    shutil.rmtree(scratch)
    return path
