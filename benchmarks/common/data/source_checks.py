"""Checks that preparations share: damaged samples, and evaluation samples that are trained on as well."""

import hashlib
from typing import Any, Iterable, Sequence, Tuple

from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress

LISTED = 20  # damaged samples named in a message and in the manifest
# Share of the evaluation samples: short sentences and articles repeat each other here and there, whole sets do not.
MOST_SHARE = 0.1
KEPT = "what is done already is kept"


def damaged(lines: Sequence[str], subject: str, expected: str, skips: bool, progress: Progress, keeps: bool) -> None:
    """Report damaged samples, a line of each, which are left out.

    Raises:
        Problem: there are some, and ``skips`` is not set; ``keeps`` if what was done remains for the next command.
    """
    if not lines:
        return
    rest = [f"and {len(lines) - LISTED:,} more"] if len(lines) > LISTED else []
    listing = "\n    ".join([f"{len(lines):,} {subject}", *lines[:LISTED], *rest])
    if not skips:
        hint = "fix or delete them, or add --skip-corrupt to leave them out" + (f": {KEPT}" if keeps else "")
        raise Problem(listing, expected, hint, keeps=keeps)
    progress.note(f"skipped {listing}")


def key(content: bytes) -> str:
    """Return what two samples of the same bytes have in common, 16 characters."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def overlap(
    evaluation: Iterable[Tuple[str, Any]], trained: Iterable[Any], unit: str, allowed: bool, progress: Progress
) -> int:
    """Compare evaluation samples, each its name and its key, with the keys of training samples.

    Only the evaluation samples are kept in memory. Returns and raises as ``overlapping``.
    """
    samples = list(evaluation)
    common = {content for _, content in samples}.intersection(trained)
    return overlapping([name for name, content in samples if content in common], len(samples), unit, allowed, progress)


def overlapping(names: Sequence[str], total: int, unit: str, allowed: bool, progress: Progress) -> int:
    """Warn of evaluation samples that are trained on as well, and return their number.

    Raises:
        Problem: they are more than a tenth of all, which is no accident, and not ``allowed``.
    """
    if not names:
        return 0
    message = f"{len(names):,} of {total:,} evaluation {unit} are in the training data as well, the first is {names[0]}"
    if len(names) > MOST_SHARE * total and not allowed:
        hint = f"evaluate on other {unit}, or remove these from training; to see whether training works, add "
        raise Problem(message, f"{unit} that are not trained on", f"{hint}--allow-overlap: {KEPT}", keeps=True)
    progress.note(f"warning: {message}")
    return len(names)
