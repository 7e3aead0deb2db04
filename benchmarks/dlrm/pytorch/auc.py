"""Exact area under the ROC curve of scores on several ranks, sorted on their devices.

AUC = (pairs with the positive above the negative + half of the ties) / all pairs. Each rank gets one range of
scores and sorts it; ranges are cut by a histogram of the scores' leading bits, so that equal scores come to one
rank. Everything is counted in whole numbers: the result does not depend on the number of ranks.
"""

from typing import List, Tuple

import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch

LEADING_BITS = 16


def ordered_keys(scores: torch.Tensor) -> torch.Tensor:
    """Whole numbers from 0 to 2**32 - 1 in the order of fp32 scores; -0 and 0 are the same.

    Raises:
        ValueError: a score is not a number.
    """
    if bool(torch.isnan(scores).any()):
        raise ValueError("a score of the evaluation is not a number: the training has diverged")
    bits = (scores.float() + 0.0).view(torch.int32).to(torch.int64)
    # Two's complement orders the positive floats; the negative ones run backwards.
    return torch.where(bits < 0, -1 - bits, bits + (1 << 31)) & 0xFFFFFFFF


def area_under_curve(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """AUC of the ``scores`` (n,) and ``labels`` (n,), 0 or 1, of all ranks together; waits for it.

    Raises:
        ValueError: a score is not a number, or all labels are alike.
    """
    # One number carries key and label, so that one sort and one exchange do for both.
    packed = ordered_keys(scores) * 2 + labels.to(torch.int64)
    if pytorch.size() > 1:
        packed = _own_range(packed)
    packed = torch.sort(packed)[0]
    _, key, rows = torch.unique_consecutive(packed >> 1, return_inverse=True, return_counts=True)
    positives = torch.zeros_like(rows).index_add_(0, key, packed & 1)
    negatives = rows - positives
    count = torch.stack((positives.sum(), negatives.sum()))
    below, totals = _before_this_rank(count)
    negatives_below = torch.cumsum(negatives, 0) - negatives + below
    twice = (positives * (2 * negatives_below + negatives)).sum()
    if pytorch.size() > 1:
        dist.all_reduce(twice, group=pytorch.eager())
    if min(totals) == 0:
        raise ValueError(f"{totals[0]} positive and {totals[1]} negative rows: the AUC needs both")
    return int(twice) / (2 * totals[0] * totals[1])


# Give each rank the rows of its range of keys: about as many as the others have.
def _own_range(packed: torch.Tensor) -> torch.Tensor:
    size = dist.get_world_size()
    bins = packed >> (33 - LEADING_BITS)
    counts = torch.bincount(bins, minlength=1 << LEADING_BITS)
    dist.all_reduce(counts, group=pytorch.eager())
    # A bin goes to the rank into whose share of all rows its middle falls.
    middle = torch.cumsum(counts, 0) - counts // 2
    owner_of_bin = (middle * size // (counts.sum() + 1)).clamp_(max=size - 1)
    owner = owner_of_bin[bins]
    order = torch.argsort(owner)
    given = torch.bincount(owner, minlength=size)
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=pytorch.eager())
    received = packed.new_empty(int(taken.sum()))
    dist.all_to_all_single(received, packed[order], taken.tolist(), given.tolist(), group=pytorch.eager())
    return received


# Negatives on the ranks with lower keys, and [positives, negatives] of all ranks.
def _before_this_rank(count: torch.Tensor) -> Tuple[int, List[int]]:
    if pytorch.size() == 1:
        return 0, count.tolist()
    every = [torch.empty_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(every, count, group=pytorch.eager())
    numbers = torch.stack(every)
    return int(numbers[: dist.get_rank(), 1].sum()), numbers.sum(dim=0).tolist()
