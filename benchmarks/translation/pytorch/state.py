"""Translator training state: network, optimizer, and checkpoints."""

from dataclasses import dataclass
from typing import Any, Dict, Mapping

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import optimizers
from benchmarks.common.torch.flat_optimizer import FlatOptimizer, ScaleRule


@dataclass(frozen=True)
class Training:
    config: Any
    ranks: Ranks
    words: int  # vocabulary entries that can be translated to, without padding entries
    network: Any  # ``loss_sum(batch)`` returns the loss of this rank's tokens
    optimizer: FlatOptimizer
    kernels: Mapping[str, str]  # implementation per operator

    def state_dict(self) -> Dict[str, Any]:
        return {"network": self.network.state_dict(), "kernels": self.kernels, **self.optimizer.state_dict()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        # Continue from a checkpoint.
        self.network.load_state_dict(saved["network"])
        self.optimizer.restore(saved)


def adam(network: Any, config: Any, ranks: Ranks, saved: Mapping[str, Any], scale: ScaleRule) -> FlatOptimizer:
    # Return Adam as configured, or of the implementation that a checkpoint ``saved``; ``scale`` is for fp16.
    betas = (config.beta1, config.beta2)
    return FlatOptimizer(
        list(network.parameters()),
        optimizers.adam_candidates(config.learning_rate, betas, config.epsilon, optimizers.find_apex()),
        saved.get("kernel", config.optimizer_kernel),
        ranks,
        clip=config.gradient_clip or None,
        scale=scale if config.precision == "fp16" else None,
        split=config.split_optimizer,
        bucket_mb=config.bucket_mb,
        compression=config.gradient_compression,
    )
