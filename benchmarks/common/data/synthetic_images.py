"""Synthetic JPEGs with the size and decoding cost of photographs.

for number, data in enumerate(jpegs(256, 500, 375)):
    (folder / f"{number}.jpg").write_bytes(data)
"""

import io
from typing import Iterator

import numpy as np

CELL = 16  # pixels between two colours of the soft background
GRAIN = 12  # maximum brightness noise per pixel
# With CELL and GRAIN 108 KB for 500 x 375 pixels, as ImageNet's images have on average, and 176 KB for 640 x 480, where
# COCO's have 163 KB.
QUALITY = 95


def jpegs(count: int, width: int, height: int, seed: int = 0) -> Iterator[bytes]:
    """Yield synthetic JPEG images, deterministic for a given seed."""
    from PIL import Image

    random = np.random.RandomState(seed)
    for _ in range(count):
        colours = random.randint(0, 256, (height // CELL, width // CELL, 3)).astype(np.uint8)
        soft = np.asarray(Image.fromarray(colours).resize((width, height), Image.BICUBIC)).astype(np.int16)
        pixels = soft + random.randint(-GRAIN, GRAIN + 1, (height, width, 1))
        buffer = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=QUALITY)
        yield buffer.getvalue()
