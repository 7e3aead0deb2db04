"""COCO's data and average precision on two ranks, compared with pycocotools."""

import io
import json
from contextlib import redirect_stdout

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from benchmarks.common.frameworks import pytorch
from benchmarks.detection.annotations import open_data
from benchmarks.detection.detections import DTYPES, empty, join_detections, to_bytes
from benchmarks.detection.evaluation import KINDS, coco_ap
from benchmarks.detection.pytorch.boxes import gather_detections
from benchmarks.ssd import prepare
from tests.in_framework.some_detections import noisy

RANKS = (2,)


@pytest.fixture(scope="module")
def data(ranks, together):
    folder = together / "ssd"
    if ranks.rank == 0:
        assert prepare.main(["-o", str(folder), "--scenes", "100", "--workers", "1"]) == 0
    pytorch.barrier()
    return open_data(folder)


@pytest.mark.parametrize("part", ["train", "val"])
def test_boxes_categories_polygons_and_masks_match_pycocotools(data, part):
    part, ids = getattr(data, part), [category.id for category in data.categories]
    coco, boxes = COCO(str(part.json)), json.loads(part.boxes_json.read_text())
    assert sorted(coco.imgs) == part.image_ids.tolist()
    assert sorted(coco.cats) == ids == [category["id"] for category in boxes["categories"]]
    assert [image["file_name"] for image in boxes["images"]] == list(part.files)
    annotations = [annotation for image in part.image_ids for annotation in coco.imgToAnns[image]]
    assert np.diff(part.offsets).tolist() == [len(coco.imgToAnns[image]) for image in part.image_ids]
    keys = ("image_id", "category_id", "bbox")
    assert boxes["annotations"] == [
        {**box, "id": number, **{key: annotation[key] for key in keys}}
        for number, (box, annotation) in enumerate(zip(boxes["annotations"], annotations, strict=True), 1)
    ]
    for position, image in enumerate(part.image_ids):
        with Image.open(part.path(position)) as opened:
            sizes = [opened.size, (coco.imgs[image]["width"], coco.imgs[image]["height"])]
        assert sizes == [tuple(part.sizes[position])] * 2
    for number, annotation in enumerate(annotations):
        assert part.boxes[number] == pytest.approx(annotation["bbox"])
        assert ids[part.labels[number] - 1] == annotation["category_id"]
        assert part.crowds[number] == annotation["iscrowd"] == isinstance(annotation["segmentation"], dict)
        polygons = [] if annotation["iscrowd"] else annotation["segmentation"]
        assert [polygon.ravel().tolist() for polygon in part.polygons(number)] == polygons
        # Area and box of the mask that pycocotools draws.
        mask = coco.annToMask(annotation)
        assert mask.sum() == annotation["area"] == part.areas[number]
        y, x = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        assert annotation["bbox"] == [x[0], y[0], x[-1] - x[0] + 1, y[-1] - y[0] + 1]


def pycocotools_ap(data, detections, kind):
    coco, rows = COCO(str(data.val.json)), []
    for place, image in enumerate(detections.images.tolist()):
        size = [coco.imgs[image]["height"], coco.imgs[image]["width"]]
        mask = {"size": size, "counts": detections.masks[place]}
        shape = {"bbox": detections.boxes[place].tolist()} if kind == "bbox" else {"segmentation": mask}
        category = data.categories[int(detections.labels[place]) - 1].id
        rows.append({"image_id": image, "category_id": category, "score": float(detections.scores[place]), **shape})
    evaluation = COCOeval(coco, coco.loadRes(rows), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return float(evaluation.stats[0])


@pytest.mark.parametrize("alternating", [True, False])
@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_average_precision_equals_pycocotools(ranks, data, spread, alternating):
    """Bit for bit, with images on alternating ranks, or all on the last rank."""
    images = len(data.val) - (spread > 0)
    own = range(ranks.rank, images, 2) if alternating else range(ranks.rank * images)
    detections = gather_detections(
        join_detections([empty(masks=True), *(noisy(data, position, spread) for position in own)]), ranks
    )
    if ranks.rank:
        assert detections is None
        return
    expected = join_detections([noisy(data, position, spread) for position in range(images)])
    assert to_bytes(detections) == to_bytes(expected)
    assert {name: getattr(detections, name).dtype for name in DTYPES} == DTYPES
    precision = coco_ap(data, detections, KINDS)
    with redirect_stdout(io.StringIO()):
        expected = {kind: pycocotools_ap(data, detections, kind) for kind in KINDS}
    assert precision == expected
    assert precision == dict.fromkeys(KINDS, 1.0) if not spread else 0.1 < precision["segm"] < precision["bbox"] < 0.9


def test_empty_and_invalid_detections(ranks, data):
    detections = gather_detections(empty(), ranks)
    assert detections is None if ranks.rank else coco_ap(data, detections) == {"bbox": 0.0}
    with pytest.raises(RuntimeError, match="detections without masks cannot be compared with masks"):
        coco_ap(data, empty(), KINDS)
    repeated = noisy(data, int(data.val.with_objects[0]), 0.0)
    if ranks.rank:
        assert gather_detections(repeated, ranks) is None
        return
    with pytest.raises(RuntimeError, match="was evaluated 2 times, by different ranks"):
        gather_detections(repeated, ranks)
