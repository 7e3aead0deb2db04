"""Metrics stream: one JSON object per line, written by rank 0.

benchmarks/common/records.py defines the records; each also has ``time`` in Unix seconds.
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

# Variables that frameworks and libraries read, set by the image, its entrypoint, Encore or the user. Excluded: secrets,
# and variables that differ between ranks.
READ_BY = re.compile(
    r"(CUBLAS|CUDA|CUDNN|DALI|HCOLL|KMP|MKL|MXNET|NCCL|NHWC|NVIDIA_TF32|OMP|OPENCV|PYTORCH|TF|TORCH|TRITON|UCX|XLA)_"
    r"|OMPI_MCA_(btl|coll|pml)|HOROVOD_(?!(RANK|SIZE|LOCAL|CROSS|HOSTNAME|GLOO|RENDEZVOUS|SECRET))"
)
SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH")


def library_environment() -> Dict[str, str]:
    """Return this rank's variables that change computation or communication of the libraries."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if READ_BY.match(name) and not SECRET.search(name) and "@" not in value
    }


class MetricsStream:
    """Append records to ``path`` on rank 0; a no-op on other ranks."""

    def __init__(self, path: Path, rank: int) -> None:
        self._lines = Lines(path, rank)

    def write(self, record: Record, **figures: float) -> None:
        line = {"kind": record.kind, "time": round(time.time(), 3), **plain(record), **figures}
        self._lines.write(json.dumps(line))


class StepReports:
    """Step losses, throughput, and the ranks' agreement to stop.

    ``sums``: LaggedSums of the framework; ``input_wait``: result of its ``input_wait``; ``log_interval``: steps;
    ``global_batch_size``: samples of all ranks.
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
        """Return the fraction of the time since ``start`` in which the device waited for data."""
        return self._input_wait.take() / max(time.time() - self._since, 1e-9)

    def add(self, steps: range, loss: Any, stop: bool, learning_rate: Any, samples: Optional[int] = None) -> bool:
        """Report ``steps`` with their mean loss; return True once all ranks know about a stop request.

        ``loss``: mean over this rank's samples, on the device. ``samples``: of all ranks, default one global batch.
        ``learning_rate``: a number, or a tensor on the device.
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
            # All ranks read the same sum, so all exit here.
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
