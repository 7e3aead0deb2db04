"""Learning rate and evaluations of Llama 2 70B LoRA, used by all frameworks.

``config``: the Config of any framework.
"""

from typing import Any

from benchmarks.common.run.timeline import Timeline
from benchmarks.llama.schedule import learning_rate, timeline_of

__all__ = ["learning_rate", "timeline"]


def timeline(config: Any, ranks: int) -> Timeline:
    """Evaluate every ``eval_interval_samples``, rounded up to steps, and after the last step.

    The first floor(global batch / 8 + 2) evaluations are skipped, according to the rules (training_rules.adoc,
    "evaluation").
    """
    return timeline_of(config, ranks, config.max_steps, skipped=config.global_batch(ranks) // 8 + 2)
