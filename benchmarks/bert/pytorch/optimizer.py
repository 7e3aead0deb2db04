"""LAMB over BERT's weights, with the submitted exclusions from its decay."""

from __future__ import annotations

from benchmarks.bert.pytorch import model
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.model import Network
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import lamb
from benchmarks.common.torch.updates import ScaleRule, Updates

LARGEST_SCALE = float(1 << 24)
"""Of the loss, as apex has it (amp/scaler.py, max_loss_scale)."""


def updates_of(network: Network, config: Config, ranks: Ranks, kernel: str) -> Updates:
    """Return the updates of the network's weights by LAMB; ``kernel`` is the implementation, or "auto"."""
    named = list(network.named_parameters())
    pieces = lamb.pieces_of(named, lambda name: model.decay_of(name, config), model.parts_of)
    options = lamb.Options((config.beta1, config.beta2), config.epsilon)
    split = config.split_optimizer and ranks.size > 1
    candidates = (
        lamb.split_candidates(pieces, options, ranks)
        if split
        else lamb.lamb_candidates(pieces, options, lamb.find_apex())
    )
    scale = ScaleRule(config.loss_scale, config.loss_scale_window, LARGEST_SCALE)
    return Updates(
        [parameter for _, parameter in named],
        candidates,
        "fused" if split else kernel,
        ranks,
        clip=config.gradient_clip or None,
        scale=scale if config.precision == "fp16" else None,
        split=split,
    )
