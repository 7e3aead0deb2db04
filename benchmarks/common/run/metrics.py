"""The metrics stream: one JSON object a line, written by rank 0, read by whoever follows the run.

Its kinds of record are in benchmarks/common/records.py; each has ``time``, in Unix seconds.
"""

import json
import math
import os
import re
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, TypeVar

from benchmarks.common.records import Epoch, Record, Step, plain
from benchmarks.common.run.ranks import Lines, Ranks

T = TypeVar("T")

# Variables that the frameworks and their libraries read, whoever set them: the image, its start, Encore or the user.
# Not the variables by which a launcher distinguishes ranks, and no secret.
READ_BY = re.compile(
    r"(CUBLAS|CUDA|CUDNN|DALI|HCOLL|KMP|MKL|MXNET|NCCL|NHWC|NVIDIA_TF32|OMP|OPENCV|PYTORCH|TF|TORCH|TRITON|UCX|XLA)_"
    r"|OMPI_MCA_(btl|coll|pml)|HOROVOD_(?!(RANK|SIZE|LOCAL|CROSS|HOSTNAME|GLOO|RENDEZVOUS|SECRET))"
)
SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH")


def library_environment() -> Dict[str, str]:
    """Return what this rank sees of the variables that change how the libraries compute and communicate."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if READ_BY.match(name) and not SECRET.search(name) and "@" not in value
    }


class MetricsStream:
    """Appends records to ``path`` on rank 0 and does nothing on any other rank."""

    def __init__(self, path: Path, rank: int) -> None:
        self._lines = Lines(path, rank)

    def write(self, record: Record, **figures: float) -> None:
        line = {"kind": record.kind, "time": round(time.time(), 3), **plain(record), **figures}
        self._lines.write(json.dumps(line))


class StepReports:
    """Losses of the steps and the speed of each part of the training, and the ranks' agreement to stop.

    ``sums`` is a framework's LaggedSums, ``input_wait`` what its ``input_wait`` returns, ``log_interval`` in steps,
    ``global_batch_size`` in samples of all ranks.
    """

    def __init__(
        self,
        metrics: MetricsStream,
        sums: Any,
        input_wait: Any,
        ranks: Ranks,
        global_batch_size: int,
        steps_per_epoch: int,
        log_interval: int,
        losses: Sequence[float] = (),
    ) -> None:
        """Continue with the ``losses`` of steps that are reported and not in a record yet."""
        self._metrics, self._sums, self._input_wait, self._ranks = metrics, sums, input_wait, ranks.size
        self._global_batch_size, self._steps_per_epoch = global_batch_size, steps_per_epoch
        self._log_interval = log_interval
        self._pending: List[Tuple[range, float]] = []
        self.losses = list(losses)
        self.start()

    def start(self) -> None:
        self._input_wait.take()
        self._samples, self._since = 0, time.time()
        self._stages: Dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.time()
        yield
        self._stages[name] = self._stages.get(name, 0.0) + time.time() - started

    def wait_for(self, call: Callable[[], T]) -> T:
        return self._input_wait.fetch(call)

    def input_share(self) -> float:
        """Return the share of the time since ``start`` in which the device waited for its next batch."""
        return self._input_wait.take() / max(time.time() - self._since, 1e-9)

    def add(self, steps: range, loss: Any, stop: bool, learning_rate: Any, samples: Optional[int] = None) -> bool:
        """Report ``steps`` with their mean loss; True when all ranks know that one of them was asked to stop.

        ``loss`` is the mean over this rank's samples, still on the device; ``samples`` are those of all ranks,
        by default one global batch. ``learning_rate`` is a number, or a tensor on the device.
        """
        scalars = () if isinstance(learning_rate, (int, float)) else (learning_rate,)
        self._pending.append((steps, 0.0 if scalars else learning_rate))
        self._samples += self._global_batch_size if samples is None else samples
        sums = self._sums.send(loss, stop, *scalars)
        return sums is not None and self._receive(sums)

    def end(self, epoch: int) -> bool:
        """Wait for the reports in flight and write the speed since ``start``; return as ``add``.

        ``epoch`` counts from 0.
        """
        stops = [self._receive(sums) for sums in self._sums.drain()]
        seconds = max(time.time() - self._since, 1e-9)
        speed = round(self._samples / seconds, 2)
        stages = {name: round(seconds_spent, 4) for name, seconds_spent in self._stages.items()}
        self._metrics.write(Epoch(epoch + 1, speed, round(self.input_share(), 4), stages))
        return any(stops)

    def _receive(self, sums: List[float]) -> bool:
        steps, rate = self._pending.pop(0)
        done = steps.stop
        loss = sums[0] / self._ranks
        if len(sums) > 2:
            rate = float(f"{sums[2] / self._ranks:.6g}")
        if not math.isfinite(loss):
            # All ranks read the same sum, so all of them end here.
            raise SystemExit(
                f"the loss is not finite at step {done}: found {loss}\n"
                "  hint: start a new run with a lower learning_rate, or a lower loss_scale with precision=fp16"
            )
        self.losses.append(loss)
        interval = self._log_interval
        if done // interval > steps.start // interval or done % self._steps_per_epoch == 0:
            mean = sum(self.losses) / len(self.losses)
            self._metrics.write(Step(steps.start // self._steps_per_epoch + 1, done, mean, rate))
            self.losses = []
        return sums[1] > 0
