"""Detections made from the objects of a set: as they are, or moved and with others that are wrong."""

import json
from functools import cache

import numpy as np
from pycocotools import mask as rle

from benchmarks.detection import detections, evaluation


@cache
def _annotations(path):
    by_image = {}
    for annotation in json.loads(path.read_text(encoding="utf-8"))["annotations"]:
        by_image.setdefault(annotation["image_id"], []).append(annotation)
    return by_image


def noisy(data, position: int, spread: float) -> detections.Detections:
    # The objects, moved by ``spread`` of their size (standard deviation), and as many in wrong places if it is not 0. A
    # pure function of the image, whichever rank makes it
    image = int(data.val.image_ids[position])
    width, height = data.val.sizes[position].tolist()
    places = {each.id: place for place, each in enumerate(data.categories, start=1)}
    numbers, rows = np.random.default_rng([image, round(1e6 * spread)]), []
    for each in _annotations(data.val.json).get(image, ()):
        label, (x, y, w, h) = places[each["category_id"]], each["bbox"]
        mask = rle.decode(evaluation.to_rle(each["segmentation"], height, width))
        moves = numbers.normal(0, spread, 2) * (w, h) if spread else np.zeros(2)
        wrong = numbers.normal(0, 1.0, 2) * (w, h)
        for (right, down), score in ((moves, numbers.uniform(0.3, 1)), (wrong, numbers.uniform(0, 0.7)))[
            : 2 if spread else 1
        ]:
            counts = rle.encode(np.asfortranarray(np.roll(mask, (round(down), round(right)), (0, 1))))["counts"]
            # Scores of few digits, so that some are equal.
            rows.append(([x + right, y + down, w, h], round(score, 1), label, counts))
    boxes = np.array([row[0] for row in rows], np.float32).reshape(-1, 4)
    scores, labels = np.array([row[1] for row in rows], np.float32), np.array([row[2] for row in rows], np.int16)
    return detections.Detections(np.full(len(rows), image, np.int64), boxes, scores, labels, [row[3] for row in rows])
