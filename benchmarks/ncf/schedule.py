"""Evaluations of NCF. The learning rate is constant."""

from typing import Any

from benchmarks.common.run.timeline import Timeline, by_epochs


def timeline(config: Any, steps_per_epoch: int) -> Timeline:
    """Evaluate after every epoch."""
    return by_epochs(config, steps_per_epoch, lambda epoch: True, stops_at_target=config.stop_at_target)
