"""MLPerf log keys of GNMT, used by all frameworks.

Source: the submitted logs, and the compliance checkers of v0.6 and v0.7 (mlperf-logging, rulesets 0.6.0 and 0.7.0).
``config``: the Config of any framework.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Noted, Wording

WORDING = Wording(
    "gnmt",
    accuracy_first=True,
    factor=0.01,
    v05_keys={constants.MAX_SEQUENCE_LENGTH: ("train_hp_max_sequence_length",)},
)


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    """Return the values to log before run_start, in this order."""
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
