"""Boxes as tensors (..., 4) of left, top, right, bottom: overlaps, offsets from anchors, and detections of all ranks.

Sizes are continuous: no pixel is added to them.
"""

import math
from typing import List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.detection.annotations import Part
from benchmarks.detection.detections import Detections, from_bytes, joined, to_bytes

# Largest offset of a size, so that its exponential stays finite (maskrcnn_benchmark/modeling/box_coder.py)
LARGEST = math.log(1000 / 16)


def overlaps(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Intersection over union (..., N, M) of ``one`` (..., N, 4) and ``other`` (..., M, 4); 0 of two points."""
    one, other = one.unsqueeze(-2), other.unsqueeze(-3)
    width = torch.minimum(one[..., 2], other[..., 2]) - torch.maximum(one[..., 0], other[..., 0])
    height = torch.minimum(one[..., 3], other[..., 3]) - torch.maximum(one[..., 1], other[..., 1])
    both = width.clamp_(min=0).mul_(height.clamp_(min=0))
    union = area(one) + area(other) - both
    return both / union.clamp_(min=torch.finfo(union.dtype).tiny)


def area(boxes: torch.Tensor) -> torch.Tensor:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def encode(boxes: torch.Tensor, anchors: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """(..., 4): offsets of ``boxes`` from ``anchors`` (arXiv 1506.01497, equation 2), times ``weights``.

    SSD divides by variances instead (arXiv 1512.02325, equation 2): weights are their inverses.
    """
    x, y, width, height = _centres(anchors)
    their_x, their_y, their_width, their_height = _centres(boxes)
    offsets = (
        (their_x - x) / width,
        (their_y - y) / height,
        torch.log(their_width / width),
        torch.log(their_height / height),
    )
    return torch.stack([weight * offset for weight, offset in zip(weights, offsets)], dim=-1)


def decode(offsets: torch.Tensor, anchors: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """(..., 4): the boxes at ``offsets`` from ``anchors``; the inverse of ``encode`` up to the limit of a size."""
    x, y, width, height = _centres(anchors)
    dx, dy, dw, dh = (offset / weight for offset, weight in zip(offsets.unbind(-1), weights))
    middle_x, middle_y = x + dx * width, y + dy * height
    half_width = dw.clamp(max=LARGEST).exp() * width / 2
    half_height = dh.clamp(max=LARGEST).exp() * height / 2
    corners = (middle_x - half_width, middle_y - half_height, middle_x + half_width, middle_y + half_height)
    return torch.stack(corners, dim=-1)


def _centres(boxes: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    left, top, right, bottom = boxes.unbind(-1)
    return (left + right) / 2, (top + bottom) / 2, right - left, bottom - top


class Found(NamedTuple):
    """K detections of a batch, image by image, by falling score."""

    images: torch.Tensor  # int64 (K,): positions in the batch
    boxes: torch.Tensor  # (K, 4), in the network's own units
    scores: torch.Tensor  # (K,)
    labels: torch.Tensor  # int64 (K,): 1 to C


def best_of_images(kept: torch.Tensor, images: torch.Tensor, limit: int) -> torch.Tensor:
    """Return ``kept`` int64 (K,), positions by falling score, image by image and at most ``limit`` of each image.

    ``images`` (N,) is the image of each position.
    """
    kept = kept[images[kept].argsort(stable=True)]
    owners = images[kept]
    rank = torch.arange(len(kept), device=kept.device) - torch.searchsorted(owners, owners)
    return kept[rank < limit]


def counted(found: Found, images: int) -> Found:
    """Return the detections in the first ``images`` images of a batch, on the CPU; the others fill it up."""
    there = found.images < images
    return Found(*(each[there].cpu() for each in found))


def in_originals(found: Found, scales: np.ndarray, edge: float = 0.0) -> np.ndarray:
    """Return the boxes, left, top, right, bottom, float32 (K, 4), in pixels of the original images.

    Args:
        found: on the CPU.
        scales: float32 (N, 2): by which x and y of each image of the batch grow.
        edge: 1 where the place of a box's last pixel is scaled, and not that behind it.
    """
    last = np.array([0, 0, edge, edge], np.float32)
    ltrb = (found.boxes.numpy().astype(np.float32) - last) * np.tile(scales[found.images.numpy()], 2) + last
    return np.asarray(ltrb, np.float32)


def detections(
    found: Found, ltrb: np.ndarray, part: Part, positions: np.ndarray, masks: Optional[Sequence[bytes]] = None
) -> Detections:
    """Return what was found in the images of ``part`` at ``positions``, with boxes and masks in their pixels."""
    return Detections(
        images=np.asarray(part.image_ids)[positions[found.images.numpy()]],
        boxes=np.concatenate((ltrb[:, :2], ltrb[:, 2:] - ltrb[:, :2]), axis=1),
        scores=found.scores.numpy().astype(np.float32),
        labels=found.labels.numpy().astype(np.int16),
        masks=masks,
    )


def gathered(own: Detections, ranks: Ranks) -> Optional[Detections]:
    """Return the detections of all ranks on rank 0, None on the others; call it on all ranks together.

    Each rank gives any number, also none, and all give masks or none does. The images of a rank are its own: one that
    fills a batch up must have been left out. The result is sorted by image id, so that it is the same for any number
    of ranks.
    """
    parts = [own] if ranks.size == 1 else [from_bytes(data) for data in _of_all_ranks(to_bytes(own), ranks)]
    return joined(parts) if ranks.rank == 0 else None


def _of_all_ranks(own: bytes, ranks: Ranks) -> List[bytes]:
    # Each rank's bytes on rank 0, nothing elsewhere; as tensors, since pickles run code
    # Gloo gathers from the memory of the CPU alone.
    device = ranks.context if dist.get_backend() == "nccl" else torch.device("cpu")
    lengths = torch.zeros(ranks.size, dtype=torch.int64, device=device)
    lengths[ranks.rank] = len(own)
    dist.all_reduce(lengths, group=pytorch.eager())
    filled = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=device)
    filled[: len(own)] = torch.from_numpy(np.frombuffer(own, np.uint8).copy()).to(device)
    found = [torch.empty_like(filled) for _ in range(ranks.size)] if ranks.rank == 0 else None
    dist.gather(filled, found, dst=0, group=pytorch.eager())
    return [each.cpu().numpy().tobytes()[:length] for each, length in zip(found or (), lengths.tolist())]
