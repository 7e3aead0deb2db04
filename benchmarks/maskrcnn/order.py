"""Which images make which batches: wide images together and high ones, in an order that an epoch draws.

Shapes are few, so that memory, compiled code and CUDA graphs of one batch serve all others of its shape. numpy alone.
"""

from typing import List, NamedTuple, Tuple

import numpy as np

from benchmarks.common.run.ranks import Ranks

STRIDE = 32  # stride of the deepest stage of the backbone: sides are multiples
Shape = Tuple[int, int]  # height and width to which the images of a batch are padded


class ImageBatch(NamedTuple):
    """Images that are padded to one shape."""

    shape: Shape
    positions: np.ndarray  # int64: of the images in their part


def resized(sizes: np.ndarray, short_side: int, long_side: int) -> np.ndarray:
    """Return int64 (N, 2), width and height after resizing, of ``sizes`` (N, 2).

    The shorter side becomes ``short_side`` unless the longer one would exceed ``long_side``; the longer one is rounded
    down (maskrcnn_benchmark/data/transforms/transforms.py, Resize.get_size).
    """
    sides = sizes.astype(np.float64)
    least, most = sides.min(1), sides.max(1)
    short = np.where(most / least * short_side > long_side, np.rint(long_side * least / most), short_side)
    scaled = (short[:, None] * sides / least[:, None]).astype(np.int64)
    found = np.where(sides == least[:, None], short[:, None], scaled)
    # The rounding of very long images exceeds the limit; they still have to fit into the longest shape.
    return found.clip(1, _multiple(long_side, STRIDE)).astype(np.int64)


def shapes(sizes: np.ndarray, short_side: int, long_side: int, step: int) -> np.ndarray:
    """Return int64 (N, 2), height and width to which each image is padded, of resized ``sizes`` (N, 2).

    The longer side is a multiple of ``step``, at most ``long_side``; the shorter one is that of all images.
    """
    short, most = _multiple(short_side, STRIDE), _multiple(long_side, STRIDE)
    longer = np.minimum(-(-sizes.max(1) // step) * step, most).clip(min=short)
    is_wide = sizes[:, 0] > sizes[:, 1]
    return np.stack((np.where(is_wide, short, longer), np.where(is_wide, longer, short)), axis=1)


def all_shapes(short_side: int, long_side: int, step: int) -> List[Shape]:
    """Return every shape that a batch can have, the largest first."""
    short, most = _multiple(short_side, STRIDE), _multiple(long_side, STRIDE)
    sides = {min(max(short, longer), most) for longer in range(step, most + step, step)}
    pairs = {(most, most), *((short, side) for side in sides), *((side, short) for side in sides)}
    return sorted(pairs, key=lambda shape: (-shape[0] * shape[1], shape))


def _multiple(length: int, of: int) -> int:
    return -(-length // of) * of


def batches(
    sizes: np.ndarray, wanted: np.ndarray, positions: np.ndarray, batch: int, seed: int, epoch: int, ranks: Ranks
) -> List[ImageBatch]:
    """Return a rank's batches of an epoch, each of ``batch`` images; what does not fill one is filled up again.

    As DistributedSampler and GroupedBatchSampler of the submissions (maskrcnn_benchmark/data/samplers): a rank has a
    share of the shuffled images, and groups it by itself into those that are wider than high and the others; batches
    come in the order of their first images. There a group's last batch is smaller; here the last images of both groups
    share a batch of squares where one holds them, so that all ranks have as many batches in each epoch.

    Args:
        sizes: (N, 2), width and height of all images after resizing.
        wanted: (N, 2), shapes of all images.
        positions: of the images that are trained on.
        batch: images of a rank in a step.
        seed: of the run.
        epoch: from 0.
        ranks: of the job: which rank's.
    """
    each = -(-len(positions) // ranks.size)
    shuffled = np.random.RandomState([seed & 0xFFFFFFFF, epoch]).permutation(positions)
    mine = np.resize(shuffled, each * ranks.size)[ranks.rank * each :][:each]
    is_wide = sizes[mine, 0] > sizes[mine, 1]
    groups = [np.flatnonzero(is_wide), np.flatnonzero(~is_wide)]
    full = [group[: len(group) // batch * batch].reshape(-1, batch) for group in groups]
    rests = [
        (group, group[group_full.size :]) for group, group_full in zip(groups, full) if group_full.size < len(group)
    ]
    if len(rests) == 2 and sum(len(rest) for _, rest in rests) <= batch:
        rests = [(np.arange(each), np.sort(np.concatenate([rest for _, rest in rests])))]
    filled = [np.concatenate((rest, np.resize(group, batch - len(rest))))[None] for group, rest in rests]
    places = np.concatenate((*full, *filled))
    return [_padded(mine[row], wanted) for row in places[places[:, 0].argsort()]]


def _padded(positions: np.ndarray, wanted: np.ndarray) -> ImageBatch:
    # A batch in the shape that holds all of its images: one of wide and of high ones is a square
    height, width = wanted[positions].max(0).tolist()
    short, longest = int(wanted.min()), int(wanted.max())
    return ImageBatch((height, width) if short in (height, width) else (longest, longest), positions)


def evaluation(wanted: np.ndarray, size: int) -> List[ImageBatch]:
    """Return batches of up to ``size`` images of one shape, so that each image comes once."""
    found = []
    for shape in np.unique(wanted, axis=0):
        group = np.flatnonzero((wanted == shape).all(1))
        parts = np.split(group, range(size, len(group), size))
        found += [ImageBatch((int(shape[0]), int(shape[1])), part) for part in parts]
    return found
