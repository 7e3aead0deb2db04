"""Records of Encore's ``metrics.jsonl``, as far as results are read from it.

benchmarks/common/run/metrics.py writes it, and describes every kind.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

_LONGEST_LINE = 1 << 16


class Record(BaseModel):
    """One line of the stream; ``time``: Unix seconds, ``step``: counted from 1 over the full run."""

    kind: Literal["start", "step"]
    time: float = Field(0.0, ge=0, lt=1e12)
    step: int = Field(0, ge=0, lt=1 << 53)
    resumed_step: int = 0
    epoch: int = 0
    loss: float | None = None
    global_batch_size: float = Field(0.0, ge=0, lt=1 << 53)
    steps_per_epoch: int = Field(0, ge=0, lt=1 << 53)


def experiment_of(log: Path) -> Path | None:
    """Return a log's experiment folder, or None if the log was not written by Encore.

    The log is in that folder, or in its parent with the same number: ``experiment_0`` for ``result_0.txt``.
    """
    folders = (log.parent, log.parent / f"experiment_{log.stem.rpartition('_')[2]}")
    return next((folder for folder in folders if any(folder.glob("*.jsonl"))), None)


def lines_of(path: Path) -> Iterator[str]:
    """Yield the stream's lines, split at 65,536 characters; empty if it cannot be read."""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        yield from iter(lambda: file.readline(_LONGEST_LINE), "")


def record_of(line: str) -> Record | None:
    """Parse a record; None for other kinds and damaged lines."""
    with suppress(ValidationError):
        return Record.model_validate_json(line)
    return None
