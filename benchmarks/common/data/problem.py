"""A problem that the user can act on: what was found, what was expected, what to do, and the exit code."""

import errno
import os
from pathlib import Path
from typing import Dict

REFUSED = 2  # exit code of a problem that the user can fix before anything is done
FAILED = 1  # exit code when something broke after the start
INTERRUPTED = 130  # exit code after SIGINT or SIGTERM

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Problem(Exception):
    def __init__(
        self, found: str, expected: str = "", hint: str = "", code: int = REFUSED, keeps: bool = False
    ) -> None:
        """Make a problem; ``keeps`` if the command of its hint resumes from the parts that are finished."""
        # All go to args, so that a worker process can send the problem to its parent.
        super().__init__(found, expected, hint, code, keeps)
        self.found, self.expected, self.hint, self.code = found, expected, hint, code
        self.keeps = keeps or code != REFUSED

    def as_dict(self) -> Dict[str, str]:
        return {"found": self.found, "expected": self.expected, "hint": self.hint}

    def __str__(self) -> str:
        parts = [self.found]
        if self.expected:
            parts.append("expected: " + self.expected)
        if self.hint:
            parts.append("hint: " + self.hint)
        return "\n  ".join(parts)


def disk_problem(error: OSError, directory: Path) -> Problem:
    """Return the problem behind a failed read or write: a full disk by its name, others as the system has it."""
    if error.errno in DISK_FULL:
        return Problem(
            f"no room to write on in {directory}: {os.strerror(error.errno or errno.ENOSPC)}",
            "room for the whole data set",
            "free some space and give the same command again: finished parts are kept",
            FAILED,
        )
    path = error.filename or directory
    return Problem(f"{path}: {error.strerror or error}", "", "give the same command again", FAILED)
