"""Learning rate and evaluations of GNMT, used by all frameworks.

``config``: the Config of any framework.
"""

from typing import Any

from benchmarks.common.run.timeline import Timeline, by_epochs

FIRST = 0.01  # rate at the start of the warm-up, relative to the base learning rate


def learning_rate(config: Any, step: int) -> float:
    """Warm up exponentially, hold, and from ``remain_steps`` decay every ``decay_interval``, up to ``decay_steps``
    times.

    Same as WarmupMultiStepLR of NVIDIA's submissions (gnmt/implementations/pytorch/seq2seq/train/lr_scheduler.py),
    which counts from 1; ``step`` counts from 0 over the whole run.
    """
    number = step + 1
    warmup_steps = min(config.warmup_steps, config.remain_steps)
    if number <= warmup_steps:
        return float(config.learning_rate * FIRST ** ((warmup_steps - number) / warmup_steps))
    if number < config.remain_steps:
        return float(config.learning_rate)
    decays = min((number - config.remain_steps) // config.decay_interval + 1, config.decay_steps)
    return float(config.learning_rate * config.decay_factor**decays)


def timeline(config: Any, steps_per_epoch: int) -> Timeline:
    return by_epochs(config, steps_per_epoch, lambda epoch: True, stops_at_target=config.stop_at_target)
