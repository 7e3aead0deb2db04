"""Positions in a training at which a run evaluates and writes checkpoints."""

from dataclasses import dataclass
from typing import Any, Callable


@dataclass(frozen=True)
class Timeline:
    """A position is a number of completed steps (updates). The log counts epochs; a block ends with an evaluation."""

    steps_per_epoch: int
    epochs: int
    evaluates_after: Callable[[int], bool]  # whether an evaluation follows this position
    # Whether a checkpoint is written at this position, after its evaluation, if any
    checkpoints_after: Callable[[int], bool]
    epoch_num: Callable[[int], float]  # epoch number in the log for an evaluation at this position
    # Each epoch in the log is a block that ends after its last evaluation. Otherwise blocks contain whole epochs, and
    # an epoch ends before the evaluation.
    evaluates_inside_epochs: bool = False
    stops_at_target: bool = True
    # The target must be exceeded, as in the submissions of some benchmarks.
    target_is_exceeded: bool = False
    # The quality is a loss.
    lower_is_better: bool = False
    # Training continues during an evaluation: a block ends before its evaluation, whose result arrives later.
    evaluates_concurrently: bool = False
    data_parallel_ranks: int = 0  # ranks, or groups of ranks, with a batch of their own; 0: all ranks
    batch_unit: str = "samples"  # unit of the batch size

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def block_epochs(self, epoch: int) -> int:
        if self.evaluates_inside_epochs:
            return 1
        last = epoch
        while last + 1 < self.epochs and not self.evaluates_after((last + 1) * self.steps_per_epoch):
            last += 1
        return last - epoch + 1

    def first_of_block(self, epoch: int) -> int:
        first = epoch
        while first > 0 and not self.evaluates_after(first * self.steps_per_epoch):
            first -= 1
        return first


def by_epochs(
    config: Any,
    steps_per_epoch: int,
    evaluates: Callable[[int], bool],
    stops_at_target: bool = True,
    evaluates_concurrently: bool = False,
) -> Timeline:
    """Evaluate after the epochs selected by ``evaluates``, from 0, and write checkpoints at their interval.

    ``config`` has epochs and checkpoint_interval; the log counts epochs from 1.
    """
    interval = config.checkpoint_interval

    def after(rule: Callable[[int], bool]) -> Callable[[int], bool]:
        return lambda step: step % steps_per_epoch == 0 and rule(step // steps_per_epoch - 1)

    return Timeline(
        steps_per_epoch=steps_per_epoch,
        epochs=config.epochs,
        evaluates_after=after(evaluates),
        checkpoints_after=after(lambda epoch: interval > 0 and (epoch + 1) % interval == 0),
        epoch_num=lambda step: step // steps_per_epoch,
        stops_at_target=stops_at_target,
        evaluates_concurrently=evaluates_concurrently,
    )
