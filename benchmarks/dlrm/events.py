"""The MLPerf log events of DLRM, and its learning rate, which do not depend on the framework.

The keys are those of the v0.7 compliance checker (mlperf-logging, ruleset 0.7.0, dlrm), as in the
submitted logs.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.schedules import decay_factor, warmup_factor
from benchmarks.common.run.timeline import Timeline

WORDING = Wording("dlrm", accuracy_first=True)


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
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


def learning_rate(config: Any, step: int) -> float:
    """Return the learning rate of ``step``, which counts from 0 over the whole run.

    As LearningRateScheduler of NVIDIA's v0.7 submission has it (dlrm/implementations/pytorch/scripts/utils.py).
    """
    if config.decay_steps == 0 or step < config.decay_start_step:
        return float(config.learning_rate * warmup_factor(step, config.warmup_steps))
    factor = decay_factor(step, config.decay_start_step, config.decay_steps, config.decay_power)
    return max(config.end_learning_rate, config.learning_rate * factor)


def timeline(config: Any, steps_per_epoch: int) -> Timeline:
    """Evaluate every ``eval_interval`` steps and after the last one; an epoch holds its evaluations."""
    steps = config.epochs * steps_per_epoch
    interval = config.checkpoint_interval

    def evaluates_after(step: int) -> bool:
        return step % config.eval_interval == 0 or step == steps

    # Counted from 1, with the part of the epoch that is done, as submitted.
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
