"""Which images make which batches: images of about one shape together, in an order that an epoch draws.

Shapes are few, so that memory, compiled code and CUDA graphs of one batch serve all others of its shape. numpy alone.
"""

from __future__ import annotations

from typing import List, NamedTuple, Tuple

import numpy as np

STRIDE = 32
"""Of the deepest stage of the backbone: sides are multiples."""
Shape = Tuple[int, int]
"""Height and width to which the images of a batch are padded."""


class GlobalBatch(NamedTuple):
    """The images of all ranks for one step."""

    shape: Shape
    positions: np.ndarray
    """int64: of the images in their part."""


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
    # Of very long images the rounding exceeds the limit; they still have to fit into the longest shape.
    return found.clip(1, _multiple(long_side, STRIDE)).astype(np.int64)


def shapes(sizes: np.ndarray, short_side: int, long_side: int, step: int) -> np.ndarray:
    """Return int64 (N, 2), height and width to which each image is padded, of resized ``sizes`` (N, 2).

    The longer side is a multiple of ``step``, at most ``long_side``; the shorter one is that of all images.
    """
    short, most = _multiple(short_side, STRIDE), _multiple(long_side, STRIDE)
    longer = np.minimum(-(-sizes.max(1) // step) * step, most).clip(min=short)
    is_wide = sizes[:, 0] >= sizes[:, 1]
    return np.stack((np.where(is_wide, short, longer), np.where(is_wide, longer, short)), axis=1)


def all_shapes(short_side: int, long_side: int, step: int) -> List[Shape]:
    """Return every shape that a batch can have, the largest first."""
    short, most = _multiple(short_side, STRIDE), _multiple(long_side, STRIDE)
    sides = sorted({min(max(short, longer), most) for longer in range(step, most + step, step)}, reverse=True)
    pairs = {(most, most), *((short, side) for side in sides), *((side, short) for side in sides)}
    return sorted(pairs, key=lambda shape: (-shape[0] * shape[1], shape))


def _multiple(length: int, of: int) -> int:
    return -(-length // of) * of


def batches(wanted: np.ndarray, positions: np.ndarray, size: int, seed: int, epoch: int) -> List[GlobalBatch]:
    """Return the batches of an epoch, each of ``size`` images; what does not fill the last one is drawn again.

    What is left of a shape goes to the next longer one; what is left of wide and of high ones meets in squares.

    Args:
        wanted: (N, 2), shapes of all images.
        positions: of the images that are trained on.
        size: of a global batch.
        seed: of the run.
        epoch: from 0.
    """
    random = np.random.RandomState([seed & 0xFFFFFFFF, epoch])
    shuffled = random.permutation(positions)
    longest = int(wanted.max())
    found: List[GlobalBatch] = []
    rest = np.zeros(0, dtype=np.int64)
    for axis in (0, 1):
        # The axis of the longer side; squares count as wide.
        is_high = wanted[shuffled, 0] > wanted[shuffled, 1]
        full, left = _chain(wanted, shuffled[is_high == (axis == 0)], axis, size)
        found += full
        rest = np.concatenate((rest, left))
    missing = -len(rest) % size
    rest = np.concatenate((rest, np.resize(shuffled, missing)))
    found += [GlobalBatch((longest, longest), part) for part in np.split(rest, len(rest) // size)] if len(rest) else []
    return [found[number] for number in random.permutation(len(found))]


def _chain(wanted: np.ndarray, mine: np.ndarray, axis: int, size: int) -> Tuple[List[GlobalBatch], np.ndarray]:
    """Fill batches shape by shape, and return them with what is left behind the longest."""
    found, left = [], np.zeros(0, dtype=np.int64)
    for longer in np.unique(wanted[mine, axis]):
        group = np.concatenate((left, mine[wanted[mine, axis] == longer]))
        shape = wanted[group[-1]]
        full = len(group) // size * size
        found += [GlobalBatch((int(shape[0]), int(shape[1])), part) for part in group[:full].reshape(-1, size)]
        left = group[full:]
    return found, left


def evaluation(wanted: np.ndarray, size: int) -> List[GlobalBatch]:
    """Return batches of up to ``size`` images of one shape, so that each image comes once."""
    found = []
    for shape in np.unique(wanted, axis=0):
        group = np.flatnonzero((wanted == shape).all(1))
        parts = np.split(group, range(size, len(group), size))
        found += [GlobalBatch((int(shape[0]), int(shape[1])), part) for part in parts]
    return found
