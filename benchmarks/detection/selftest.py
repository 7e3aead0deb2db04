"""Images of COCO's sizes for the self-test of SSD and Mask R-CNN: input at the rate of real ones."""

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
            # Another seed for other images to evaluate on
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
    width, height = (int(side * share) for side, share in zip((WIDTH, HEIGHT), 0.1 + 0.3 * random.rand(2)))
    left, top = int(random.randint(WIDTH - width)), int(random.randint(HEIGHT - height))
    right, bottom = left + width, top + height
    return {
        "category_id": int(random.randint(1, CATEGORIES + 1)),
        "segmentation": [[float(each) for each in (left, top, right, top, right, bottom, left, bottom)]],
        "bbox": [float(each) for each in (left, top, width, height)],
        "area": float(width * height),
        "iscrowd": 0,
    }
