"""The MLPerf log events of DLRM that do not depend on the framework.

The keys are those of the v0.7 compliance checker (mlperf-logging, ruleset 0.7.0, dlrm), as they stand in the
submitted logs.
"""

from __future__ import annotations

from typing import Any, Dict

from mlperf_logging.mllog import constants


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    """Every hyperparameter event of a run, in the order in which it is logged."""
    return {
        constants.GLOBAL_BATCH_SIZE: config.batch_size * ranks,
        constants.OPT_NAME: config.optimizer,
        constants.OPT_BASE_LR: config.learning_rate,
        "opt_learning_rate_warmup_steps": config.warmup_steps,
        "sgd_opt_base_learning_rate": config.learning_rate,
        "lr_decay_start_steps": config.decay_start_step,
        "sgd_opt_learning_rate_decay_steps": config.decay_steps,
        "sgd_opt_learning_rate_decay_poly_power": config.decay_power,
    }


def epoch_number(epoch: int, step_in_epoch: int, steps_per_epoch: int) -> float:
    """``epoch_num`` of an evaluation: counted from 1, with the part of the epoch that is done, as submitted."""
    return 1 + epoch + step_in_epoch / steps_per_epoch


def evaluates_after(step: int, step_in_epoch: int, steps_per_epoch: int, config: Any) -> bool:
    """Whether the run evaluates after ``step`` (counted from 1 over the run), which ends ``step_in_epoch``."""
    return step % config.eval_interval == 0 or (
        step_in_epoch == steps_per_epoch and step == config.epochs * steps_per_epoch
    )
