"""MLPerf log keys of DLRM.

Source: the submitted logs, and the compliance checker of v0.7 (mlperf-logging, ruleset 0.7.0). ``config``: the Config
of any framework.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording

WORDING = Wording("dlrm", accuracy_first=True)


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    """Return the values to log before run_start, in this order."""
    return {
        constants.GLOBAL_BATCH_SIZE: config.batch_size * ranks,
        constants.OPT_NAME: config.optimizer,
        constants.OPT_BASE_LR: config.learning_rate,
        "opt_learning_rate_warmup_steps": config.warmup_steps,
        "sgd_opt_base_learning_rate": config.learning_rate,
        "lr_decay_start_steps": config.decay_start_step,
        "sgd_opt_learning_rate_decay_steps": config.decay_steps,
        "sgd_opt_learning_rate_decay_poly_power": config.decay_power,
    }
