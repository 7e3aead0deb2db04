"""The two logs of a run, MLPerf's and the metrics stream, and the lines in them whose places a timeline gives."""

from __future__ import annotations

import operator
import time
from functools import cached_property
from pathlib import Path
from typing import Any, Mapping

from benchmarks.common.run.metrics import MetricsStream
from benchmarks.common.run.mllog import Wording, log_of
from benchmarks.common.run.pending import Begun
from benchmarks.common.run.timeline import Timeline


class RunLogs:
    """``result.txt`` in the dialect of the configuration's round, and ``metrics.jsonl``; only rank 0 writes.

    The files are opened when there is something to log.
    """

    def __init__(self, output: Path, rank: int, wording: Wording, config: Any) -> None:
        self.paths = (output / "result.txt", output / "metrics.jsonl")
        self._rank, self._wording, self._round = rank, wording, config.round
        self._targets: Mapping[str, float] = config.targets

    @cached_property
    def log(self) -> Any:
        """MLPerf's, of benchmarks/common/run/mllog.py."""
        return log_of(self._wording, self.paths[0], self._rank, self._round)

    @cached_property
    def metrics(self) -> MetricsStream:
        """The metrics stream."""
        return MetricsStream(self.paths[1], self._rank)

    def start_epoch(self, timeline: Timeline, epoch: int) -> None:
        """Log the start of an epoch, and of the block that begins with it."""
        if epoch == 0 or timeline.evaluates_inside_epochs or timeline.evaluates_after(epoch * timeline.steps_per_epoch):
            self.log.block_start(epoch, timeline.block_epochs(epoch))
        self.log.epoch_start(epoch)

    def stop_epoch(self, epoch: int) -> None:
        """Log the end of an epoch that is a block behind its evaluations."""
        self.log.epoch_stop(epoch)
        self.log.block_stop(epoch)

    def start_evaluation(self, timeline: Timeline, position: int, epoch: int) -> Begun:
        """Log the start of an evaluation after ``epoch``, from 0; a block whose result comes later ends before it."""
        if timeline.evaluates_concurrently and not timeline.evaluates_inside_epochs:
            self.log.block_stop(timeline.first_of_block(epoch))
        self.log.eval_start(timeline.epoch_num(position))
        return Begun(position, epoch + 1, time.time())

    def stop_evaluation(self, timeline: Timeline, begun: Begun, found: Mapping[str, float]) -> bool:
        """Log the end of an evaluation and what it ``found``; return whether it reached all targets."""
        targets = self._targets
        qualities = {name: found[name] for name in targets}
        figures = {name: value for name, value in found.items() if name not in targets}
        self.log.eval_stop(timeline.epoch_num(begun.position), qualities, targets)
        if not (timeline.evaluates_inside_epochs or timeline.evaluates_concurrently):
            self.log.block_stop(timeline.first_of_block(begun.epoch - 1))
        seconds = round(time.time() - begun.started, 3)
        self.metrics.write("eval", epoch=begun.epoch, qualities=qualities, seconds=seconds, **figures)
        reached = operator.gt if timeline.target_is_exceeded else operator.ge
        return all(reached(qualities[name], target) for name, target in targets.items())
