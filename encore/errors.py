"""Errors that a user can act on, and the exit codes of every command."""

from enum import IntEnum


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
