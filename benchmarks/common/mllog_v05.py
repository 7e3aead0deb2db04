"""The result log of round v0.5, whose lines are older than mlperf-logging; only rank 0 writes.

A line is ``:::MLPv0.5.0 BENCHMARK UNIX_SECONDS (FILE:LINE) KEY: JSON``, as in the logs of that round.
"""

from __future__ import annotations

import inspect
import json
import time
from pathlib import Path
from typing import Any, Optional, TextIO


class ResultLogV05:
    """Appends events of ``benchmark`` to ``path`` on rank 0 and does nothing on any other rank."""

    def __init__(self, path: Path, rank: int, benchmark: str) -> None:
        self._benchmark = benchmark
        self._file: Optional[TextIO] = None
        if rank == 0:
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def event(self, key: str, value: Any = None) -> None:
        """Log ``key`` with a JSON ``value``, or without one, and flush the line."""
        if self._file is None:
            return
        caller = inspect.stack(context=0)[1]
        place = f"({Path(caller.filename).name}:{caller.lineno})"
        text = "" if value is None else f": {json.dumps(value)}"
        self._file.write(f":::MLPv0.5.0 {self._benchmark} {time.time():.9f} {place} {key}{text}\n")
        self._file.flush()
