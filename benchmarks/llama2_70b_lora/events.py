"""The MLPerf log events of Llama 2 70B's fine-tuning which do not depend on the framework.

The keys are those of the compliance checker (mlperf-logging 4.1.68, training_4.0.0 to training_6.1.0, llama2_70b_lora),
as in the submitted logs of v4.0 to v5.1. Evaluations are counted in samples.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.timeline import Timeline

WORDING = Wording("llama2_70b_lora", accuracy_first=True, evaluated_at=constants.SAMPLES_COUNT)


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    # Every hyperparameter event of a run, in the order in which it is logged.
    return {
        constants.GLOBAL_BATCH_SIZE: config.batch_size * ranks,
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


def timeline(config: Any, ranks: int) -> Timeline:
    """Evaluate after as many steps as take ``eval_interval_samples``, but for the first ones, and behind the last step.

    The rules (training_rules.adoc, "evaluation") leave out the first floor(global batch / 8 + 2) and round the number
    of steps up.
    """
    global_batch = config.batch_size * ranks
    interval, skipped = -(-config.eval_interval_samples // global_batch), global_batch // 8 + 2
    checkpoint_steps = config.checkpoint_interval * interval

    def evaluates_after(step: int) -> bool:
        return step > 0 and ((step % interval == 0 and step // interval > skipped) or step == config.max_steps)

    return Timeline(
        steps_per_epoch=config.max_steps,
        epochs=1,
        evaluates_after=evaluates_after,
        checkpoints_after=lambda step: checkpoint_steps > 0 and step % checkpoint_steps == 0,
        epoch_num=lambda step: step * global_batch,
        evaluates_inside_epochs=True,
        lower_is_better=True,
    )
