"""Greedy non-maximum suppression of many groups at once: per class, per image, per level of a pyramid.

In each group the box with the highest score is kept and removes those that overlap it by more than a threshold, then
the next one that is left, and so on. Boxes are (left, top, right, bottom) without a pixel added to their sizes; among
equal scores the earlier box wins. This is PyTorch's operators alone and runs on any device.
"""

from typing import Callable, Iterator, Optional, Sequence, Tuple

import torch

from benchmarks.common.torch import kernels

BLOCK = 64  # candidates that are compared with all later ones of their group at a time
CHUNK = 1 << 15  # overlaps that exist at a time: 128 KB in fp32, which stays in a CPU's caches


Suppress = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]  # implementation of ``keep_of_groups``


def keep_of_groups(boxes: torch.Tensor, alive: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return which boxes are kept, bool (G, M), of groups with M boxes each, by falling score.

    Args:
        boxes: (G, M, 4), left, top, right, bottom.
        alive: bool (G, M), which boxes are there.
        threshold: intersection over union above which the box with the lower score is removed.
    """
    chunk = max(1, CHUNK // (BLOCK * max(1, boxes.shape[1])))
    parts = [_keep(some, there, threshold) for some, there in zip(boxes.split(chunk), alive.split(chunk))]
    return torch.cat(parts) if parts else torch.zeros_like(alive)


def nms(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    groups: torch.Tensor,
    threshold: float,
    limit: Optional[int] = None,
    suppress: Suppress = keep_of_groups,
) -> torch.Tensor:
    """Return the positions int64 (K,) of the boxes that are kept, by falling score.

    Args:
        boxes: (N, 4), left, top, right, bottom.
        scores: (N,), higher is better.
        groups: int (N,); a box removes boxes of its own group alone.
        threshold: intersection over union above which the box with the lower score is removed.
        limit: how many positions are returned at most, of all groups together.
        suppress: implementation for groups of equal size.
    """
    order = scores.argsort(descending=True, stable=True)
    kept = order[keep(boxes[order], groups[order], threshold, suppress)]
    return kept if limit is None else kept[:limit]


def keep(
    boxes: torch.Tensor, groups: torch.Tensor, threshold: float, suppress: Suppress = keep_of_groups
) -> torch.Tensor:
    """Return bool (N,): which of ``boxes`` (N, 4), sorted by falling score, are kept."""
    result = torch.zeros(len(boxes), dtype=torch.bool, device=boxes.device)
    for positions, filled in _padded_groups(groups):
        alive = suppress(boxes[positions], filled, threshold)
        result[positions[alive]] = True
    return result


def _padded_groups(groups: torch.Tensor) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    # Positions (G, M) of some groups of similar size, in their order, and which of them are filled
    if not len(groups):
        return
    by_group = groups.argsort(stable=True)
    sizes = torch.unique_consecutive(groups[by_group], return_counts=True)[1]
    starts = sizes.cumsum(0) - sizes
    by_size = sizes.argsort(descending=True, stable=True)
    sizes, starts = sizes[by_size], starts[by_size]
    lengths, first = sizes.tolist(), 0
    while first < len(lengths):
        longest = lengths[first]
        count = max(1, CHUNK // (BLOCK * longest))
        inside = torch.arange(longest, device=groups.device)
        filled = inside < sizes[first : first + count, None]
        places = starts[first : first + count, None] + inside
        yield by_group[torch.where(filled, places, 0)], filled
        first += count


def _keep(boxes: torch.Tensor, alive: torch.Tensor, threshold: float) -> torch.Tensor:
    alive = alive.clone()
    sides = [each.contiguous() for each in boxes.unbind(-1)]
    for start in range(0, boxes.shape[1], BLOCK):
        end = min(start + BLOCK, boxes.shape[1])
        above = overlapping(sides, start, end, threshold)
        block = _greedy(alive[:, start:end], above[:, :, : end - start].triu(1))
        alive[:, start:end] = block
        alive[:, end:] &= ~(above[:, :, end - start :] & block[:, :, None]).any(1)
    return alive


def _greedy(alive: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """Return which of ``alive`` (G, B) are kept, where ``above`` (G, B, B) says which row removes which column.

    Repeats until nothing changes: after n rounds the first n are final, and mostly all are after a few.
    """
    kept = alive
    while True:
        removed = (above & kept[:, :, None]).any(1)
        found = alive & ~removed
        if torch.equal(found, kept):
            return kept
        kept = found


def overlapping(sides: Sequence[torch.Tensor], start: int, end: int, threshold: float) -> torch.Tensor:
    """Bool (G, B, M): which of the boxes from ``start`` on overlap those before ``end`` by more than ``threshold``.

    Without a division: both / (one + other - both) > t is both > t / (1 + t) * (one + other).
    """
    left, top, right, bottom = (side[:, start:] for side in sides)
    share = (right - left) * (bottom - top) * (threshold / (1 + threshold))
    rows = slice(0, end - start)
    width = torch.minimum(right[:, rows, None], right[:, None])
    width.sub_(torch.maximum(left[:, rows, None], left[:, None])).clamp_(min=0)
    height = torch.minimum(bottom[:, rows, None], bottom[:, None])
    height.sub_(torch.maximum(top[:, rows, None], top[:, None])).clamp_(min=0)
    return width.mul_(height) > share[:, rows, None] + share[:, None]


# -- compared and chosen ----------------------------------------------------------------------------------


def _suppression_example(
    suppress: Suppress, device: torch.device, dtype: torch.dtype, groups: int, count: int
) -> kernels.Call:
    numbers = torch.Generator(device).manual_seed(1)
    # Whole numbers and a threshold that no quotient of them is equal to: nothing depends on rounding.
    drawn = torch.randint(0, 60, (groups, count, 4), generator=numbers, device=device).float()
    boxes = torch.cat((drawn[..., :2], drawn[..., :2] + drawn[..., 2:] + 1), -1)
    alive = torch.rand(groups, count, generator=numbers, device=device) < 0.9
    return lambda: [suppress(boxes, alive, 0.5001).to(dtype)]


OPERATORS = {  # with their Triton kernels: see benchmarks/common/torch/kernels.py
    "suppression": kernels.Operator(
        keep_of_groups,
        "benchmarks.detection.pytorch.kernels:keep_of_groups",
        _suppression_example,
        ({"groups": 3, "count": 70}, {"groups": 1, "count": 1}, {"groups": 2, "count": 32}, {"groups": 0, "count": 8}),
    )
}
