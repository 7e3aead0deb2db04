"""Read a run's metrics stream incrementally, for progress bars and plain output."""

import platform
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from encore.files import json_objects
from encore.machine import processes
from encore.results.logs import steps, telemetry

LAST_BYTES = 256  # More than a record's kind and time, which no two records share


class Tail:
    # Reads the complete JSON lines that were added to a growing file since the last call.
    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        # Last bytes read. They differ if a resumed run has truncated and rewritten the stream.
        self._last = b""

    def read(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset - len(self._last))
                if file.read(len(self._last)) != self._last:
                    self._offset = 0
                    file.seek(0)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        self._last = (complete or self._last)[-LAST_BYTES:] if self._offset else b""
        return [record for record in json_objects(complete.splitlines()) if "kind" in record]


# Start record fields that apply to the full run, with defaults.
GIVEN_AT_START: Mapping[str, Any] = {
    **dict.fromkeys(("epochs", "steps_per_epoch", "global_batch_size"), 0),
    "targets": {},
    "damaged": {},
    "environment": {},
    "choices": {},
    "evidence": {},
    "batch_unit": "samples",
    "flops_per_sample": None,
    "gemm_precision": "",
    "startup": {},
}


@dataclass(kw_only=True)
class Progress:
    epochs: int = 0
    steps_per_epoch: int = 0
    global_batch_size: int = 0
    targets: Mapping[str, float] = field(default_factory=dict)
    epoch: int = 0
    step: int = 0
    loss: float | None = None
    # Results of the last evaluation; targets have the same keys.
    qualities: Mapping[str, float] = field(default_factory=dict)
    evaluated_epoch: int | None = None  # Epoch of that evaluation, from 1
    evaluated_step: int = 0  # Training steps before that evaluation
    batch_unit: str = "samples"  # Unit of ``global_batch_size``
    outcome: str | None = None
    slow: str = ""  # Latest result of ``slow_rank``
    starts: int = 0  # How often the run was started or resumed
    # Damaged checkpoints skipped by the latest resume, with the reason.
    damaged: Mapping[str, str] = field(default_factory=dict)
    # Library variables of rank 0.
    environment: Mapping[str, str] = field(default_factory=dict)
    # Values chosen at run time for "auto" settings.
    choices: Mapping[str, Any] = field(default_factory=dict)
    # Computed and communicated work and parallel layout, by MLPerf keys.
    evidence: Mapping[str, Any] = field(default_factory=dict)
    flops_per_sample: float | None = None  # Model FLOPs of training on one of ``batch_unit``
    gemm_precision: str = ""  # GEMM precision
    # ``seconds`` per part of rank 0's startup, until the clock starts, and the ``budget`` per part on eight GPUs
    startup: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # Asynchronous checkpoints: ``count``, ``seconds`` for writing, and seconds that training ``stopped``
    written: Mapping[str, float] = field(default_factory=dict)
    trained: tuple[float, int] = (0.0, 0)  # Seconds and steps between reports, without evaluations, since the start
    _times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))
    _stopped: float = 0.0  # Seconds that training was blocked by the last checkpoint
    _began: tuple[float, int] = (0.0, 0)  # Time and step of the latest start or resume

    @property
    def reported(self) -> dict[str, Mapping[str, Any]]:
        """A finished experiment's fields for run.json, by key."""
        return {
            "choices": self.choices,
            "evidence": self.evidence,
            "startup": self.startup,
            "checkpoints": self.written,
        }

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def position(self) -> str:
        """Progress in epochs; in samples if the run is a part of one epoch, as for language models."""
        if self.epochs == 1:
            return f"{self._samples(self.step)} of {self._samples(self.total_steps)} {self.batch_unit}"
        return f"epoch {max(self.epoch, 1)}" + (f"/{self.epochs}" if self.epochs else "")

    @property
    def evaluated_position(self) -> str:
        if self.epochs == 1:
            return f"after {self._samples(self.evaluated_step)} {self.batch_unit}"
        return f"epoch {self.evaluated_epoch}"

    def _samples(self, steps: int) -> str:
        return f"{steps * self.global_batch_size:,}"

    @property
    def samples_per_second(self) -> float | None:
        if len(self._times) < 2:
            return None
        (first_time, first_step), (last_time, last_step) = self._times[0], self._times[-1]
        # The first reports come in a bunch, since they are read some steps late.
        if last_time - first_time < 1.0:
            return None
        return (last_step - first_step) * self.global_batch_size / (last_time - first_time)

    @property
    def trained_per_second(self) -> float | None:
        """Average samples per second, excluding evaluations and their overhead."""
        seconds, steps = self.trained
        return steps * self.global_batch_size / seconds if seconds > 0 else None

    @property
    def seconds_to_go(self) -> float | None:
        # Time to the last epoch at the pace since the start, evaluations included; None before the first one.
        time, step = self._began
        if self.evaluated_epoch is None or not self._times or self.step <= step:
            return None
        return (self.total_steps - self.step) * (self._times[-1][0] - time) / (self.step - step)

    def add(self, record: dict[str, Any]) -> None:
        """Take in one record of the stream; see benchmarks/common/run/metrics.py."""
        kind = record["kind"]
        if kind == "start":
            if record["resumed_step"] == 0:
                self.starts, self.qualities, self.loss, self.evaluated_epoch = 0, {}, None, None
                self.written = {}
            self.starts += 1
            self.step, self.outcome = record["resumed_step"], None
            self._began = (record["time"], self.step)
            self._times.clear()
            vars(self).update({name: record.get(name, default) for name, default in GIVEN_AT_START.items()})
            self.epoch = self.step // max(self.steps_per_epoch, 1)
        elif kind == "step":
            self.epoch, self.step, self.loss = record["epoch"], record["step"], record["loss"]
            if self._times:
                (seconds, steps), (seconds_before, step) = self.trained, self._times[-1]
                self.trained = (seconds + record["time"] - seconds_before, steps + self.step - step)
            self._times.append((record["time"], self.step))
        elif kind == "eval":
            self.qualities, self.evaluated_epoch = record["qualities"], record["epoch"]
            self.evaluated_step = record.get("step") or self.step
            self._times.clear()
        elif kind == "checkpoint":
            self._stopped = record["seconds"]
        elif kind == "checkpoint_written":
            checkpoint = {"count": 1, "seconds": record["seconds"], "stopped": self._stopped}
            self.written = {name: round(self.written.get(name, 0) + value, 3) for name, value in checkpoint.items()}
        elif kind == "end":
            self.outcome = record["outcome"]


def read_progress(path: Path) -> Progress:
    progress = Progress()
    for record in Tail(path).read():
        progress.add(record)
    return progress


SLOW_SECONDS = 5.0  # Between two looks for a slow rank
SUSPENDED_SECONDS, SUSPENDED_SECONDS_ELSEWHERE = 5.0, 90.0  # A live rank renews its heartbeat twice per second


def slow_rank(experiment: Path) -> str:
    """Describe the rank or GPU that slows down a running experiment; empty if none does."""
    beats = processes.heartbeats(experiment / "heartbeat")
    newest = max((beat.alive for beat in beats), default=0.0)
    for beat in beats:
        limit = SUSPENDED_SECONDS if beat.host == platform.node() else SUSPENDED_SECONDS_ELSEWHERE
        if newest - beat.alive > limit:
            silent = newest - beat.alive
            return f"rank {beat.rank} is slow (process {beat.pid} on {beat.host}): no heartbeat for {silent:.0f} s"
    now = time.time()
    return str(steps.slow_rank(steps.windows_of(experiment, recent=True), now) or telemetry.slow_gpu(experiment, now))


class SlowRankWatch:
    """Periodic check for a slow rank."""

    def __init__(self, experiment: Path) -> None:
        self._experiment, self._next, self._last = experiment, time.monotonic() + SLOW_SECONDS, ""

    def look(self) -> str:
        if time.monotonic() >= self._next:
            self._last, self._next = slow_rank(self._experiment), time.monotonic() + SLOW_SECONDS
        return self._last
