"""Learning rates and evaluations of Mask R-CNN.

``config``: the Config of any framework.
"""

from bisect import bisect_right
from typing import Any, NamedTuple

from benchmarks.common.run.timeline import Timeline, by_epochs

BIAS_FACTOR = 2.0  # Base learning rate of biases relative to weights (SOLVER.BIAS_LR_FACTOR)


class Rates(NamedTuple):
    weights: float
    biases: float


def rates(config: Any, step: int) -> Rates:
    """Return the learning rates of ``step``, counted from 0 over all epochs; see ``learning_rate``."""
    base = float(config.learning_rate)
    return Rates(learning_rate(config, step, base), learning_rate(config, step, BIAS_FACTOR * base))


def learning_rate(config: Any, step: int, base: float) -> float:
    """Increase by ``warmup_factor`` per step to ``base``, then multiply by ``decay_factor`` at each of decay_steps.

    As WarmupMultiStepLR with the method "mlperf_linear" in NVIDIA's submissions
    (maskrcnn/implementations/pytorch/maskrcnn_benchmark/solver/lr_scheduler.py; v0.5: utils/lr_scheduler.py). The
    remaining warm-up is subtracted from both base rates, not scaled by them: biases start at half of their base rate
    when weights start at 0. With ``warmup_factor`` 0 the warm-up is linear from a third of the base rate, like "linear"
    in maskrcnn_benchmark.
    """
    remaining_steps = max(0, config.warmup_steps - step)
    if config.warmup_factor > 0:
        base -= remaining_steps * config.warmup_factor
    elif remaining_steps:
        base *= 1 - remaining_steps / config.warmup_steps * 2 / 3
    return float(base * config.decay_factor ** bisect_right(config.decay_steps, step))


def timeline(config: Any, steps_per_epoch: int) -> Timeline:
    """Evaluate after every epoch; the log counts epochs from 1."""
    return by_epochs(
        config,
        steps_per_epoch,
        lambda epoch: True,
        stops_at_target=config.stop_at_target,
        evaluates_concurrently=config.concurrent_evaluation,
    )
