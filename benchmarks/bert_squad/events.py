"""The log events of fine-tuning that do not depend on the framework, by the keys of mlperf-logging that fit."""

from __future__ import annotations

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.timeline import Timeline, by_epochs

WORDING = Wording("bert-squad")


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    """Every hyperparameter event of a run, in the order in which it is logged; the batch size counts windows."""
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


def timeline(config: Any, steps_per_epoch: int) -> Timeline:
    """Evaluate after each ``eval_interval`` epochs and at the end."""

    def evaluates(epoch: int) -> bool:
        return epoch + 1 == config.epochs or (config.eval_interval > 0 and (epoch + 1) % config.eval_interval == 0)

    return by_epochs(config, steps_per_epoch, evaluates, stops_at_target=config.stop_at_target)
