"""The MLPerf log events of Llama 3.1 8B which do not depend on the framework.

The keys are those of the compliance checker (mlperf-logging 4.1.68, training_5.1.0 to training_6.1.0, llama31_8b), as
in the submitted logs of v5.1. A run is one epoch and one block; its evaluations are counted in samples.
"""

from typing import Any, Dict

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.timeline import Timeline

WORDING = Wording("llama31_8b", accuracy_first=True, evaluated_at=constants.SAMPLES_COUNT)


def hyperparameters(config: Any, ranks: int) -> Dict[str, Any]:
    # Every hyperparameter event of a run, in the order in which it is logged.
    return {
        constants.GLOBAL_BATCH_SIZE: config.batch_size * ranks,
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


def timeline(config: Any, ranks: int) -> Timeline:
    """Evaluate after as many steps as take ``eval_interval_samples``, and behind the last one, which is ours.

    As pretrain_llama31.py of the reference has it: the number of steps is rounded up.
    """
    global_batch = config.batch_size * ranks
    steps = min(config.max_steps, -(-config.max_samples // global_batch))
    interval = -(-config.eval_interval_samples // global_batch)
    checkpoint_steps = config.checkpoint_interval * interval

    def evaluates_after(step: int) -> bool:
        return step > 0 and (step % interval == 0 or step == steps)

    return Timeline(
        steps_per_epoch=steps,
        epochs=1,
        evaluates_after=evaluates_after,
        checkpoints_after=lambda step: checkpoint_steps > 0 and step % checkpoint_steps == 0,
        epoch_num=lambda step: step * global_batch,
        evaluates_inside_epochs=True,
        lower_is_better=True,
    )
