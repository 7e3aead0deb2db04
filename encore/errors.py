"""Errors that a user can act on, and the exit codes of every command."""

import difflib
from collections.abc import Iterable
from enum import IntEnum

_MOST_LISTED = 16
_NEAREST = 5  # Names that are offered out of more
# Similarity from which on a name may be meant: half of the letters are the same in 'nobody' and 'MangoBoost'.
_CUTOFF = 0.6


class ExitCode(IntEnum):
    """Exit codes of ``encore`` and ``run.sh``, documented in docs/exit-codes.md."""

    REACHED = 0  # Success; for a run: all experiments reached the quality target
    FAILED = 1  # Something broke after the start: a rank died or hung, a disk filled up
    REFUSED = 2  # Rejected before the start: a wrong name, value, environment or data set
    # The run completed as planned, but at least one experiment missed the quality target. Self-test: no check failed,
    # but the time limit skipped some.
    NOT_REACHED = 3
    INTERRUPTED = 130  # Stopped by SIGINT or SIGTERM; ``--resume`` continues from the checkpoint


class EncoreError(Exception):
    """A problem that the user can fix, reported as problem, expectation and fix.

    The command line prints it without a traceback and exits with ``exit_code``.
    """

    def __init__(
        self, found: str, *, expected: str = "", hint: str = "", exit_code: ExitCode = ExitCode.REFUSED
    ) -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        expected = f"expected: {self.expected}" if self.expected else ""
        hint = f"hint: {self.hint}" if self.hint else ""
        return "\n  ".join(filter(None, (self.found, expected, hint)))


def unknown_name(kind: str, name: str, candidates: Iterable[str]) -> EncoreError:
    """Return an error for an unknown ``name`` of this ``kind``, with the nearest of ``candidates``.

    Candidates that contain the name are preferred over similar spellings.
    """
    choices, lowered = sorted(candidates), name.lower()
    by_case = {choice.lower(): choice for choice in reversed(choices)}
    containing = [
        choice for choice in sorted(by_case, key=lambda choice: (len(choice), choice)) if lowered and lowered in choice
    ]
    near = containing[:_NEAREST] or difflib.get_close_matches(lowered, by_case, n=1, cutoff=_CUTOFF)
    # A long list would bury the names that were meant.
    expected = f"one of {', '.join(choices)}" if len(choices) <= _MOST_LISTED else ""
    if len(choices) > _MOST_LISTED and not near:
        alike = difflib.get_close_matches(lowered, by_case, n=_NEAREST, cutoff=0.0)
        expected = f"one of {len(choices):,}, such as {', '.join(by_case[choice] for choice in alike)}"
    hint = f"did you mean {' or '.join(repr(by_case[choice]) for choice in near)}?" if near else ""
    return EncoreError(f"unknown {kind} {name!r}", expected=expected, hint=hint)
