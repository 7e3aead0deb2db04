"""A run for programs that call a part of a training: it has ranks, logs and a heartbeat in a folder of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.run import Run


def some_run(config, framework, output=None) -> Run:
    """A run of ``config`` that has not begun; default: in a new folder."""
    return Run(config, framework, Path("unused"), Path(output or tempfile.mkdtemp()), Wording("some"))
