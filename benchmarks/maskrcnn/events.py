"""The MLPerf log events of Mask R-CNN that do not depend on the framework.

The keys are those of the compliance checker (mlperf-logging, rulesets 0.6.0 and 0.7.0, maskrcnn), as in the submitted
logs.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.timeline import Timeline, by_epochs

# The names as in the logs' eval_accuracy, which the checker compares with the targets
WORDING = Wording("maskrcnn", accuracy_first=True, names={"box_ap": "BBOX", "mask_ap": "SEGM"})


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
