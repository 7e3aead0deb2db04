"""Learning rate and evaluations of fine-tuning on SQuAD, used by all frameworks.

``config``: the Config of any framework.
"""

from typing import Any

from benchmarks.common.run.timeline import Timeline, by_epochs


def learning_rate(config: Any, step: int, steps: int) -> float:
    """Warm up linearly from 0 in ``warmup_fraction`` of ``steps``, then decay linearly to 0.

    Same as LinearWarmUpScheduler of DeepLearningExamples (schedulers.py), which advances before the step: progress
    is 1 / steps in the first step and 1 in the last, with rate 0. ``step`` counts from 0 over the whole run.
    """
    progress, warmup = (step + 1) / steps, config.warmup_fraction
    share = progress / warmup if progress < warmup else max(0.0, (1 - progress) / (1 - warmup))
    return float(config.learning_rate * share)


def timeline(config: Any, steps_per_epoch: int) -> Timeline:
    # Evaluate every ``eval_interval`` epochs and at the end.

    def evaluates(epoch: int) -> bool:
        return epoch + 1 == config.epochs or (config.eval_interval > 0 and (epoch + 1) % config.eval_interval == 0)

    return by_epochs(config, steps_per_epoch, evaluates, stops_at_target=config.stop_at_target)
