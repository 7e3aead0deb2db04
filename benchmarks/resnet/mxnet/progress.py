"""Where a run stands: step reports without waiting, checkpoints, and an exact return to them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Callable, List, Optional, Tuple, TypeVar

import mxnet as mx
from mxnet.gluon.parameter import ParameterDict

from benchmarks.common import checkpoints, horovod_mxnet
from benchmarks.common.checkpoints import Position
from benchmarks.common.horovod_mxnet import LaggedSums, hvd
from benchmarks.common.metrics import MetricsStream
from benchmarks.common.ranks import Ranks
from benchmarks.resnet.mxnet.config import Config
from benchmarks.resnet.mxnet.data import TrainingInput

T = TypeVar("T")


class StepReports:
    """Losses of the steps and the speed of the epochs for the metrics stream, and the agreement to stop."""

    def __init__(self, metrics: MetricsStream, config: Config, ranks: int, steps_per_epoch: int) -> None:
        self._metrics = metrics
        self._config = config
        self._ranks = ranks
        self._steps_per_epoch = steps_per_epoch
        self._sums = LaggedSums("step")
        self._pending: List[Tuple[int, float]] = []
        self._losses: List[float] = []
        self._first: Optional[mx.nd.NDArray] = None
        self._steps = 0
        self._input_seconds = 0.0
        self._since = time.time()

    def start_epoch(self) -> None:
        """Start the clock of the speed."""
        self._steps, self._input_seconds, self._since = 0, 0.0, time.time()

    def timed(self, call: Callable[[], T]) -> T:
        """Call, and count the time as waiting for input."""
        started = time.time()
        result = call()
        self._input_seconds += time.time() - started
        return result

    def add(self, step: int, loss: mx.nd.NDArray, stop: bool, learning_rate: float) -> bool:
        """Report one step; True when all ranks know that one of them was asked to stop."""
        self._pending.append((step, learning_rate))
        self._steps += 1
        sums = self._sums.send(self._pair(loss.mean(), stop))
        return sums is not None and self._receive(sums)

    def _pair(self, loss: mx.nd.NDArray, stop: bool) -> mx.nd.NDArray:
        """[loss, stop] without waiting; no concat, whose oneDNN layout Horovod cannot send from a CPU."""
        if self._first is None:
            self._first = mx.nd.array([1.0, 0.0], ctx=loss.context)
            self._second = mx.nd.array([0.0, 1.0], ctx=loss.context)
        pair = self._first * loss
        return pair + self._second if stop else pair

    def end_epoch(self, epoch: int) -> None:
        """Wait for the reports under way and write the speed of the epoch (counted from 0)."""
        for sums in self._sums.drain():
            self._receive(sums)
        seconds = max(time.time() - self._since, 1e-9)
        samples = self._steps * self._config.batch_size * self._ranks
        self._metrics.write(
            "epoch",
            epoch=epoch + 1,
            samples_per_second=round(samples / seconds, 2),
            input_share=round(self._input_seconds / seconds, 4),
        )

    def _receive(self, sums: List[float]) -> bool:
        step, rate = self._pending.pop(0)
        self._losses.append(sums[0] / self._ranks)
        if (step + 1) % self._config.log_interval == 0 or (step + 1) % self._steps_per_epoch == 0:
            self._metrics.write(
                "step",
                epoch=step // self._steps_per_epoch + 1,
                step=step + 1,
                loss=sum(self._losses) / len(self._losses),
                learning_rate=rate,
            )
            self._losses = []
        return sums[1] > 0


class Progress:
    """Saves and restores a run: weights, momentum, the state of each rank's input, the logs' lengths."""

    def __init__(self, output: Path, ranks: Ranks) -> None:
        self._folder = output / "checkpoint"
        self._logs = (output / "result.txt", output / "metrics.jsonl")
        self._ranks = ranks
        self._checkpoint: Optional[Path] = None
        self._lengths: List[int] = []
        self.position = Position(0, 0)
        self.steps_per_epoch = 0

    def find_checkpoint(self) -> bool:
        """Look for a checkpoint; if there is one, cut the logs back to where they were at that moment."""
        self._checkpoint = checkpoints.latest(self._folder)
        # No rank may look later than rank 0 starts to write a new one.
        horovod_mxnet.barrier("find_checkpoint")
        if self._checkpoint is None:
            return False
        state = checkpoints.read_state(self._checkpoint)
        if state["ranks"] != self._ranks.size:
            raise SystemExit(
                f"checkpoint {self._checkpoint} was written by {state['ranks']} ranks and this run has "
                f"{self._ranks.size}: resume with the same number, or remove the checkpoint"
            )
        self.position = Position(state["epoch"], state["step_in_epoch"])
        if self._ranks.rank == 0:
            for path, length in zip(self._logs, state["log_lengths"]):
                checkpoints.cut_log(path, length)
        return True

    def restore_or_broadcast(self, parameters: ParameterDict, trainer: hvd.DistributedTrainer) -> None:
        """Load weights and momentum, or send rank 0's fresh weights to all ranks."""
        if self._checkpoint is None:
            horovod_mxnet.broadcast_parameters(parameters)
            return
        for name, value in mx.nd.load(str(self._checkpoint / "weights.params")).items():
            parameters[name].set_data(value)
        trainer.load_states(str(self._checkpoint / "trainer.states"))

    def input_checkpoint(self) -> Optional[bytes]:
        """State of this rank's training input, None at the beginning of a run."""
        if self._checkpoint is None:
            return None
        return (self._checkpoint / f"input_{self._ranks.rank}.bin").read_bytes()

    def mark_log(self) -> None:
        """Remember the logs' lengths now: what comes later is logged again after a resume."""
        if self._ranks.rank == 0:
            self._lengths = [path.stat().st_size for path in self._logs]

    def save(
        self, parameters: ParameterDict, trainer: hvd.DistributedTrainer, training: TrainingInput
    ) -> None:
        """Write a checkpoint of ``position``; returns when it is whole."""
        number = self.position.step(self.steps_per_epoch)
        if self._ranks.rank == 0:
            folder = checkpoints.begin(self._folder, number)
            mx.nd.save(str(folder / "weights.params"), {n: p.data() for n, p in parameters.items()})
            trainer.save_states(str(folder / "trainer.states"))
        horovod_mxnet.barrier("checkpoint_begun")
        folder = checkpoints.temporary_folder(self._folder, number)
        (folder / f"input_{self._ranks.rank}.bin").write_bytes(training.checkpoint())
        horovod_mxnet.barrier("checkpoint_written")
        if self._ranks.rank == 0:
            checkpoints.finish(
                self._folder,
                number,
                {
                    "epoch": self.position.epoch,
                    "step_in_epoch": self.position.step_in_epoch,
                    "ranks": self._ranks.size,
                    "log_lengths": self._lengths,
                },
            )
