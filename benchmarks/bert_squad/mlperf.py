"""Log keys of fine-tuning on SQuAD, used by all frameworks: keys of mlperf-logging where one fits.

``config``: the Config of any framework.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording

WORDING = Wording("bert-squad")


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    """Return the values to log before run_start, in this order. The batch size counts windows."""
    return {
        constants.GLOBAL_BATCH_SIZE: config.batch_size * ranks,
        constants.MAX_SEQUENCE_LENGTH: config.sequence_length,
        constants.OPT_NAME: config.optimizer,
        constants.OPT_BASE_LR: config.learning_rate,
        constants.OPT_ADAM_BETA_1: config.beta1,
        constants.OPT_ADAM_BETA_2: config.beta2,
        constants.OPT_ADAM_EPSILON: config.epsilon,
        constants.OPT_WEIGHT_DECAY: config.weight_decay,
    }
