"""Images of COCO's sizes for the self-test of SSD and Mask R-CNN: input at the rate of real ones."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Dict, List

import numpy as np

from benchmarks.common.data import prepare
from benchmarks.common.data.photographs import photographs
from benchmarks.detection.annotations import images_folder, json_file
from benchmarks.detection.preparation import data_set

WIDTH, HEIGHT = 640, 480
OBJECTS = 7  # in an image: COCO has 7.3 on average
CATEGORIES = 80
EVALUATED = 32


def real_images(folder: Path, count: int) -> None:
    """Prepare ``count`` images to train on, with random objects."""
    with tempfile.TemporaryDirectory(dir=str(folder.parent)) as raw:
        random = np.random.RandomState(0)
        for part, images in (("train", count), ("val", EVALUATED)):
            _write_part(Path(raw), part, images, random)
        code = prepare.main(data_set("ssd"), [raw, "-o", str(folder), "--progress", "json"])
    if code != 0:
        raise SystemExit(code)


def _write_part(folder: Path, part: str, count: int, random: np.random.RandomState) -> None:
    place, annotations = folder / images_folder(part), folder / json_file(part)
    for each in (place, annotations.parent):
        each.mkdir(parents=True, exist_ok=True)
    images: List[Dict[str, Any]] = []
    objects: List[Dict[str, Any]] = []
    for number, data in enumerate(photographs(count, WIDTH, HEIGHT, seed=int(part == "val")), 1):
        name = f"{number:012}.jpg"
        (place / name).write_bytes(data)
        images.append({"id": number, "file_name": name, "width": WIDTH, "height": HEIGHT})
        for _ in range(OBJECTS):
            objects.append({"id": len(objects) + 1, "image_id": number, **_rectangle(random)})
    categories = [{"id": number, "name": f"c{number}"} for number in range(1, CATEGORIES + 1)]
    content = {"images": images, "annotations": objects, "categories": categories}
    annotations.write_text(json.dumps(content), encoding="utf-8")


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
