"""The learning rate and the MLPerf log events of the Transformer which do not depend on the framework.

The keys are those of the compliance checkers (mlperf-logging, rulesets 0.6.0 and 0.7.0, transformer), as in the
submitted logs.
"""

from dataclasses import replace
from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Noted, Wording
from benchmarks.common.run.timeline import Timeline, by_epochs

WORDING = Wording("transformer", factor=0.01)


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    """Every hyperparameter event of a run, in the order in which it is logged; the batch size counts positions."""
    return {
        constants.GLOBAL_BATCH_SIZE: config.batch_size * ranks,
        constants.OPT_NAME: config.optimizer,
        constants.OPT_BASE_LR: config.learning_rate,
        constants.OPT_LR_WARMUP_STEPS: config.warmup_steps,
        constants.MAX_SEQUENCE_LENGTH: Noted(config.max_length, {"method": "discard"}),
        constants.OPT_ADAM_BETA_1: config.beta1,
        constants.OPT_ADAM_BETA_2: config.beta2,
        constants.OPT_ADAM_EPSILON: config.epsilon,
    }


def timeline(config: Any, steps_per_epoch: int) -> Timeline:
    steps = by_epochs(config, steps_per_epoch, lambda epoch: True, stops_at_target=config.stop_at_target)
    return replace(steps, batch_unit="token positions")


def learning_rate(config: Any, step: int) -> float:
    """Warm up linearly from 0, then decay by the inverse square root of the step (arXiv 1706.03762, equation 3).

    As inverse_sqrt of NVIDIA's submissions has it (fairseq/optim/lr_scheduler/inverse_square_root_schedule.py), which
    counts the updates that are done: the rate of the first step is 0. ``step`` counts from 0 over the whole run.
    """
    warmup_steps = config.warmup_steps
    share = step / warmup_steps if step < warmup_steps else (warmup_steps / step) ** 0.5
    return float(config.learning_rate * share)
