"""Learning rate and evaluations of SSD.

``config``: the Config of any framework.
"""

from typing import Any, List

from benchmarks.common.run.timeline import Timeline, by_epochs

REFERENCE_BATCH = 32
REFERENCE_RATE = 2.5e-3


def base_rate(config: Any, ranks: int) -> float:
    """Return the learning rate after the warm-up, for the global batch size.

    The rules allow integer multiples of 0.0025, the rate of the reference (mlperf/training_policies,
    training_rules.adoc, "hyperparameters"). As in the submissions, the result is the multiple nearest to
    ``learning_rate`` per 32 images.
    """
    scaled_rate = config.learning_rate / REFERENCE_RATE * config.batch_size * ranks / REFERENCE_BATCH
    return REFERENCE_RATE * max(1, round(scaled_rate))


def boundaries(config: Any, ranks: int, steps_per_epoch: int) -> List[int]:
    """Return the steps, counted from 0, at which the learning rate drops."""
    if config.decay_steps:
        return [steps * REFERENCE_BATCH // (config.batch_size * ranks) for steps in config.decay_steps]
    return [epoch * steps_per_epoch for epoch in config.decay_epochs]


def learning_rate(config: Any, step: int, ranks: int, steps_per_epoch: int) -> float:
    """Return the learning rate of ``step``, counted from 0 over all epochs.

    Linear warm-up, then a drop by ``decay_factor`` at each boundary, as lr_warmup in the submissions
    (ssd/implementations/pytorch/train.py): with ``warmup_factor`` 0 the rate of the first step is 0.
    """
    drops = sum(step >= boundary for boundary in boundaries(config, ranks, steps_per_epoch))
    rate = base_rate(config, ranks) * config.decay_factor**drops
    if step < config.warmup_steps:
        rate -= rate * (config.warmup_steps - step) / (config.warmup_steps * 2**config.warmup_factor)
    return float(rate)


def timeline(config: Any, ranks: int, steps_per_epoch: int) -> Timeline:
    """Evaluate after the submitted epochs, or after the submitted steps of 32 images, and at the end."""
    last = config.epochs
    if not config.eval_steps:
        return by_epochs(
            config,
            steps_per_epoch,
            lambda epoch: epoch + 1 in config.eval_epochs or epoch + 1 == last,
            stops_at_target=config.stop_at_target,
            evaluates_concurrently=config.concurrent_evaluation,
        )
    total_steps = last * steps_per_epoch
    eval_steps = {steps * REFERENCE_BATCH // (config.batch_size * ranks) for steps in config.eval_steps}
    eval_steps.add(total_steps)
    interval = config.checkpoint_interval * steps_per_epoch
    return Timeline(
        steps_per_epoch=steps_per_epoch,
        epochs=last,
        evaluates_after=lambda step: step in eval_steps,
        checkpoints_after=lambda step: interval > 0 and step % interval == 0,
        epoch_num=lambda step: (step - 1) // steps_per_epoch + 1,
        evaluates_inside_epochs=True,
        stops_at_target=config.stop_at_target,
        evaluates_concurrently=config.concurrent_evaluation,
    )
