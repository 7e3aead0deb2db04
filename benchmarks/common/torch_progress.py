"""Where a PyTorch run stands: step reports without waiting, checkpoints, and an exact return to them.

A checkpoint holds what rank 0 gives for all (weights, optimizer), what each rank gives for itself (its share of
a split model, its place in the input) and the random number generators of each rank.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, TypeVar

import torch

from benchmarks.common import checkpoints, torch_ranks
from benchmarks.common.checkpoints import Position
from benchmarks.common.metrics import MetricsStream
from benchmarks.common.ranks import Ranks

T = TypeVar("T")


class StepReports:
    """Losses of the steps and the speed of the epochs for the metrics stream, and the agreement to stop.

    ``global_batch_size`` is in samples of all ranks, ``log_interval`` in steps.
    """

    def __init__(
        self,
        metrics: MetricsStream,
        ranks: Ranks,
        global_batch_size: int,
        steps_per_epoch: int,
        log_interval: int,
    ) -> None:
        self._metrics = metrics
        self._ranks = ranks
        self._global_batch_size = global_batch_size
        self._steps_per_epoch = steps_per_epoch
        self._log_interval = log_interval
        self._sums = torch_ranks.LaggedSums()
        self._pending: List[Tuple[int, float]] = []
        self._losses: List[float] = []
        self._no_vote = torch.zeros(1, device=ranks.context)
        self._vote = torch.ones(1, device=ranks.context)
        self._samples = 0
        self._input_seconds = 0.0
        self._since = time.time()

    def start_epoch(self) -> None:
        """Start the clock of the speed."""
        self._samples, self._input_seconds, self._since = 0, 0.0, time.time()

    def timed(self, call: Callable[[], T]) -> T:
        """Call, and count the time as waiting for input."""
        started = time.time()
        result = call()
        self._input_seconds += time.time() - started
        return result

    def add(
        self, step: int, loss: torch.Tensor, stop: bool, learning_rate: float, samples: Optional[int] = None
    ) -> bool:
        """Report one step with its mean loss; True when all ranks know that one of them was asked to stop.

        Several steps may be reported as one, with the number of their ``samples`` (of all ranks).
        """
        self._pending.append((step, learning_rate))
        self._samples += self._global_batch_size if samples is None else samples
        vote = self._vote if stop else self._no_vote
        sums = self._sums.send(torch.cat((loss.detach().float().reshape(1), vote)))
        return sums is not None and self._receive(sums)

    def end_epoch(self, epoch: int) -> None:
        """Wait for the reports under way and write the speed of the epoch (counted from 0)."""
        for sums in self._sums.drain():
            self._receive(sums)
        seconds = max(time.time() - self._since, 1e-9)
        self._metrics.write(
            "epoch",
            epoch=epoch + 1,
            samples_per_second=round(self._samples / seconds, 2),
            input_share=round(self._input_seconds / seconds, 4),
        )

    def _receive(self, sums: List[float]) -> bool:
        step, learning_rate = self._pending.pop(0)
        self._losses.append(sums[0] / self._ranks.size)
        if (step + 1) % self._log_interval == 0:
            self._metrics.write(
                "step",
                epoch=step // self._steps_per_epoch + 1,
                step=step + 1,
                loss=round(sum(self._losses) / len(self._losses), 6),
                learning_rate=learning_rate,
            )
            self._losses.clear()
        return sums[1] > 0


class Progress:
    """The place in the run, and its checkpoints in ``output``/checkpoint.

    ``position`` is what the loop does next. Call on all ranks together, but for ``mark_log``.
    """

    def __init__(self, output: Path, ranks: Ranks) -> None:
        self._folder = output / "checkpoint"
        self._logs = (output / "result.txt", output / "metrics.jsonl")
        self._lengths = [0 for _ in self._logs]
        self._ranks = ranks
        self._checkpoint: Optional[Path] = None
        self.position = Position(0, 0)
        self.steps_per_epoch = 0

    def find_checkpoint(self) -> bool:
        """Look for a checkpoint; if there is one, cut the logs back to where they were at that moment."""
        self._checkpoint = checkpoints.latest(self._folder)
        # No rank may look later than rank 0 starts to write a new one.
        torch_ranks.barrier()
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

    def load(self) -> Tuple[Dict[str, Any], Dict[str, Any]]:
        """What ``save`` was given: ``shared`` and this rank's ``own``, on the CPU; sets the generators back."""
        if self._checkpoint is None:
            raise RuntimeError("there is no checkpoint to load")
        shared: Dict[str, Any] = torch.load(str(self._checkpoint / "shared.pt"), map_location="cpu")
        own: Dict[str, Any] = torch.load(
            str(self._checkpoint / f"rank_{self._ranks.rank}.pt"), map_location="cpu"
        )
        set_random_state(own.pop("random"), self._ranks.context)
        return shared, own

    def mark_log(self) -> None:
        """Remember the logs' lengths now: what comes later is logged again after a resume."""
        if self._ranks.rank == 0:
            self._lengths = [path.stat().st_size for path in self._logs]

    def save(self, shared: Callable[[], Mapping[str, Any]], own: Mapping[str, Any]) -> None:
        """Write a checkpoint of ``position``; returns when it is whole. ``shared`` is called on rank 0 alone."""
        number = self.position.step(self.steps_per_epoch)
        if self._ranks.rank == 0:
            folder = checkpoints.begin(self._folder, number)
            torch.save(dict(shared()), str(folder / "shared.pt"))
        torch_ranks.barrier()
        folder = checkpoints.temporary_folder(self._folder, number)
        content = {**own, "random": random_state(self._ranks.context)}
        torch.save(content, str(folder / f"rank_{self._ranks.rank}.pt"))
        torch_ranks.barrier()
        if self._ranks.rank == 0:
            state = {
                "epoch": self.position.epoch,
                "step_in_epoch": self.position.step_in_epoch,
                "ranks": self._ranks.size,
                "log_lengths": self._lengths,
            }
            checkpoints.finish(self._folder, number, state)
        torch_ranks.barrier()


def random_state(device: torch.device) -> Dict[str, Any]:
    """State of Python's and PyTorch's generators of this rank."""
    state: Dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Go back to what ``random_state`` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
