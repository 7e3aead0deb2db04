"""Learning rates of the Llama benchmarks and gpt-oss-20b, and evaluations of the pretraining.

``config``: the Config of any framework.
"""

import math
from typing import Any

from benchmarks.common.run.timeline import Timeline


def learning_rate(config: Any, step: int) -> float:
    """Warm up linearly, then follow a cosine to ``end_learning_rate`` at ``max_steps``; ``step`` counts from 0.

    Same as CosineAnnealing of NeMo (nemo/core/optim/lr_scheduler.py), with one more warm-up step than configured.
    Without warm-up, same as get_cosine_schedule_with_warmup of Hugging Face.
    """
    if config.warmup_steps and step <= config.warmup_steps:
        return float(config.learning_rate * (step + 1) / (config.warmup_steps + 1))
    return _cosine(config, (step - config.warmup_steps) / (config.max_steps - config.warmup_steps))


def megatron_learning_rate(config: Any, step: int) -> float:
    """Warm up linearly from 0, then follow a cosine to ``end_learning_rate`` at ``max_steps`` - ``warmup_steps``.

    Same as OptimizerParamScheduler of Megatron-LM with lr_decay_iters of gpt-oss-20b's reference, which logs the
    rate of the next step (primus/rcp_logs: 1/128 of the base rate after the first step).
    """
    if step <= config.warmup_steps:
        return float(config.learning_rate * step / max(1, config.warmup_steps))
    return _cosine(config, (step - config.warmup_steps) / max(1, config.max_steps - 2 * config.warmup_steps))


def _cosine(config: Any, done: float) -> float:
    half = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return float(config.end_learning_rate + (config.learning_rate - config.end_learning_rate) * half)


def evaluations(config: Any, ranks: int) -> int:
    """Return the evaluations of the complete schedule as NeMo counts them (build in gpt/data/pre_training.py)."""
    interval = -(-config.eval_interval_samples // config.global_batch(ranks))
    return int(config.max_steps // interval + 1)


def timeline(config: Any, ranks: int) -> Timeline:
    """Evaluate every ``eval_interval_samples``, rounded up to steps as in the reference (pretrain_llama31.py).

    Encore also evaluates after the last step.
    """
    return timeline_of(config, ranks, min(config.max_steps, -(-config.max_samples // config.global_batch(ranks))))


def timeline_of(config: Any, ranks: int, steps: int, skipped: int = 0) -> Timeline:
    """Return a timeline of ``steps`` without the first ``skipped`` evaluations."""
    global_batch = config.global_batch(ranks)
    interval = -(-config.eval_interval_samples // global_batch)
    checkpoint_steps = config.checkpoint_interval * interval

    def evaluates_after(step: int) -> bool:
        return step > 0 and ((step % interval == 0 and step // interval > skipped) or step == steps)

    return Timeline(
        steps_per_epoch=steps,
        epochs=1,
        evaluates_after=evaluates_after,
        checkpoints_after=lambda step: checkpoint_steps > 0 and step % checkpoint_steps == 0,
        epoch_num=lambda step: step * global_batch,
        evaluates_inside_epochs=True,
        lower_is_better=True,
        data_parallel_ranks=ranks // config.group,
    )
