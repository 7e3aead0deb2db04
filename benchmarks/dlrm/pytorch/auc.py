"""Exact area under the ROC curve over all ranks, sorted on the devices.

AUC = (pairs with the positive above the negative + half of the ties) / all pairs. Every rank receives and sorts a
range of scores; ranges are determined by a histogram of the leading bits, so that equal scores are on the same rank.
Counts are integers: the result does not depend on the number of ranks.
"""

from typing import List, Tuple

import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch

LEADING_BITS = 16


def ordered_keys(scores: torch.Tensor) -> torch.Tensor:
    """Return integers from 0 to 2**32 - 1 in the order of the fp32 scores; -0 and 0 are equal.

    Raises:
        ValueError: a score is NaN.
    """
    if bool(torch.isnan(scores).any()):
        raise ValueError("a score of the evaluation is not a number: the training has diverged")
    bits = (scores.float() + 0.0).view(torch.int32).to(torch.int64)
    # Two's complement has the order of positive floats, and the reverse order for negative floats.
    return torch.where(bits < 0, -1 - bits, bits + (1 << 31)) & 0xFFFFFFFF


def area_under_curve(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the AUC of ``scores`` (n,) and ``labels`` (n,), 0 or 1, over all ranks. Synchronizes.

    Raises:
        ValueError: a score is NaN, or all labels are equal.
    """
    # Key and label are packed into one integer, which needs only one sort and one exchange.
    packed = ordered_keys(scores) * 2 + labels.to(torch.int64)
    if pytorch.size() > 1:
        packed = _exchange_by_key(packed)
    packed = torch.sort(packed)[0]
    _, key, rows = torch.unique_consecutive(packed >> 1, return_inverse=True, return_counts=True)
    positives = torch.zeros_like(rows).index_add_(0, key, packed & 1)
    negatives = rows - positives
    count = torch.stack((positives.sum(), negatives.sum()))
    below, totals = _negatives_below(count)
    negatives_below = torch.cumsum(negatives, 0) - negatives + below
    twice = (positives * (2 * negatives_below + negatives)).sum()
    if pytorch.size() > 1:
        dist.all_reduce(twice, group=pytorch.eager())
    if min(totals) == 0:
        raise ValueError(f"{totals[0]} positive and {totals[1]} negative rows: the AUC needs both")
    return int(twice) / (2 * totals[0] * totals[1])


# Exchange rows so that every rank has a range of keys, with about the same number of rows
def _exchange_by_key(packed: torch.Tensor) -> torch.Tensor:
    size = dist.get_world_size()
    bins = packed >> (33 - LEADING_BITS)
    counts = torch.bincount(bins, minlength=1 << LEADING_BITS)
    dist.all_reduce(counts, group=pytorch.eager())
    # A bin is assigned to the rank that contains the middle of the bin if the rows are divided equally.
    middle = torch.cumsum(counts, 0) - counts // 2
    owner_of_bin = (middle * size // (counts.sum() + 1)).clamp_(max=size - 1)
    owner = owner_of_bin[bins]
    order = torch.argsort(owner)
    send_counts = torch.bincount(owner, minlength=size)
    receive_counts = torch.empty_like(send_counts)
    dist.all_to_all_single(receive_counts, send_counts, group=pytorch.eager())
    received = packed.new_empty(int(receive_counts.sum()))
    dist.all_to_all_single(
        received, packed[order], receive_counts.tolist(), send_counts.tolist(), group=pytorch.eager()
    )
    return received


# Negatives on the ranks with lower keys, and [positives, negatives] of all ranks.
def _negatives_below(count: torch.Tensor) -> Tuple[int, List[int]]:
    if pytorch.size() == 1:
        return 0, count.tolist()
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count, group=pytorch.eager())
    numbers = torch.stack(counts)
    return int(numbers[: dist.get_rank(), 1].sum()), numbers.sum(dim=0).tolist()
