"""When a run evaluates and keeps a checkpoint: positions in a training, whatever it counts in."""

from dataclasses import dataclass
from typing import Any, Callable


@dataclass(frozen=True)
class Timeline:
    """Positions are steps done, a step is one update; the log counts epochs, and a block ends with an evaluation."""

    steps_per_epoch: int
    epochs: int
    evaluates_after: Callable[[int], bool]  # whether an evaluation follows this position
    # Whether a checkpoint is kept at this position, behind its evaluation if it has one.
    checkpoints_after: Callable[[int], bool]
    epoch_num: Callable[[int], float]  # the log's number of an evaluation at this position
    # An epoch of the log ends behind its last evaluation and is a block; else before it, and blocks hold epochs.
    evaluates_inside_epochs: bool = False
    stops_at_target: bool = True
    # A quality that equals its target does not reach it, as in the submissions of some benchmarks.
    target_is_exceeded: bool = False
    # A quality reaches its target from above: a loss.
    lower_is_better: bool = False
    # Training continues while an evaluator works: a block ends before its evaluation, whose result comes later.
    evaluates_concurrently: bool = False
    training_ranks: int = 0  # ranks that train, where the others have another role; 0: all
    batch_unit: str = "samples"  # unit in which a batch is counted

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
    """Evaluate after the epochs of ``evaluates``, which count from 0, and keep checkpoints at their interval.

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
