"""The learning rate and the MLPerf log events of GNMT which do not depend on the framework.

The keys are those of the compliance checker (mlperf-logging, rulesets 0.6.0 and 0.7.0, gnmt), as in the submitted
logs.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Noted, Wording
from benchmarks.common.run.timeline import Timeline, by_epochs

FIRST = 0.01  # share of the base learning rate with which the warm-up starts

WORDING = Wording(
    "gnmt",
    accuracy_first=True,
    factor=0.01,
    v05_keys={constants.MAX_SEQUENCE_LENGTH: ("train_hp_max_sequence_length",)},
)


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    # Every hyperparameter event of a run, in the order in which it is logged.
    return {
        constants.OPT_NAME: config.optimizer,
        constants.OPT_BASE_LR: config.learning_rate,
        constants.OPT_ADAM_BETA_1: config.beta1,
        constants.OPT_ADAM_BETA_2: config.beta2,
        constants.OPT_ADAM_EPSILON: config.epsilon,
        constants.MAX_SEQUENCE_LENGTH: Noted(config.max_length_train, {"method": "discard"}),
        constants.GLOBAL_BATCH_SIZE: config.batch_size * ranks,
        constants.OPT_LR_ALT_DECAY_FUNC: True,
        constants.OPT_LR_ALT_WARMUP_FUNC: True,
        constants.OPT_LR_DECAY_INTERVAL: config.decay_interval,
        constants.OPT_LR_DECAY_FACTOR: config.decay_factor,
        constants.OPT_LR_DECAY_STEPS: config.decay_steps,
        constants.OPT_LR_REMAIN_STEPS: config.remain_steps,
        constants.OPT_LR_WARMUP_STEPS: config.warmup_steps,
    }


def timeline(config: Any, steps_per_epoch: int) -> Timeline:
    return by_epochs(config, steps_per_epoch, lambda epoch: True, stops_at_target=config.stop_at_target)


def learning_rate(config: Any, step: int) -> float:
    """Warm up exponentially, stay, and from ``remain_steps`` on decay at each interval, ``decay_steps`` times at most.

    As WarmupMultiStepLR of NVIDIA's submissions has it (gnmt/implementations/pytorch/seq2seq/train/lr_scheduler.py),
    which counts the step that it is about to make from 1; ``step`` counts from 0 over the whole run.
    """
    number = step + 1
    warmup_steps = min(config.warmup_steps, config.remain_steps)
    if number <= warmup_steps:
        return float(config.learning_rate * FIRST ** ((warmup_steps - number) / warmup_steps))
    if number < config.remain_steps:
        return float(config.learning_rate)
    decays = min((number - config.remain_steps) // config.decay_interval + 1, config.decay_steps)
    return float(config.learning_rate * config.decay_factor**decays)
