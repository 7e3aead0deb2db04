"""Compares a prepared folder with what pycocotools makes of its JSON files: every box, category, polygon and mask."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools.coco import COCO

from benchmarks.detection.annotations import Part, open_data


def compare(part: Part, ids: list[int]) -> None:
    coco = COCO(str(part.json))
    assert sorted(coco.imgs) == part.image_ids.tolist()
    assert sorted(coco.cats) == ids
    boxes = json.loads(part.boxes_json.read_text())
    alone = boxes["annotations"]
    assert [each["file_name"] for each in boxes["images"]] == list(part.files)
    assert [each["id"] for each in boxes["categories"]] == ids and "segmentation" not in alone[0]
    for position, image_id in enumerate(part.image_ids.tolist()):
        entry = coco.imgs[image_id]
        with Image.open(part.path(position)) as image:
            assert list(image.size) == part.sizes[position].tolist() == [entry["width"], entry["height"]]
        annotations = sorted(coco.imgToAnns[image_id], key=lambda each: each["id"])
        numbers = range(part.offsets[position], part.offsets[position + 1])
        assert len(annotations) == len(numbers)
        keys = ("image_id", "category_id", "bbox")
        assert [[alone[number][key] for key in keys] for number in numbers] == [
            [annotation[key] for key in keys] for annotation in annotations
        ]
        for number, annotation in zip(numbers, annotations):
            assert np.allclose(part.boxes[number], annotation["bbox"])
            assert ids[part.labels[number] - 1] == annotation["category_id"]
            assert part.crowds[number] == annotation["iscrowd"] == isinstance(annotation["segmentation"], dict)
            polygons = [] if annotation["iscrowd"] else annotation["segmentation"]
            assert [each.ravel().tolist() for each in part.polygons(number)] == polygons
            # The stated area and box are those of the mask that pycocotools paints.
            mask = coco.annToMask(annotation)
            assert mask.sum() == annotation["area"] == part.areas[number]
            x, y, width, height = (int(value) for value in annotation["bbox"])
            assert mask[y : y + height, x : x + width].sum() == mask.sum()
            assert mask[y].any() and mask[y + height - 1].any() and mask[:, x].any() and mask[:, x + width - 1].any()


data = open_data(Path(sys.argv[1]))
category_ids = [each.id for each in data.categories]
for each in (data.train, data.val):
    compare(each, category_ids)
print("ok")
