"""The learning rate of fine-tuning at each step, the same in every framework."""

from __future__ import annotations

from typing import Any


def learning_rate(config: Any, step: int, steps: int) -> float:
    """Warm up linearly from 0 in a share of all ``steps``, then decay linearly to 0.

    LinearWarmUpScheduler of DeepLearningExamples (schedulers.py), which moves before it is asked: the first step has
    the rate of progress 1 / steps, the last one 0. ``step`` counts from 0 over the whole run.
    """
    progress, warmup = (step + 1) / steps, config.warmup_fraction
    share = progress / warmup if progress < warmup else max(0.0, (1 - progress) / (1 - warmup))
    return float(config.learning_rate * share)
