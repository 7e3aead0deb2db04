"""The five losses, each a mean over what was sampled on this rank, as the submissions have it."""

from __future__ import annotations

import torch
from torch.nn import functional

RPN_BETA = 1 / 9
"""Where the smooth L1 of the proposals turns from a square into a line; the head's turns at 1."""


def smooth_l1(found: torch.Tensor, wanted: torch.Tensor, beta: float) -> torch.Tensor:
    """Elementwise (arXiv 1504.08083, equation 3): x^2 / (2 beta) below ``beta``, |x| - beta / 2 from there on."""
    return functional.smooth_l1_loss(found, wanted, reduction="none", beta=beta)


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean of ``values`` where ``weights`` are 1; 0 where none is."""
    return torch.where(weights, values, 0.0).sum() / weights.sum().clamp(min=1)


def objectness(logits: torch.Tensor, positive: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of sampled anchors' ``logits`` (B, S)."""
    each = functional.binary_cross_entropy_with_logits(logits, positive.to(logits.dtype), reduction="none")
    return weighted_mean(each, filled)


def boxes(
    found: torch.Tensor, wanted: torch.Tensor, positive: torch.Tensor, filled: torch.Tensor, beta: float
) -> torch.Tensor:
    """Smooth L1 of the offsets (B, S, 4) of what is ``positive``, summed, per sample that is ``filled``."""
    # The offset from or to a box without area is infinite, and 0 times its gradient were not 0.
    wanted = torch.where(positive.unsqueeze(-1), wanted, found.detach())
    return smooth_l1(found, wanted, beta).sum() / filled.sum().clamp(min=1)


def classes(logits: torch.Tensor, labels: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of RoIs' ``logits`` (R, classes + 1) and ``labels`` int64 (R,), 0 for background."""
    return weighted_mean(functional.cross_entropy(logits, labels, reduction="none"), filled)


def masks(logits: torch.Tensor, wanted: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of RoIs' ``logits`` (R, 28, 28), the mean over the pixels of what is ``positive`` (R,)."""
    each = functional.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype), reduction="none")
    return weighted_mean(each.mean(dim=(1, 2)), positive)
