"""A run for programs that call a part of a training: it has ranks, logs and a heartbeat in a folder of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.run import Run


def some_run(config, framework, data: Path) -> Run:
    """A run of ``config`` on a data set that has not begun, in a new folder."""
    return Run(config, framework, data, Path(tempfile.mkdtemp()), Wording("some"))
