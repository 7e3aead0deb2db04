"""The learning rate and the log events of fine-tuning, by the keys of mlperf-logging that fit, in every framework."""

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
    # Evaluate after each ``eval_interval`` epochs and at the end.

    def evaluates(epoch: int) -> bool:
        return epoch + 1 == config.epochs or (config.eval_interval > 0 and (epoch + 1) % config.eval_interval == 0)

    return by_epochs(config, steps_per_epoch, evaluates, stops_at_target=config.stop_at_target)


def learning_rate(config: Any, step: int, steps: int) -> float:
    """Warm up linearly from 0 in a share of all ``steps``, then decay linearly to 0.

    LinearWarmUpScheduler of DeepLearningExamples (schedulers.py), which moves before it is asked: the first step has
    the rate of progress 1 / steps, the last one 0. ``step`` counts from 0 over the whole run.
    """
    progress, warmup = (step + 1) / steps, config.warmup_fraction
    share = progress / warmup if progress < warmup else max(0.0, (1 - progress) / (1 - warmup))
    return float(config.learning_rate * share)
