"""Boxes as tensors (..., 4) of left, top, right, bottom: IoU, offsets from anchors, and gathering of detections.

Sizes are continuous: width = right - left.
"""

import math
from typing import List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.detection.annotations import Part
from benchmarks.detection.detections import Detections, from_bytes, join_detections, to_bytes

# Limit for size offsets, so that the exponential is finite (maskrcnn_benchmark/modeling/box_coder.py)
LARGEST = math.log(1000 / 16)


def overlaps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Intersection over union (..., N, M) of ``a`` (..., N, 4) and ``b`` (..., M, 4); 0 of two points."""
    a, b = a.unsqueeze(-2), b.unsqueeze(-3)
    width = torch.minimum(a[..., 2], b[..., 2]) - torch.maximum(a[..., 0], b[..., 0])
    height = torch.minimum(a[..., 3], b[..., 3]) - torch.maximum(a[..., 1], b[..., 1])
    both = width.clamp_(min=0).mul_(height.clamp_(min=0))
    union = area(a) + area(b) - both
    return both / union.clamp_(min=torch.finfo(union.dtype).tiny)


def area(boxes: torch.Tensor) -> torch.Tensor:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def encode(boxes: torch.Tensor, anchors: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Return the offsets (..., 4) of ``boxes`` from ``anchors`` (arXiv 1506.01497, equation 2), times ``weights``.

    SSD divides by variances (arXiv 1512.02325, equation 2): the weights are 1 / variance.
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
    """Return the boxes (..., 4) for ``offsets`` from ``anchors``: the inverse of ``encode``, with limited sizes."""
    x, y, width, height = _centres(anchors)
    dx, dy, dw, dh = (offset / weight for offset, weight in zip(offsets.unbind(-1), weights))
    middle_x, middle_y = x + dx * width, y + dy * height
    half_width = dw.clamp(max=LARGEST).exp() * width / 2
    half_height = dh.clamp(max=LARGEST).exp() * height / 2
    corners = (middle_x - half_width, middle_y - half_height, middle_x + half_width, middle_y + half_height)
    return torch.stack(corners, dim=-1)


def _centres(boxes: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x0, y0, x1, y1 = boxes.unbind(-1)
    return (x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0


class DetectedBoxes(NamedTuple):
    """K detections in a batch, sorted by image and descending score."""

    images: torch.Tensor  # int64 (K,): positions in the batch
    boxes: torch.Tensor  # (K, 4), in units of the network
    scores: torch.Tensor  # (K,)
    labels: torch.Tensor  # int64 (K,): 1 to C


def top_per_image(positions: torch.Tensor, images: torch.Tensor, limit: int) -> torch.Tensor:
    """Return ``positions`` int64 (K,), given by descending score, grouped by image, with up to ``limit`` per image.

    ``images`` (N,) is the image of every position.
    """
    positions = positions[images[positions].argsort(stable=True)]
    owners = images[positions]
    rank = torch.arange(len(positions), device=positions.device) - torch.searchsorted(owners, owners)
    return positions[rank < limit]


def drop_padding(detected: DetectedBoxes, images: int) -> DetectedBoxes:
    """Return the detections in the first ``images`` images, on the CPU. The other images in the batch are padding."""
    in_batch = detected.images < images
    return DetectedBoxes(*(tensor[in_batch].cpu() for tensor in detected))


def to_original(detected: DetectedBoxes, scales: np.ndarray, edge: float = 0.0) -> np.ndarray:
    """Return the boxes float32 (K, 4) (left, top, right, bottom) in pixels of the original images.

    Args:
        detected: on the CPU.
        scales: float32 (N, 2): scale factors for x and y by image of the batch.
        edge: 1 for boxes that are scaled by the position of the last pixel, 0 for continuous boxes.
    """
    last = np.array([0, 0, edge, edge], np.float32)
    ltrb = (detected.boxes.numpy().astype(np.float32) - last) * np.tile(scales[detected.images.numpy()], 2) + last
    return np.asarray(ltrb, np.float32)


def detections(
    detected: DetectedBoxes,
    ltrb: np.ndarray,
    part: Part,
    positions: np.ndarray,
    masks: Optional[Sequence[bytes]] = None,
) -> Detections:
    """Return the Detections in the images of ``part`` at ``positions``, with boxes and masks in original pixels."""
    return Detections(
        images=np.asarray(part.image_ids)[positions[detected.images.numpy()]],
        boxes=np.concatenate((ltrb[:, :2], ltrb[:, 2:] - ltrb[:, :2]), axis=1),
        scores=detected.scores.numpy().astype(np.float32),
        labels=detected.labels.numpy().astype(np.int16),
        masks=masks,
    )


def gather_detections(local: Detections, ranks: Ranks) -> Optional[Detections]:
    """Return the detections of all ranks on rank 0, None on other ranks. Collective call.

    A rank may be without detections. Masks must be present on all ranks or on none. Every image belongs to one rank;
    images that pad a batch must have been removed. The result is sorted by image id and does not depend on the
    number of ranks.
    """
    parts = [local] if ranks.size == 1 else [from_bytes(data) for data in _gather_bytes(to_bytes(local), ranks)]
    return join_detections(parts) if ranks.rank == 0 else None


def _gather_bytes(local: bytes, ranks: Ranks) -> List[bytes]:
    # Gather bytes on rank 0; other ranks return an empty list. Tensors are used because unpickling runs code. Gloo
    # gathers only CPU tensors.
    device = ranks.context if dist.get_backend() == "nccl" else torch.device("cpu")
    lengths = torch.zeros(ranks.size, dtype=torch.int64, device=device)
    lengths[ranks.rank] = len(local)
    dist.all_reduce(lengths, group=pytorch.eager())
    filled = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=device)
    filled[: len(local)] = torch.from_numpy(np.frombuffer(local, np.uint8).copy()).to(device)
    gather_detections = [torch.empty_like(filled) for _ in range(ranks.size)] if ranks.rank == 0 else None
    dist.gather(filled, gather_detections, dst=0, group=pytorch.eager())
    return [
        tensor.cpu().numpy().tobytes()[:length] for tensor, length in zip(gather_detections or (), lengths.tolist())
    ]
