"""LAMB over BERT's weights, with the submitted exclusions from its decay."""

from __future__ import annotations

from benchmarks.bert.pytorch import model
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.model import Network
from benchmarks.common import torch_lamb
from benchmarks.common.ranks import Ranks
from benchmarks.common.torch_updates import ScaleRule, Updates

LARGEST_SCALE = float(1 << 24)
"""Of the loss, as apex has it (amp/scaler.py, max_loss_scale)."""


def updates_of(network: Network, config: Config, ranks: Ranks, kernel: str) -> Updates:
    """Return the updates of the network's weights by LAMB; ``kernel`` is the implementation, or "auto"."""
    named = list(network.named_parameters())
    pieces = torch_lamb.pieces_of(named, lambda name: model.decay_of(name, config), model.parts_of)
    options = torch_lamb.Options((config.beta1, config.beta2), config.epsilon)
    split = config.split_optimizer and ranks.size > 1
    candidates = (
        torch_lamb.split_candidates(pieces, options, ranks)
        if split
        else torch_lamb.lamb_candidates(pieces, options, torch_lamb.find_apex())
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
