"""MLPerf log keys of Mask R-CNN.

Source: the submitted logs, and the compliance checkers of v0.6 and v0.7 (mlperf-logging, rulesets 0.6.0 and 0.7.0).
``config``: the Config of any framework.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording

# Names in eval_accuracy, which the checker compares with the targets
WORDING = Wording("maskrcnn", accuracy_first=True, names={"box_ap": "BBOX", "mask_ap": "SEGM"})


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    """Return the values to log before run_start, in this order."""
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
