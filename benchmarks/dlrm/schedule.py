"""Learning rate and evaluations of DLRM.

``config``: the Config of any framework.
"""

from typing import Any

from benchmarks.common.run.schedules import decay_factor, warmup_factor
from benchmarks.common.run.timeline import Timeline


def learning_rate(config: Any, step: int) -> float:
    """Return the learning rate of ``step``, counted from 0 over all epochs.

    Linear warm-up, then polynomial decay from ``decay_start_step``, as LearningRateScheduler in NVIDIA's v0.7
    submission (dlrm/implementations/pytorch/scripts/utils.py).
    """
    if config.decay_steps == 0 or step < config.decay_start_step:
        return float(config.learning_rate * warmup_factor(step, config.warmup_steps))
    factor = decay_factor(step, config.decay_start_step, config.decay_steps, config.decay_power)
    return max(config.end_learning_rate, config.learning_rate * factor)


def timeline(config: Any, steps_per_epoch: int) -> Timeline:
    """Evaluate every ``eval_interval`` steps and after the last step. An epoch contains several evaluations."""
    total_steps = config.epochs * steps_per_epoch
    interval = config.checkpoint_interval

    def evaluates_after(step: int) -> bool:
        return step % config.eval_interval == 0 or step == total_steps

    # Counted from 1, with the finished fraction of the epoch, as in the submitted logs
    def epoch_num(step: int) -> float:
        epoch = (step - 1) // steps_per_epoch
        return 1 + epoch + (step - epoch * steps_per_epoch) / steps_per_epoch

    return Timeline(
        steps_per_epoch=steps_per_epoch,
        epochs=config.epochs,
        evaluates_after=evaluates_after,
        checkpoints_after=lambda step: (
            interval > 0 and evaluates_after(step) and step // config.eval_interval % interval == 0
        ),
        epoch_num=epoch_num,
        evaluates_inside_epochs=True,
        target_is_exceeded=True,  # dist_train.py, v0.7
    )
