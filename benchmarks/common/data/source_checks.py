"""Checks that preparations share: damaged samples, and evaluation samples that are trained on as well."""

import hashlib
from typing import Any, Iterable, Sequence, Tuple

from benchmarks.common.data.problem import FAILED, Problem
from benchmarks.common.data.progress import Progress

LISTED = 20  # damaged samples named in a message and in the manifest
# Fraction of the evaluation samples. Some short sentences and articles occur twice; complete sets do not.
MOST_SHARE = 0.1
KEPT = "finished parts are kept"


def damaged(lines: Sequence[str], subject: str, expected: str, skips: bool, progress: Progress, keeps: bool) -> None:
    """Report damaged samples, one line each, that are skipped.

    Raises:
        Problem: there are damaged samples and ``skips`` is not set; ``keeps``: finished parts remain for the next run.
    """
    if not lines:
        return
    rest = [f"and {len(lines) - LISTED:,} more"] if len(lines) > LISTED else []
    listing = "\n    ".join([f"{len(lines):,} {subject}", *lines[:LISTED], *rest])
    if not skips:
        hint = "fix or delete them, or add --skip-corrupt to skip them" + (f": {KEPT}" if keeps else "")
        raise Problem(listing, expected, hint, keeps=keeps)
    progress.note(f"skipped {listing}")


def first_names(names: Sequence[str], separator: str = ", ", limit: int = 5) -> str:
    """Return the first names in a list, and the number of other names."""
    listed = separator.join(names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit:,} more"


def read_unchanged(path: str, name: str, size: int, offset: int = -1) -> bytes:
    """Return a file of ``size`` bytes, or that many bytes at ``offset`` in a container; ``name``: in messages.

    Raises:
        Problem: it cannot be read, or its size has changed since it was listed.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(0, offset))
            data = file.read(-1 if offset < 0 else size)
    except OSError as error:
        problem = f"{name} cannot be read: {error.strerror or error}"
        raise Problem(problem, "a readable image", "correct it and run the same command again", FAILED) from None
    if len(data) != size:
        raise Problem(
            f"{name} changed during the preparation: {len(data):,} bytes, it had {size:,}",
            "a source that does not change",
            "run the same command again when nothing writes to the source",
            FAILED,
        )
    return data


def key(content: bytes) -> str:
    """Return a hash of a sample's bytes, 16 characters."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def overlap(
    evaluation: Iterable[Tuple[str, Any]], trained: Iterable[Any], unit: str, allowed: bool, progress: Progress
) -> int:
    """Compare evaluation samples (name, key) with the keys of training samples.

    Only the evaluation samples are kept in memory. Returns and raises like ``overlapping``.
    """
    samples = list(evaluation)
    common = {content for _, content in samples}.intersection(trained)
    return overlapping([name for name, content in samples if content in common], len(samples), unit, allowed, progress)


def overlapping(names: Sequence[str], total: int, unit: str, allowed: bool, progress: Progress) -> int:
    """Warn about evaluation samples in the training data; return their number.

    Raises:
        Problem: more than a tenth of all, which cannot be accidental, and not ``allowed``.
    """
    if not names:
        return 0
    message = f"{len(names):,} of {total:,} evaluation {unit} are in the training data as well, the first is {names[0]}"
    if len(names) > MOST_SHARE * total and not allowed:
        hint = f"evaluate on other {unit}, or remove these from training; to see whether training works, add "
        raise Problem(message, f"{unit} that are not trained on", f"{hint}--allow-overlap: {KEPT}", keeps=True)
    progress.note(f"warning: {message}")
    return len(names)
