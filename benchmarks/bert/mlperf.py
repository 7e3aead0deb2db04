"""MLPerf log keys of BERT pretraining, used by all frameworks.

Source: NVIDIA's submitted logs, and the compliance checker of v0.7 (mlperf-logging, ruleset 0.7.0, bert). A run is one
epoch and one block; train_samples, logged at its end, is the number of samples trained on. ``config``: the Config of
any framework.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording

WORDING = Wording("bert", accuracy_first=True)


def hyperparameters(config: Any, ranks: int, max_predictions: int) -> Dict[str, Any]:
    """Return the values to log before run_start, in this order."""
    return {
        constants.GLOBAL_BATCH_SIZE: config.batch_size * ranks,
        "opt_gradient_accumulation_steps": config.accumulation,
        "max_predictions_per_seq": max_predictions,
        "opt_learning_rate_training_steps": config.max_steps,
        "num_warmup_steps": config.warmup_steps,
        constants.OPT_NAME: config.optimizer,
        constants.OPT_BASE_LR: config.learning_rate,
        "opt_epsilon": config.epsilon,
        "opt_lamb_beta_1": config.beta1,
        "opt_lamb_beta_2": config.beta2,
        "opt_lamb_weight_decay_rate": config.weight_decay,
        constants.OPT_LR_WARMUP_STEPS: config.warmup_steps,
        "opt_lamb_learning_rate_decay_poly_power": config.decay_power,
        "start_warmup_step": config.start_warmup_step,
    }
