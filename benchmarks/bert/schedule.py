"""Learning rate and evaluations of BERT pretraining, used by all frameworks.

``config``: the Config of any framework.
"""

from typing import Any

from benchmarks.common.run.timeline import Timeline


def learning_rate(config: Any, step: int) -> float:
    """Warm up linearly, then decay to 0 at ``max_steps``; ``step`` counts from 0 over the whole run.

    Same as LinearWarmupPolyDecayScheduler of NVIDIA's v0.7 submission (schedulers.py), which counts from 1. The
    decay starts at step 0, so the rate drops at the end of the warm-up.
    """
    number = step + 1
    warmed_up = number - config.start_warmup_step
    if warmed_up < config.warmup_steps:
        return float(config.learning_rate * warmed_up / config.warmup_steps)
    return float(config.learning_rate * (1 - min(number / config.max_steps, 1.0)) ** config.decay_power)


def timeline(config: Any, ranks: int) -> Timeline:
    """Evaluate after ``eval_start_samples``, every ``eval_interval_samples`` from there, and at the end.

    As in run_pretraining.py of NVIDIA's submission: after the first step that reaches the number of samples. Encore
    also evaluates at the end.
    """
    global_batch = config.batch_size * ranks
    steps = min(config.max_steps, -(-config.max_samples // global_batch))
    start, interval = config.eval_start_samples, config.eval_interval_samples

    def passed(step: int) -> int:
        # Return the number of evaluations that are due up to a position.
        return max(0, (step * global_batch - start) // interval + 1)

    def evaluates_after(step: int) -> bool:
        return step > 0 and (passed(step) > passed(step - 1) or step == steps)

    checkpoint_interval = config.checkpoint_interval
    return Timeline(
        steps_per_epoch=steps,
        epochs=1,
        evaluates_after=evaluates_after,
        checkpoints_after=lambda step: (
            checkpoint_interval > 0 and evaluates_after(step) and passed(step) % checkpoint_interval == 0
        ),
        epoch_num=lambda step: 1,
        evaluates_inside_epochs=True,
    )
