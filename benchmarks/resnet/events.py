"""The MLPerf log events of ResNet that do not depend on the framework.

The keys are those which the compliance checkers of v0.6 and v0.7 ask for (mlperf-logging, rulesets 0.6.0
and 0.7.0), as they stand in the submitted logs. ``config`` is any implementation's Config.
"""

from __future__ import annotations

from typing import Any, Dict

from mlperf_logging.mllog import constants


def hyperparameters(config: Any, ranks: int, steps_per_epoch: int) -> Dict[str, Any]:
    """Every hyperparameter event of a run, in the order in which it is logged."""
    warmup = config.warmup_epochs
    events = {
        constants.GLOBAL_BATCH_SIZE: config.batch_size * ranks,
        constants.OPT_NAME: config.optimizer,
        constants.OPT_BASE_LR: config.learning_rate,
        constants.OPT_LR_WARMUP_EPOCHS: warmup,
    }
    if config.schedule == "step":
        events["opt_learning_rate_decay_boundary_epochs"] = list(config.decay_epochs)
    prefix = f"{config.optimizer}_opt"
    events.update(
        {
            f"{prefix}_base_learning_rate": config.learning_rate,
            f"{prefix}_end_learning_rate": config.end_learning_rate,
            f"{prefix}_learning_rate_decay_poly_power": 2,
            f"{prefix}_learning_rate_decay_steps": config.epochs * steps_per_epoch,
            f"{prefix}_momentum": config.momentum,
            f"{prefix}_weight_decay": config.weight_decay,
        }
    )
    if config.optimizer == "lars":
        events["lars_epsilon"] = config.lars_epsilon
        events["lars_opt_learning_rate_warmup_epochs"] = warmup
    return events


def evaluates_after(epoch: int, config: Any) -> bool:
    """Whether the run evaluates after ``epoch`` (counted from 0); it always does after the last."""
    return epoch % config.eval_period == config.eval_offset or epoch == config.epochs - 1


def starts_block(epoch: int, config: Any) -> bool:
    """Whether a block of epochs, which ends in an evaluation, starts at ``epoch`` (counted from 0)."""
    return epoch == 0 or evaluates_after(epoch - 1, config)


def block_length(epoch: int, config: Any) -> int:
    """Epochs in the block that starts at ``epoch``."""
    last = epoch
    while not evaluates_after(last, config):
        last += 1
    return last - epoch + 1
