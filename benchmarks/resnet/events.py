"""The MLPerf log events of ResNet, and its learning rate, which do not depend on the framework.

The keys are those which the compliance checkers of v0.6 and v0.7 ask for (mlperf-logging, rulesets 0.6.0
and 0.7.0), as in the submitted logs. ``config`` is any implementation's Config.
"""

from dataclasses import replace
from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run import schedules
from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.timeline import Timeline, by_epochs

WORDING = Wording(
    "resnet",
    v05_keys={
        "sgd_opt_base_learning_rate": (),
        "sgd_opt_momentum": ("opt_momentum",),
        "sgd_opt_weight_decay": ("model_l2_regularization",),
    },
)


def initialization(config: Any) -> Dict[str, Any]:
    """Return the events that are logged as the model is built."""
    return {constants.MODEL_BN_SPAN: config.batch_size // config.accumulation_steps}


def hyperparameters(config: Any, ranks: int, steps_per_epoch: int) -> Dict[str, Any]:
    prefix = f"{config.optimizer}_opt"
    events = {
        constants.GLOBAL_BATCH_SIZE: config.batch_size * ranks,
        constants.OPT_NAME: config.optimizer,
        constants.OPT_BASE_LR: config.learning_rate,
        constants.OPT_LR_WARMUP_EPOCHS: config.warmup_epochs,
    }
    if config.schedule == "step":
        events["opt_learning_rate_decay_boundary_epochs"] = list(config.decay_epochs)
    events[f"{prefix}_base_learning_rate"] = config.learning_rate
    events[f"{prefix}_end_learning_rate"] = config.end_learning_rate
    events[f"{prefix}_learning_rate_decay_poly_power"] = 2
    events[f"{prefix}_learning_rate_decay_steps"] = config.epochs * steps_per_epoch
    events[f"{prefix}_momentum"] = config.momentum
    events[f"{prefix}_weight_decay"] = config.weight_decay
    if config.optimizer == "lars":
        events["lars_epsilon"] = config.lars_epsilon
        events["lars_opt_learning_rate_warmup_epochs"] = config.warmup_epochs
    return events


def learning_rate(config: Any, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of ``step``, which counts from 0 over the whole run, by config.schedule."""
    base, warmup = config.learning_rate, int(config.warmup_epochs * steps_per_epoch)
    if config.schedule == "pow2":
        end, total = config.end_learning_rate, config.epochs * steps_per_epoch
        return schedules.polynomial(step, base=base, end=end, warmup_steps=warmup, total_steps=total, power=2.0)
    drops = [epoch * steps_per_epoch for epoch in config.decay_epochs]
    return schedules.stepwise(step, base=base, factor=config.decay_factor, warmup_steps=warmup, boundaries=drops)


def timeline(config: Any, steps_per_epoch: int) -> Timeline:
    """Evaluate at the submitted epochs, which count from 0 here, and after the last one."""

    def evaluates(epoch: int) -> bool:
        return epoch % config.eval_period == config.eval_offset or epoch == config.epochs - 1

    # acc > accuracy_threshold: common/fit.py in MXNet, v0.5 to v0.7; of v4.0, one of two folders has >=.
    return replace(by_epochs(config, steps_per_epoch, evaluates), target_is_exceeded=True)
