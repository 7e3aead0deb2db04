"""MLPerf log keys of Llama 2 70B LoRA, used by all frameworks.

Source: the submitted logs of v4.0 to v5.1, and the compliance checker (mlperf-logging 4.1.68, training_4.0.0 to
training_6.1.0, llama2_70b_lora). Evaluations are counted in samples. ``config``: the Config of any framework.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording

WORDING = Wording("llama2_70b_lora", accuracy_first=True, evaluated_at=constants.SAMPLES_COUNT)


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    """Return the values to log before run_start, in this order."""
    return {
        constants.GLOBAL_BATCH_SIZE: config.global_batch(ranks),
        constants.GRADIENT_ACCUMULATION_STEPS: config.accumulation,
        constants.OPT_NAME: config.optimizer,
        constants.OPT_BASE_LR: config.learning_rate,
        constants.OPT_ADAMW_WEIGHT_DECAY: config.weight_decay,
        constants.OPT_GRADIENT_CLIP_NORM: config.gradient_clip,
        constants.OPT_LR_WARMUP_FACTOR: config.warmup_steps / config.max_steps,
        constants.OPT_LR_TRAINING_STEPS: config.max_steps,
        "lora_rank": config.lora_rank,
        constants.LORA_ALPHA: config.lora_alpha,
    }
