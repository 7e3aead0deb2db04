"""The metrics stream: one JSON object a line, written by rank 0, read by whoever follows the run.

Kinds of record, told by ``kind``:
``start``  ranks, global_batch_size, steps_per_epoch, epochs, quality_target, resumed_step
``step``   epoch (from 1), step (from 1 over the whole run), loss, learning_rate
``epoch``  epoch, samples_per_second (training alone), input_share (of the time, spent waiting for data)
``eval``   epoch, quality (the benchmark's metric), seconds; DLRM also has log_loss
``end``    outcome: reached, not_reached or interrupted
Every record has ``time``, in Unix seconds.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Optional, TextIO


class MetricsStream:
    """Appends records to ``path`` on rank 0 and does nothing on any other rank."""

    def __init__(self, path: Path, rank: int) -> None:
        self._file: Optional[TextIO] = None
        if rank == 0:
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record and flush it."""
        if self._file is not None:
            record = {"kind": kind, "time": round(time.time(), 3), **fields}
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
