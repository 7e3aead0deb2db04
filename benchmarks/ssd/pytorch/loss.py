"""The loss of SSD: smooth L1 of the offsets and cross-entropy of the labels, with hard negatives 3 to 1."""

from __future__ import annotations

import torch
from torch.nn import functional

NEGATIVES = 3
"""Background boxes for each box that has an object (arXiv 1512.02325, section 2.2)."""
BITS = 31
"""Of a float32 that is not negative, whose order is that of its bits read as a whole number."""


def multibox_loss(predictions: torch.Tensor, offsets: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over the images of the sum over the chosen boxes, divided by the number of boxes that have an object.

    As the reference and the submissions (opt_loss.py). An image without such a box counts as 0.

    Args:
        predictions: (N, boxes, 4 + classes): offsets, then logits; class 0 is the background.
        offsets: (N, boxes, 4), what the first four are to be where there is an object.
        labels: int (N, boxes), 0 where there is none.
    """
    wide = torch.promote_types(predictions.dtype, torch.float32)
    predictions, labels = predictions.to(wide), labels.long()
    positive = labels > 0
    count = positive.sum(1)
    distance = functional.smooth_l1_loss(predictions[..., :4], offsets.to(wide), reduction="none").sum(-1)
    logits = predictions[..., 4:].flatten(0, 1)
    entropy = functional.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)
    with torch.no_grad():
        # abs: a loss of 0 may have a sign, by which its bits would be those of a negative number.
        weight = positive + hard_negatives(entropy.abs().masked_fill(positive, -1.0), NEGATIVES * count)
    total = (positive * distance + weight * entropy).sum(1)
    return (total / count.clamp(min=1) * (count > 0)).mean()


def hard_negatives(losses: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return weights (N, boxes) that choose the largest ``counts`` (N,) of ``losses`` (N, boxes).

    Negative ones are never chosen, and all others where there are fewer than wanted.

    A top-k with another k for each image, in shapes that do not depend on the values: the k-th largest loss is found
    bit by bit, by counting how many are at least as large, instead of by sorting thousands of losses of which some
    dozens are wanted. Losses that equal the k-th share what is left of the count.
    """
    order = losses.float().contiguous().view(torch.int32)
    wanted = torch.minimum(counts, (order >= 0).sum(1))[:, None]
    smallest = torch.zeros_like(wanted, dtype=torch.int32)
    for bit in reversed(range(BITS)):
        candidate = smallest | (1 << bit)
        enough = (order >= candidate).sum(1, keepdim=True) >= wanted
        smallest = torch.where(enough, candidate, smallest)
    larger, equal = order > smallest, order == smallest
    left = wanted - larger.sum(1, keepdim=True)
    chosen = larger + equal * (left / equal.sum(1, keepdim=True).clamp(min=1))
    return torch.where(wanted > 0, chosen, torch.zeros_like(chosen)).to(losses.dtype)
