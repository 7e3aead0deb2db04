"""A problem that the user can fix: finding, expectation, hint and exit code."""

import errno
import os
from pathlib import Path
from typing import Dict

REFUSED = 2  # exit code for a problem found before any work
FAILED = 1  # exit code when something broke after the start
INTERRUPTED = 130  # exit code after SIGINT or SIGTERM

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Problem(Exception):
    def __init__(
        self, found: str, expected: str = "", hint: str = "", code: int = REFUSED, keeps: bool = False
    ) -> None:
        """``keeps``: finished parts remain, and the command in the hint resumes from them."""
        # All go to args, so that a worker process can pickle the problem for its parent.
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
    """Return the problem for a failed read or write, with a special message for a full disk."""
    if error.errno in DISK_FULL:
        return Problem(
            f"no space left in {directory}: {os.strerror(error.errno or errno.ENOSPC)}",
            "space for the data set",
            "free some space and run the same command again; finished parts are kept",
            FAILED,
        )
    path = error.filename or directory
    return Problem(f"{path}: {error.strerror or error}", "", "run the same command again", FAILED)
