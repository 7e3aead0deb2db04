"""Greedy non-maximum suppression of many groups in parallel: per class, image or pyramid level.

In every group the box with the highest score is kept and removes boxes that overlap it by more than a threshold;
this is repeated with the next remaining box. Boxes are (left, top, right, bottom) with continuous sizes. For equal
scores the earlier box is kept. Implemented with PyTorch operators for any device.
"""

from typing import Callable, Iterator, Optional, Sequence, Tuple

import torch

from benchmarks.common.torch import kernels

BLOCK = 64  # candidates compared with all later candidates of the group in one step
# Overlaps computed at a time: 128 KB in fp32, which stays in a CPU's caches; 64 MB on a GPU, where every chunk
# synchronizes host and device.
CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}

Suppress = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]  # implementation of ``nms_mask``


def nms_mask(boxes: torch.Tensor, alive: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return bool (G, M): the boxes that are kept, for groups of M boxes in descending order of scores.

    Args:
        boxes: (G, M, 4), left, top, right, bottom.
        alive: bool (G, M): False for padding.
        threshold: IoU above which the box with the lower score is removed.
    """
    chunk = max(1, CHUNK[boxes.device.type] // (BLOCK * max(1, boxes.shape[1])))
    parts = [_keep(some, there, threshold) for some, there in zip(boxes.split(chunk), alive.split(chunk))]
    return torch.cat(parts) if parts else torch.zeros_like(alive)


def nms(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    groups: torch.Tensor,
    threshold: float,
    limit: Optional[int] = None,
    suppress: Suppress = nms_mask,
) -> torch.Tensor:
    """Return the positions int64 (K,) of the boxes that are kept, in descending order of scores.

    Args:
        boxes: (N, 4), left, top, right, bottom.
        scores: (N,), higher is better.
        groups: int (N,); boxes only remove boxes of the same group.
        threshold: IoU above which the box with the lower score is removed.
        limit: maximum number of positions over all groups.
        suppress: implementation for groups of equal size.
    """
    order = scores.argsort(descending=True, stable=True)
    positions = order[keep(boxes[order], groups[order], threshold, suppress)]
    return positions if limit is None else positions[:limit]


def keep(boxes: torch.Tensor, groups: torch.Tensor, threshold: float, suppress: Suppress = nms_mask) -> torch.Tensor:
    """Return bool (N,): which of ``boxes`` (N, 4), sorted by falling score, are kept."""
    result = torch.zeros(len(boxes), dtype=torch.bool, device=boxes.device)
    for positions, filled in _padded_groups(groups):
        alive = suppress(boxes[positions], filled, threshold)
        result[positions[alive]] = True
    return result


def _padded_groups(groups: torch.Tensor) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    # Positions (G, M) for groups of similar size, with the mask of valid entries
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
        count = max(1, CHUNK[groups.device.type] // (BLOCK * longest))
        slot = torch.arange(longest, device=groups.device)
        filled = slot < sizes[first : first + count, None]
        slots = starts[first : first + count, None] + slot
        yield by_group[torch.where(filled, slots, 0)], filled
        first += count


def _keep(boxes: torch.Tensor, alive: torch.Tensor, threshold: float) -> torch.Tensor:
    alive = alive.clone()
    sides = [side.contiguous() for side in boxes.unbind(-1)]
    for start in range(0, boxes.shape[1], BLOCK):
        end = min(start + BLOCK, boxes.shape[1])
        above = overlapping(sides, start, end, threshold)
        block = _greedy(alive[:, start:end], above[:, :, : end - start].triu(1))
        alive[:, start:end] = block
        alive[:, end:] &= ~(above[:, :, end - start :] & block[:, :, None]).any(1)
    return alive


def _greedy(alive: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """Return the kept boxes of ``alive`` (G, B); ``above`` (G, B, B) is True if the row removes the column.

    Iterates to a fixed point: after n iterations the first n boxes are final, and most groups need only a few
    iterations.
    """
    keep = alive
    while True:
        removed = (above & keep[:, :, None]).any(1)
        updated = alive & ~removed
        if torch.equal(updated, keep):
            return keep
        keep = updated


def overlapping(sides: Sequence[torch.Tensor], start: int, end: int, threshold: float) -> torch.Tensor:
    """Return bool (G, B, M): boxes from ``start`` to ``end`` that overlap the boxes from ``start`` by more than
    ``threshold``.

    Avoids a division: i / (a + b - i) > t is equivalent to i > t / (1 + t) * (a + b).
    """
    x0, y0, x1, y1 = (coordinate[:, start:] for coordinate in sides)
    share = (x1 - x0) * (y1 - y0) * (threshold / (1 + threshold))
    rows = slice(0, end - start)
    width = torch.minimum(x1[:, rows, None], x1[:, None])
    width.sub_(torch.maximum(x0[:, rows, None], x0[:, None])).clamp_(min=0)
    height = torch.minimum(y1[:, rows, None], y1[:, None])
    height.sub_(torch.maximum(y0[:, rows, None], y0[:, None])).clamp_(min=0)
    return width.mul_(height) > share[:, rows, None] + share[:, None]


# -- compared and chosen ----------------------------------------------------------------------------------


def _suppression_example(
    suppress: Suppress, device: torch.device, dtype: torch.dtype, groups: int, count: int
) -> kernels.Call:
    generator = torch.Generator(device).manual_seed(1)
    # Integers, with a threshold that is not a possible IoU: the result does not depend on rounding.
    corners = torch.randint(0, 60, (groups, count, 4), generator=generator, device=device).float()
    boxes = torch.cat((corners[..., :2], corners[..., :2] + corners[..., 2:] + 1), -1)
    alive = torch.rand(groups, count, generator=generator, device=device) < 0.9
    return lambda: [suppress(boxes, alive, 0.5001).to(dtype)]


OPERATORS = {  # Triton kernels: see benchmarks/common/torch/kernels.py
    "suppression": kernels.Operator(
        nms_mask,
        "benchmarks.detection.pytorch.kernels:nms_mask",
        _suppression_example,
        ({"groups": 3, "count": 70}, {"groups": 1, "count": 1}, {"groups": 2, "count": 32}, {"groups": 0, "count": 8}),
    )
}
