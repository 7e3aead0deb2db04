"""Composition of batches: images grouped by orientation, in a random order per epoch.

The number of shapes is small, so that memory, compiled code and CUDA graphs are reused. Uses only numpy.
"""

from typing import List, NamedTuple, Tuple

import numpy as np

from benchmarks.common.run.ranks import Ranks

STRIDE = 32  # stride of the deepest stage of the backbone: sides are multiples
Shape = Tuple[int, int]  # padded height and width of the images in a batch


class ImageBatch(NamedTuple):
    """Images that are padded to one shape."""

    shape: Shape
    positions: np.ndarray  # int64: positions of the images in the part


def resize(sizes: np.ndarray, short_side: int, long_side: int) -> np.ndarray:
    """Return the width and height after resizing, int64 (N, 2), for ``sizes`` (N, 2).

    The shorter side becomes ``short_side`` unless the longer side would exceed ``long_side``; the longer side is
    rounded down (maskrcnn_benchmark/data/transforms/transforms.py, Resize.get_size).
    """
    sides = sizes.astype(np.float64)
    short_edge, long = sides.min(1), sides.max(1)
    short = np.where(long / short_edge * short_side > long_side, np.rint(long_side * short_edge / long), short_side)
    scaled = (short[:, None] * sides / short_edge[:, None]).astype(np.int64)
    sizes_out = np.where(sides == short_edge[:, None], short[:, None], scaled)
    # The rounding of very long images exceeds the limit; they still have to fit into the longest shape.
    return sizes_out.clip(1, _multiple(long_side, STRIDE)).astype(np.int64)


def shapes(sizes: np.ndarray, short_side: int, long_side: int, step: int) -> np.ndarray:
    """Return the padded height and width, int64 (N, 2), for resized ``sizes`` (N, 2).

    The longer side is a multiple of ``step`` up to ``long_side``; the shorter side is the same for all images.
    """
    short, longest = _multiple(short_side, STRIDE), _multiple(long_side, STRIDE)
    longer = np.minimum(-(-sizes.max(1) // step) * step, longest).clip(min=short)
    is_wide = sizes[:, 0] > sizes[:, 1]
    return np.stack((np.where(is_wide, short, longer), np.where(is_wide, longer, short)), axis=1)


def all_shapes(short_side: int, long_side: int, step: int) -> List[Shape]:
    """Return every shape that a batch can have, the largest first."""
    short, longest = _multiple(short_side, STRIDE), _multiple(long_side, STRIDE)
    sides = {min(max(short, longer), longest) for longer in range(step, longest + step, step)}
    pairs = {(longest, longest), *((short, length) for length in sides), *((length, short) for length in sides)}
    return sorted(pairs, key=lambda shape: (-shape[0] * shape[1], shape))


def _multiple(length: int, of: int) -> int:
    return -(-length // of) * of


def batches(
    sizes: np.ndarray, padded_shapes: np.ndarray, positions: np.ndarray, batch: int, seed: int, epoch: int, ranks: Ranks
) -> List[ImageBatch]:
    """Return a rank's batches in an epoch, with ``batch`` images each; incomplete batches are filled with repeated
    images.

    As in DistributedSampler and GroupedBatchSampler in the submissions (maskrcnn_benchmark/data/samplers): a rank
    has a shard of the shuffled images and groups it into wide and other images; batches are ordered by the first
    image. In the submissions a group's last batch is smaller. Here the remaining images in both groups share a
    square batch if they fit, so that the number of batches is the same on all ranks and in all epochs.

    Args:
        sizes: (N, 2), width and height of all images after resizing.
        padded_shapes: (N, 2), shapes of all images.
        positions: training images.
        batch: images per rank and step.
        seed: of the run.
        epoch: counted from 0.
        ranks: this rank and the number of ranks.
    """
    per_rank = -(-len(positions) // ranks.size)
    shuffled = np.random.RandomState([seed & 0xFFFFFFFF, epoch]).permutation(positions)
    local = np.resize(shuffled, per_rank * ranks.size)[ranks.rank * per_rank :][:per_rank]
    is_wide = sizes[local, 0] > sizes[local, 1]
    groups = [np.flatnonzero(is_wide), np.flatnonzero(~is_wide)]
    full = [group[: len(group) // batch * batch].reshape(-1, batch) for group in groups]
    rests = [
        (group, group[group_full.size :]) for group, group_full in zip(groups, full) if group_full.size < len(group)
    ]
    if len(rests) == 2 and sum(len(rest) for _, rest in rests) <= batch:
        rests = [(np.arange(per_rank), np.sort(np.concatenate([rest for _, rest in rests])))]
    filled = [np.concatenate((rest, np.resize(group, batch - len(rest))))[None] for group, rest in rests]
    rows = np.concatenate((*full, *filled))
    return [_pad_to_shape(local[row], padded_shapes) for row in rows[rows[:, 0].argsort()]]


def _pad_to_shape(positions: np.ndarray, padded_shapes: np.ndarray) -> ImageBatch:
    # Use a shape that fits all images: a batch of wide and high images is a square
    height, width = padded_shapes[positions].max(0).tolist()
    short, longest = int(padded_shapes.min()), int(padded_shapes.max())
    return ImageBatch((height, width) if short in (height, width) else (longest, longest), positions)


def evaluation(padded_shapes: np.ndarray, size: int) -> List[ImageBatch]:
    """Return batches of up to ``size`` images of the same shape, with every image exactly once."""
    batches = []
    for shape in np.unique(padded_shapes, axis=0):
        group = np.flatnonzero((padded_shapes == shape).all(1))
        parts = np.split(group, range(size, len(group), size))
        batches += [ImageBatch((int(shape[0]), int(shape[1])), part) for part in parts]
    return batches
