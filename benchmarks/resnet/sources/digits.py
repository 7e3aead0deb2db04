"""The toy data set: real handwritten digits that come with scikit-learn, so nothing is downloaded."""

from __future__ import annotations

import io

from benchmarks.common.data.problem import Problem
from benchmarks.resnet.sources.listing import Item, Source, by_label

DIGITS_HELD_OUT = 297
DIGITS_SIDE = 32  # pixels. An 8x8 digit would be a single JPEG block, and no crop or resize would leave a stroke whole.
DIGITS_QUALITY = 95  # JPEG quality: high, because the blocks of a low one are as large as the strokes


def list_digits(seed: int) -> Source:
    """List scikit-learn's 1,797 handwritten digits: 1,500 to train on, 297 held out, every class in both alike.

    They are enlarged from 8x8 to 32x32 by the bicubic filter and stored as JPEG of quality 95, so that
    the whole path from decoding to cropping is the one that ImageNet takes.
    """
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise Problem(
            f"{error.name} is not installed in this Python", "scikit-learn", "pip install scikit-learn pillow"
        ) from None
    digits = load_digits()
    items = []
    for number, label in enumerate(digits.target):
        gray = Image.fromarray((digits.images[number] * (255 / 16)).round().astype("uint8"))
        buffer = io.BytesIO()
        large = gray.resize((DIGITS_SIDE, DIGITS_SIDE), Image.BICUBIC).convert("RGB")
        large.save(buffer, "JPEG", quality=DIGITS_QUALITY)
        payload = buffer.getvalue()
        items.append(Item(f"{label}/{number:04}.jpg", int(label), "", -1, len(payload), 0, payload))
    classes = tuple(str(label) for label in range(10))
    made = (
        f"scikit-learn's load_digits, 8x8 enlarged to {DIGITS_SIDE}x{DIGITS_SIDE} by the bicubic filter, "
        f"JPEG of quality {DIGITS_QUALITY}; {DIGITS_HELD_OUT} of {len(items):,} held out here"
    )
    # The k-th of n images of a class is at the fraction k/n: a cut through the sorted fractions takes
    # the same share of every class.
    ranked = sorted(
        ((place + 0.5) / len(group), item.label, item)
        for group in by_label(items, seed)
        for place, item in enumerate(group)
    )
    chosen = [item for _, _, item in ranked]
    images = {"train": chosen[DIGITS_HELD_OUT:], "val": chosen[:DIGITS_HELD_OUT]}
    return Source("digits", classes, images, made)
