"""The learning rates and the MLPerf log events of Mask R-CNN, which do not depend on the framework.

The keys are those of the compliance checker (mlperf-logging, rulesets 0.6.0 and 0.7.0, maskrcnn), as in the submitted
logs.
"""

from bisect import bisect_right
from typing import Any, Dict, NamedTuple

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.timeline import Timeline, by_epochs

# The names as in the logs' eval_accuracy, which the checker compares with the targets
WORDING = Wording("maskrcnn", accuracy_first=True, names={"box_ap": "BBOX", "mask_ap": "SEGM"})
BIAS_FACTOR = 2.0  # factor on the base value for biases (SOLVER.BIAS_LR_FACTOR)


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    return {
        constants.GLOBAL_BATCH_SIZE: config.batch_size * ranks,
        constants.NUM_IMAGE_CANDIDATES: config.rpn_post_nms_top_n,
        constants.OPT_NAME: "sgd_with_momentum",
        constants.OPT_BASE_LR: config.learning_rate,
        constants.OPT_LR_WARMUP_STEPS: config.warmup_steps,
        constants.OPT_LR_WARMUP_FACTOR: config.warmup_factor,
        constants.OPT_LR_DECAY_FACTOR: config.decay_factor,
        constants.OPT_LR_DECAY_STEPS: list(config.decay_steps),
        constants.MIN_IMAGE_SIZE: config.short_side,
        constants.MAX_IMAGE_SIZE: config.long_side,
    }


def timeline(config: Any, steps_per_epoch: int) -> Timeline:
    """Evaluate after each epoch; the log counts epochs from 1."""
    return by_epochs(
        config,
        steps_per_epoch,
        lambda epoch: True,
        stops_at_target=config.stop_at_target,
        evaluates_concurrently=config.concurrent_evaluation,
    )


# -- the learning rates -----------------------------------------------------------------------------------


class Rates(NamedTuple):
    weights: float
    biases: float


def rates(config: Any, step: int) -> Rates:
    """Return the rates of ``step``, which counts from 0 over the run; see ``learning_rate``."""
    base = float(config.learning_rate)
    return Rates(learning_rate(config, step, base), learning_rate(config, step, BIAS_FACTOR * base))


def learning_rate(config: Any, step: int, base: float) -> float:
    """Rise by ``warmup_factor`` a step to ``base``, then multiply by ``decay_factor`` at each of decay_steps.

    As WarmupMultiStepLR with the method "mlperf_linear" of NVIDIA's submissions has it
    (maskrcnn/implementations/pytorch/maskrcnn_benchmark/solver/lr_scheduler.py; v0.5: utils/lr_scheduler.py). What is
    left of the warm-up is subtracted from each base value, not a share of it: biases begin at half of theirs where
    weights begin at 0. With ``warmup_factor`` 0 the warm-up is linear from a third of the base value, as
    maskrcnn_benchmark's own "linear".
    """
    left = max(0, config.warmup_steps - step)
    if config.warmup_factor > 0:
        base -= left * config.warmup_factor
    elif left:
        base *= 1 - left / config.warmup_steps * 2 / 3
    return float(base * config.decay_factor ** bisect_right(config.decay_steps, step))
