"""MLPerf log keys of pretraining Llama 3.1 8B and gpt-oss-20b, used by all frameworks.

Source: the submitted logs of v5.1, and the compliance checker (mlperf-logging 4.1.68, training_5.1.0 to training_6.1.0,
llama31_8b and gpt_oss_20b). A run is one epoch and one block; evaluations are counted in samples. ``config``: the
Config of any framework.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording


def wording(benchmark: str) -> Wording:
    return Wording(benchmark, accuracy_first=True, evaluated_at=constants.SAMPLES_COUNT)


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    """Return the values to log before run_start, in this order."""
    return {
        constants.GLOBAL_BATCH_SIZE: config.global_batch(ranks),
        constants.GRADIENT_ACCUMULATION_STEPS: config.accumulation,
        constants.MAX_SEQUENCE_LENGTH: config.sequence_length,
        constants.OPT_NAME: config.optimizer,
        constants.OPT_BASE_LR: config.learning_rate,
        constants.OPT_ADAMW_BETA_1: config.beta1,
        constants.OPT_ADAMW_BETA_2: config.beta2,
        constants.OPT_ADAMW_EPSILON: config.epsilon,
        constants.OPT_ADAMW_WEIGHT_DECAY: config.weight_decay,
        constants.OPT_GRADIENT_CLIP_NORM: config.gradient_clip,
        constants.OPT_END_LR: config.end_learning_rate,
        constants.OPT_LR_WARMUP_STEPS: config.warmup_steps,
        constants.OPT_LR_DECAY_STEPS: config.max_steps - config.warmup_steps,
        "max_steps": config.max_steps,
        constants.OPT_LR_DECAY_SCHEDULE: "cosine with linear warmup",
    }
