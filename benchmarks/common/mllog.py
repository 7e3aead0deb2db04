"""MLPerf result log of one run: only rank 0 writes, in the ``:::MLLOG`` format of mlperf-logging."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Dict, Optional

from mlperf_logging.mllog.mllog import MLLogger

LOGGER_NAME = "encore.mllog"


class ResultLog:
    """Writes MLPerf events of rank 0 to ``path`` (appending) and nothing on any other rank.

    Event names are the constants of ``mlperf_logging.mllog.constants``. Each line is flushed as it is
    written, so that a reader can follow the run.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._mllogger: Optional[MLLogger] = None
        if rank != 0:
            return
        logger = logging.getLogger(LOGGER_NAME)
        logger.propagate = False
        logger.setLevel(logging.INFO)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.addHandler(logging.FileHandler(str(path), mode="a", encoding="utf-8"))
        self._mllogger = MLLogger(logger=logger, default_stack_offset=2)

    def start(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Log INTERVAL_START of ``key``."""
        if self._mllogger is not None:
            self._mllogger.start(key, value, metadata=metadata)

    def end(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Log INTERVAL_END of ``key``."""
        if self._mllogger is not None:
            self._mllogger.end(key, value, metadata=metadata)

    def event(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Log POINT_IN_TIME of ``key``."""
        if self._mllogger is not None:
            self._mllogger.event(key, value, metadata=metadata)

    def events(self, values: Dict[str, Any]) -> None:
        """Log each item as a POINT_IN_TIME event, in order."""
        for key, value in values.items():
            self.event(key, value)
