"""The images of an evaluation with the best and the worst results: what was found in them and what is there.

``detections.jsonl`` has one line an image: a JPEG of at most LONGEST pixels a side, in base64, boxes in its pixels, and
masks as runs of its pixels. `encore report --detections` and the report draw them.
"""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
from PIL import Image
from pycocotools import mask as rle

from benchmarks.detection.annotations import DataSet
from benchmarks.detection.evaluation import Compared, Truth

FILE = "detections.jsonl"  # in the folder of an experiment
SHOWN = 4  # images at each end
LONGEST = 400  # pixels of a picture's longer side; a smaller image stays as it is
LOWEST_SCORE = 0.3
MOST = 20  # detections that are drawn in an image, with at least LOWEST_SCORE
JPEG_QUALITY = 80


def write(output: Path, epoch: int, truth: Truth, compared: Compared, data: DataSet) -> None:
    """Replace the file by the pictures of ``epoch``, from 1; whoever reads finds the old file or the new one whole."""
    path = output / FILE
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        for line in _lines(truth, compared, data):
            file.write(json.dumps({"epoch": epoch, **line}) + "\n")
    temporary.replace(path)


def image_precision(matched: np.ndarray, ignored: np.ndarray, scores: np.ndarray, objects: int) -> float:
    """Return the average precision within one image at one overlap, all of its categories together, 0 to 1.

    Args:
        matched: bool (D,), in any order.
        ignored: bool (D,): matches a crowd.
        scores: float (D,)
        objects: number of objects that are no crowds, at least 1.
    """
    order = np.argsort(-scores[~ignored], kind="stable")
    hits = matched[~ignored][order]
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float(envelope[hits].sum() / objects)


def _lines(truth: Truth, compared: Compared, data: DataSet) -> Iterator[Dict[str, Any]]:
    ranked = sorted(_precisions(truth, compared, data), key=lambda each: (-each[0], -each[1], each[2]))
    best, worst = ranked[:SHOWN], ranked[SHOWN:][-SHOWN:][::-1]
    for which, chosen in (("best", best), ("worst", worst)):
        for precision, _, position in chosen:
            yield {"which": which, "precision": round(precision, 4), **_picture(position, truth, compared, data)}


def _precisions(truth: Truth, compared: Compared, data: DataSet) -> Iterator[Tuple[float, int, int]]:
    # Precision at the lowest overlap, number of objects and position of each image that has an object
    kind = truth.kinds[-1]
    matched, ignored = (each[0] for each in compared.matches[kind])
    by_image = _by_image(compared, len(data.val))
    for position in range(len(data.val)):
        of_image = slice(int(data.val.offsets[position]), int(data.val.offsets[position + 1]))
        objects = int(np.count_nonzero(~data.val.crowds[of_image]))
        if objects:
            own = by_image(position)
            scores = compared.detections.scores[own]
            yield image_precision(matched[own], ignored[own], scores, objects), objects, position


def _by_image(compared: Compared, images: int) -> Any:
    places = compared.keys % images
    order = np.argsort(places, kind="stable")
    bounds = np.searchsorted(places[order], np.arange(images + 1))
    return lambda position: order[bounds[position] : bounds[position + 1]]


def _picture(position: int, truth: Truth, compared: Compared, data: DataSet) -> Dict[str, Any]:
    with Image.open(data.val.path(position)) as opened:
        image = opened.convert("RGB")
    scale = min(1.0, LONGEST / max(image.size))
    size = tuple(max(1, round(side * scale)) for side in image.size)
    written = io.BytesIO()
    image.resize(size, Image.BILINEAR).save(written, "JPEG", quality=JPEG_QUALITY)
    names = [each.name for each in data.categories]
    number = int(data.val.image_ids[position])
    own = np.flatnonzero(compared.detections.images == number)
    own = own[np.argsort(-compared.detections.scores[own], kind="stable")][:MOST]
    own = own[compared.detections.scores[own] >= LOWEST_SCORE]
    found, matched = compared.detections.take(own), compared.matches[truth.kinds[-1]][0][0, own]
    masks: Sequence[Optional[bytes]] = found.masks or [None] * len(found)
    rows = zip(found.labels.tolist(), found.boxes.tolist(), found.scores.tolist(), matched.tolist(), masks)
    original = (image.size[1], image.size[0])
    return {
        "image": number,
        "file": data.val.files[position],
        "width": size[0],
        "height": size[1],
        "jpeg": base64.b64encode(written.getvalue()).decode("ascii"),
        "truth": [
            {
                **_shape(names[label - 1], each["bbox"], each.get("segmentation"), size, scale),
                "crowd": bool(each["iscrowd"]),
            }
            for label, each in truth.objects_of(number)
        ],
        "found": [
            {
                **_shape(names[label - 1], box, mask and {"size": original, "counts": mask}, size, scale),
                "score": round(score, 3),
                "matched": hit,
            }
            for label, box, score, hit, mask in rows
        ],
    }


def _shape(name: str, box: Sequence[float], mask: Any, size: Tuple[int, ...], scale: float) -> Dict[str, Any]:
    shape: Dict[str, Any] = {"label": name, "box": [round(number * scale, 1) for number in box]}
    if mask is not None:
        shape["runs"] = _runs(np.asarray(Image.fromarray(rle.decode(mask)).resize(size, Image.NEAREST)))
    return shape


def _runs(mask: np.ndarray) -> List[int]:
    # X, y and length of each run of pixels in a row of ``mask``, (height, width)
    edges = np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    rows, begins = np.nonzero(edges == 1)
    _, ends = np.nonzero(edges == -1)
    return np.stack([begins, rows, ends - begins], axis=1).reshape(-1).tolist()
