"""MLPerf log keys of SSD.

Source: the submitted logs, and the compliance checkers of v0.6 and v0.7 (mlperf-logging, rulesets 0.6.0 and 0.7.0).
``config``: the Config of any framework.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording
from benchmarks.ssd.schedule import base_rate, boundaries

WORDING = Wording("ssd", accuracy_first=True)


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    """Return the values to log before run_start, in this order."""
    return {
        constants.MODEL_BN_SPAN: config.batch_size * config.bn_group,
        constants.GLOBAL_BATCH_SIZE: config.batch_size * ranks,
        constants.OPT_BASE_LR: base_rate(config, ranks),
        constants.OPT_WEIGHT_DECAY: config.weight_decay,
        constants.OPT_LR_WARMUP_STEPS: config.warmup_steps,
        constants.OPT_LR_WARMUP_FACTOR: config.warmup_factor,
        constants.MAX_SAMPLES: 1,  # Attempts to crop an image
    }


def decays(config: Any, ranks: int, steps_per_epoch: int) -> Dict[str, Any]:
    """Return the epochs at which the learning rate drops, as fractions if the boundaries are inside epochs."""
    epochs = [step / steps_per_epoch for step in boundaries(config, ranks, steps_per_epoch)]
    epochs = [int(epoch) if epoch == int(epoch) else round(epoch, 3) for epoch in epochs]
    return {constants.OPT_LR_DECAY_BOUNDARY_EPOCHS: epochs, constants.OPT_LR_DECAY_STEPS: epochs}
