"""The end of a log whose models are evaluated after the clock: Minigo's from v0.6 on.

The clock stops, in hindsight, at the save of the first model that reached the target (MLPerf training rules, "timing":
time-stamped checkpoints). A resumed run finds the times in the log itself.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, NamedTuple, Optional

from mlperf_logging.mllog import constants

V06_LINE = re.compile(r":::MLL (\S+) (\w+): (\{.*\})$")
V07_LINE = re.compile(r":::MLLOG (\{.*\})$")


class Event(NamedTuple):
    """One line of a log."""

    key: str
    seconds: float  # Unix time
    value: Any
    metadata: Mapping[str, Any]


class SavedModels:
    """Saved models and their evaluations in the log at ``path``."""

    def __init__(self, path: Path, round_name: str) -> None:
        self._path, self._is_v06 = path, round_name == "v0.6"

    def log_result(self, lines: Any, status: Mapping[str, str]) -> None:
        """Log which model was evaluated last and when it was saved, in seconds of the clock; v0.6 has no run_stop."""
        started = 0.0
        saves: Dict[int, float] = {}
        last: Optional[Event] = None
        for event in self._events():
            if event.key == constants.RUN_START:
                started = event.seconds
            elif event.key == "save_model":
                saves[event.value["iteration"]] = event.seconds
            elif event.key == constants.EVAL_ACCURACY:
                last = event
        saved = saves.get(int(last.metadata["epoch_num"])) if last is not None else None
        # The submitted logs have 0 where no model reached the target.
        counts = saved is not None and status["status"] == "success"
        timestamp = round(saved - started, 6) if saved is not None and counts else 0
        if last is not None:
            self._log_last(lines, last, timestamp)
        if not self._is_v06:
            at = round((started + timestamp) * 1000) if counts else None
            lines.end(constants.RUN_STOP, metadata=dict(status), time_ms=at)

    def _log_last(self, lines: Any, last: Event, timestamp: float) -> None:
        number = int(last.metadata["epoch_num"])
        if self._is_v06:
            lines.event("eval_result", None, metadata={"iteration": number, "timestamp": timestamp})
        else:
            lines.event("eval_result", last.value, metadata={"epoch_num": number, "timestamp": timestamp})

    def _events(self) -> Iterator[Event]:
        pattern = V06_LINE if self._is_v06 else V07_LINE
        for line in self._path.read_text(encoding="utf-8").splitlines():
            found = pattern.search(line)
            if found and self._is_v06:
                content = json.loads(found.group(3))
                yield Event(found.group(2), float(found.group(1)), content["value"], content["metadata"])
            elif found:
                content = json.loads(found.group(1))
                yield Event(content["key"], content["time_ms"] / 1000, content["value"], content["metadata"])
