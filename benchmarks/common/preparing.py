"""What every ``prepare.py`` shares: problems told in three parts, progress, and room on the disk.

The host side starts a ``prepare.py`` with ``--progress json`` and reads lines like these from its
standard output; by hand the same facts come as text on standard error::

    {"phase": "convert", "done": 4096, "total": 1281167, "bytes": 451018752}
    {"note": "an earlier preparation was interrupted: going on from 4 of 1301 parts"}
    {"passport": "/data/imagenet/dataset.json"}
    {"error": {"found": "...", "expected": "...", "remedy": "..."}}
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

REFUSED = 2
"""Exit code of a problem that the user can mend before anything is done."""
FAILED = 1
"""Exit code when something broke after the start."""
INTERRUPTED = 130
"""Exit code after SIGINT or SIGTERM."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PHASES = {
    "index": "files",
    "scan": "bytes",
    "parse": "bytes",
    "convert": "images",
    "tables": "tables",
    "shuffle": "bytes",
    "join": "bytes",
    "verify": "bytes",
}
"""Each phase of a preparation, and what its ``done`` and ``total`` count."""


class Problem(Exception):
    """What was found, what was expected and what to do, with the exit code it leads to."""

    def __init__(self, found: str, expected: str = "", remedy: str = "", code: int = REFUSED) -> None:
        # All four go to args, so that a worker process can send the problem to its parent.
        super().__init__(found, expected, remedy, code)
        self.found, self.expected, self.remedy, self.code = found, expected, remedy, code

    def as_dict(self) -> Dict[str, str]:
        """The form in which a problem crosses to the host side."""
        return {"found": self.found, "expected": self.expected, "remedy": self.remedy}

    def __str__(self) -> str:
        parts = [self.found]
        if self.expected:
            parts.append("expected: " + self.expected)
        if self.remedy:
            parts.append("do this: " + self.remedy)
        return "\n  ".join(parts)


def disk_problem(error: OSError, directory: Path) -> Problem:
    """Tells an error of reading or writing: a full disk by its name, anything else as the system says it."""
    if error.errno in DISK_FULL:
        return Problem(
            "no room to write on in {}: {}".format(directory, os.strerror(error.errno or errno.ENOSPC)),
            "room for the whole data set",
            "free some space and give the same command again: finished parts are kept",
            FAILED,
        )
    place = error.filename or directory
    return Problem("{}: {}".format(place, error.strerror or error), "", "give the same command again", FAILED)


def check_room(directory: Path, needed: int) -> None:
    """Refuses to start when the disk that holds ``directory`` has less than ``needed`` bytes free."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise Problem(
            "{} free on the disk of {}".format(human_bytes(free), directory),
            "about {} for the data set".format(human_bytes(needed)),
            "free {} or choose another folder with --to".format(human_bytes(needed - free)),
        )


def human_bytes(count: float) -> str:
    """A number of bytes in decimal units, as disks are sold: ``1.5 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return "{:.{}f} {}".format(count, 0 if unit == "bytes" else 1, unit)
        count /= 1000
    return "{:.1f} TB".format(count)


class Progress:
    """Tells how far a preparation is: JSON lines on stdout, or plain lines on stderr."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._period = 0.2 if as_json else 5.0  # seconds between two lines of one phase
        self._phase = ""
        self._begun = self._told = 0.0
        self._first_done = 0
        self._last: Tuple[int, int] = (-1, -1)

    def update(self, phase: str, done: int, total: Optional[int] = None, size: int = 0) -> None:
        """Counts ``done`` of ``total`` and ``size`` bytes in a phase of PHASES; most calls say nothing."""
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._begun, self._first_done = phase, now, done
        elif (now - self._told < self._period and done != total) or (done, size) == self._last:
            return
        self._told, self._last = now, (done, size)
        if self.as_json:
            self._emit({"phase": phase, "done": done, "total": total, "bytes": size})
        else:
            print(self._line(phase, done, total, now - self._begun), file=sys.stderr, flush=True)

    def _line(self, phase: str, done: int, total: Optional[int], seconds: float) -> str:
        shown = human_bytes if PHASES[phase] == "bytes" else "{:,}".format
        unit = "" if PHASES[phase] == "bytes" else " " + PHASES[phase]
        line = "{:>8}  {}".format(phase, shown(done))
        if total is not None:
            line += " of {}".format(shown(total))
        line += unit
        rate = (done - self._first_done) / seconds if seconds > 1 else 0
        if rate and total is not None and done < total:
            line += ", {}{}/s, {:.0f} min left".format(shown(int(rate)), unit, (total - done) / rate / 60)
        return line

    def note(self, text: str) -> None:
        """Tells something the user should know and need not act on."""
        if self.as_json:
            self._emit({"note": text})
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self, passport: Path, text: str) -> None:
        """The last words of a command that did what it was asked."""
        if self.as_json:
            self._emit({"passport": str(passport)})
        else:
            print(text, file=sys.stderr, flush=True)

    def fail(self, problem: Problem, *more: Problem) -> int:
        """The last words otherwise; returns the exit code."""
        if self.as_json:
            facts: Dict[str, Any] = problem.as_dict()
            if more:
                facts["more"] = [other.as_dict() for other in more]
            self._emit({"error": facts})
        else:
            for each in (problem, *more):
                print(each, file=sys.stderr, flush=True)
        return problem.code

    def _emit(self, facts: Dict[str, Any]) -> None:
        print(json.dumps(facts), flush=True)
