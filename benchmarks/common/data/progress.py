"""Preparation progress, for the host or for a person.

The host starts ``prepare.py`` with ``--progress json`` and reads lines like these from its standard output;
otherwise the same information is printed as text on standard error::

    {"phase": "convert", "done": 4096, "total": 1281167, "unit": "images", "bytes": 451018752}
    {"note": "resuming: 4 of 1,301 parts of convert were finished before"}
    {"passport": "/data/imagenet/dataset.json"}
    {"error": {"found": "...", "expected": "...", "hint": "..."}}
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

from benchmarks.common.data.problem import Problem


def human_bytes(count: float) -> str:
    """Return a number of bytes in decimal units, as disks are sold: ``1.5 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.{0 if unit == 'bytes' else 1}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class Progress:
    """Reports how far a preparation is: JSON lines on stdout, or plain lines on stderr."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._period = 0.2 if as_json else 5.0  # seconds between a phase's lines
        self._phase = ""
        self._phase_start = self._last_report = 0.0
        self._first_done = 0
        self._last: Tuple[int, int] = (-1, -1)

    def update(self, phase: str, done: int, total: Optional[int] = None, size: int = 0, unit: str = "bytes") -> None:
        """Update a phase: ``done`` of ``total`` units, ``size`` bytes. Most calls print nothing."""
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._phase_start, self._first_done = phase, now, done
        elif (now - self._last_report < self._period and done != total) or (done, size) == self._last:
            return
        self._last_report, self._last = now, (done, size)
        if self.as_json:
            self._emit({"phase": phase, "done": done, "total": total, "unit": unit, "bytes": size})
        else:
            self.note(self._line(phase, done, total, unit, now - self._phase_start))

    def counter(self, phase: str, total: Optional[int] = None) -> Callable[[int], None]:
        done = 0

        def add(size: int) -> None:
            nonlocal done
            done += size
            self.update(phase, done, total, done)

        return add

    def _line(self, phase: str, done: int, total: Optional[int], unit: str, seconds: float) -> str:
        to_text = human_bytes if unit == "bytes" else "{:,}".format
        suffix = "" if unit == "bytes" else " " + unit
        line = f"{phase:>8}  {to_text(done)}" + ("" if total is None else f" of {to_text(total)}") + suffix
        rate = (done - self._first_done) / seconds if seconds > 1 else 0
        if rate and total is not None and done < total:
            line += f", {to_text(int(rate))}{suffix}/s, {(total - done) / rate / 60:.0f} min left"
        return line

    def note(self, text: str) -> None:
        if self.as_json:
            self._emit({"note": text})
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self, manifest: Path, text: str) -> None:
        if self.as_json:
            self._emit({"passport": str(manifest)})
        else:
            self.note(text)

    def fail(self, problem: Problem, *others: Problem) -> int:
        """Report the last line otherwise and return the exit code."""
        if self.as_json:
            error: Dict[str, Any] = problem.as_dict()
            if others:
                error["more"] = [other.as_dict() for other in others]
            self._emit({"error": error})
        else:
            for reported in (problem, *others):
                self.note(str(reported))
        return problem.code

    def _emit(self, record: Dict[str, Any]) -> None:
        print(json.dumps(record), flush=True)
