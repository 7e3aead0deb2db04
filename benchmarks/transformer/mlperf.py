"""MLPerf log keys of the Transformer, used by all frameworks.

Source: the submitted logs, and the compliance checkers of v0.6 and v0.7 (mlperf-logging, rulesets 0.6.0 and 0.7.0).
``config``: the Config of any framework.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Noted, Wording

WORDING = Wording("transformer", factor=0.01)


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    """Return the values to log before run_start, in this order. The batch size counts token positions."""
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
