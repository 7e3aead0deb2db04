"""Checks that preparations share: damaged samples, and evaluation samples that are trained on as well."""

import hashlib
from pathlib import Path
from shlex import quote
from typing import Any, Iterable, List, Sequence, Tuple

from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress

LISTED = 20  # damaged samples named in a message and in the passport
# Share of the evaluation samples: short sentences and articles repeat each other here and there, whole sets do not.
MOST_SHARE = 0.1
KEPT = "what is done already is kept"
# How compressed files begin, whatever their names (RFC 1952, and the formats' own descriptions).
PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}


def refuse_compressed(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        begin = file.read(max(map(len, PACKED)))
    kind = next((name for mark, name in PACKED.items() if begin.startswith(mark)), "")
    if kind == "gzip":
        named = path if path.suffix == ".gz" else path.with_name(f"{path.name}.gz")
        renaming = "" if named == path else f"mv {quote(str(path))} {quote(str(named))} && "
        raise Problem(f"{path} is compressed by gzip", expected, f"{renaming}gunzip {quote(str(named))}")
    if kind:
        raise Problem(f"{path} is compressed by {kind}", expected, "unpack it")


def not_utf8(*files: Tuple[Path, str]) -> Problem:
    """Return the problem of text that is not UTF-8: the lines of all files, each with the name that it is shown by."""
    found: List[str] = []
    mixed, last = False, ""
    for path, name in files:
        lines: List[str] = []
        wrong = good = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    good += not line.decode("utf-8").isascii()
                except UnicodeDecodeError as error:
                    wrong += 1
                    if wrong <= LISTED:
                        lines.append(f"line {number:,}: byte {line[error.start]:#04x} at {error.start + 1}")
        if wrong:
            more = [f"and {wrong - LISTED:,} more"] if wrong > LISTED else []
            found.append("\n    ".join([f"{name}: lines that are not UTF-8: {wrong:,}", *lines, *more]))
            mixed, last = mixed or good > 0, name
    hint = f"convert the file from its encoding, such as iconv -f latin1 -t utf-8 {quote(last)} > NEW"
    if mixed:
        hint = "fix or remove these lines, in both files if aligned; do not convert the others, which are UTF-8"
    return Problem("\n  ".join(found), "UTF-8 text", hint)


def damaged(lines: Sequence[str], what: str, expected: str, skips: bool, progress: Progress, keeps: bool) -> None:
    """Report damaged samples, a line of each, which are left out.

    Raises:
        Problem: there are some, and ``skips`` is not set; ``keeps`` if what was done remains for the next command.
    """
    if not lines:
        return
    more = [f"and {len(lines) - LISTED:,} more"] if len(lines) > LISTED else []
    listing = "\n    ".join([f"{len(lines):,} {what}", *lines[:LISTED], *more])
    if not skips:
        hint = "fix or delete them, or add --skip-corrupt to leave them out" + (f": {KEPT}" if keeps else "")
        raise Problem(listing, expected, hint, keeps=keeps)
    progress.note(f"skipped {listing}")


def key(content: bytes) -> str:
    """Return what two samples of the same bytes have in common, 16 characters."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def overlap(
    held: Iterable[Tuple[str, Any]], trained: Iterable[Any], what: str, allowed: bool, progress: Progress
) -> int:
    """Compare evaluation samples, each its name and its key, with the keys of training samples.

    Only the evaluation samples are kept in memory. Returns and raises as ``overlapping``.
    """
    named = list(held)
    common = {content for _, content in named}.intersection(trained)
    return overlapping([name for name, content in named if content in common], len(named), what, allowed, progress)


def overlapping(names: Sequence[str], total: int, what: str, allowed: bool, progress: Progress) -> int:
    """Warn of evaluation samples that are trained on as well, and return their number.

    Raises:
        Problem: they are more than a tenth of all, which is no accident, and not ``allowed``.
    """
    if not names:
        return 0
    found = f"{len(names):,} of {total:,} evaluation {what} are in the training data as well, the first is {names[0]}"
    if len(names) > MOST_SHARE * total and not allowed:
        hint = f"evaluate on other {what}, or remove these from training; to see whether training works, add "
        raise Problem(found, f"{what} that are not trained on", f"{hint}--allow-overlap: {KEPT}", keeps=True)
    progress.note(f"warning: {found}")
    return len(names)
