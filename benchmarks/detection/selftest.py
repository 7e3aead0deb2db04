"""Images in COCO's sizes for the self-test of SSD and Mask R-CNN, which decode at the rate of real images."""

import tempfile
from pathlib import Path
from typing import Any, Dict

import numpy as np

from benchmarks.common.data import prepare
from benchmarks.common.data.synthetic_images import jpegs
from benchmarks.detection.preparation import data_set
from benchmarks.detection.scenes import Picture, write_part

WIDTH, HEIGHT = 640, 480
OBJECTS = 7  # in an image: COCO has 7.3 on average
CATEGORIES = 80
EVALUATED = 32


def real_images(folder: Path, count: int) -> None:
    """Prepare ``count`` images to train on, with random objects."""
    with tempfile.TemporaryDirectory(dir=str(folder.parent)) as raw:
        random = np.random.RandomState(0)
        for part, images in (("train", count), ("val", EVALUATED)):
            # A different seed for validation images
            photos = enumerate(jpegs(images, WIDTH, HEIGHT, seed=int(part == "val")), 1)
            pictures = (
                Picture(number, WIDTH, HEIGHT, jpeg, [_rectangle(random) for _ in range(OBJECTS)])
                for number, jpeg in photos
            )
            write_part(Path(raw), part, pictures, {number: f"c{number}" for number in range(1, CATEGORIES + 1)}, {})
        code = prepare.main(data_set("ssd"), [raw, "-o", str(folder), "--progress", "json"])
    if code != 0:
        raise SystemExit(code)


def _rectangle(random: np.random.RandomState) -> Dict[str, Any]:
    width, height = (int(length * share) for length, share in zip((WIDTH, HEIGHT), 0.1 + 0.3 * random.rand(2)))
    x0, y0 = int(random.randint(WIDTH - width)), int(random.randint(HEIGHT - height))
    x1, y1 = x0 + width, y0 + height
    return {
        "category_id": int(random.randint(1, CATEGORIES + 1)),
        "segmentation": [[float(coordinate) for coordinate in (x0, y0, x1, y0, x1, y1, x0, y1)]],
        "bbox": [float(coordinate) for coordinate in (x0, y0, width, height)],
        "area": float(width * height),
        "iscrowd": 0,
    }
