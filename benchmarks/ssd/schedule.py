"""The learning rate of SSD at each step, the same in every framework."""

from typing import Any, List

REFERENCE_BATCH = 32
REFERENCE_RATE = 2.5e-3


def base_rate(config: Any, ranks: int) -> float:
    """Return the rate after the warm-up, for the global batch.

    The rules allow whole multiples of the reference's 0.0025 (mlperf/training_policies, training_rules.adoc,
    "hyperparameters"): the one nearest to ``learning_rate`` for each 32 images, as the submissions round it.
    """
    wanted = config.learning_rate / REFERENCE_RATE * config.batch_size * ranks / REFERENCE_BATCH
    return REFERENCE_RATE * max(1, round(wanted))


def boundaries(config: Any, ranks: int, steps_per_epoch: int) -> List[int]:
    """Return the steps, counted from 0, from which on the rate is lower."""
    if config.decay_steps:
        return [steps * REFERENCE_BATCH // (config.batch_size * ranks) for steps in config.decay_steps]
    return [epoch * steps_per_epoch for epoch in config.decay_epochs]


def learning_rate(config: Any, step: int, ranks: int, steps_per_epoch: int) -> float:
    """Warm up linearly, and drop by a factor at each boundary; ``step`` counts from 0 over the whole run.

    As lr_warmup of the submissions (ssd/implementations/pytorch/train.py): the first step's rate is 0 with a
    warmup_factor of 0.
    """
    passed = sum(step >= boundary for boundary in boundaries(config, ranks, steps_per_epoch))
    rate = base_rate(config, ranks) * config.decay_factor**passed
    if step < config.warmup_steps:
        rate -= rate * (config.warmup_steps - step) / (config.warmup_steps * 2**config.warmup_factor)
    return float(rate)
