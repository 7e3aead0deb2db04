"""Learning rate and evaluations of the Transformer, used by all frameworks.

``config``: the Config of any framework.
"""

from dataclasses import replace
from typing import Any

from benchmarks.common.run.timeline import Timeline, by_epochs


def learning_rate(config: Any, step: int) -> float:
    """Warm up linearly from 0, then decay by the inverse square root of the step (arXiv 1706.03762, equation 3).

    Same as inverse_sqrt of NVIDIA's submissions (fairseq/optim/lr_scheduler/inverse_square_root_schedule.py), which
    counts finished updates: the rate of the first step is 0. ``step`` counts from 0 over the whole run.
    """
    warmup_steps = config.warmup_steps
    share = step / warmup_steps if step < warmup_steps else (warmup_steps / step) ** 0.5
    return float(config.learning_rate * share)


def timeline(config: Any, steps_per_epoch: int) -> Timeline:
    steps = by_epochs(config, steps_per_epoch, lambda epoch: True, stops_at_target=config.stop_at_target)
    return replace(steps, batch_unit="token positions")
