"""COCO's data and average precision on two ranks, compared with pycocotools."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from benchmarks.common.frameworks import pytorch
from benchmarks.detection.annotations import open_data
from benchmarks.detection.detections import empty, join_detections, to_bytes
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
    assert boxes["annotations"] == [
        {**box, "id": number, **{key: annotation[key] for key in ("image_id", "category_id", "bbox")}}
        for number, (box, annotation) in enumerate(zip(boxes["annotations"], annotations, strict=True), 1)
    ]
    for position, image in enumerate(part.image_ids):
        size = (coco.imgs[image]["width"], coco.imgs[image]["height"])
        assert Image.open(part.path(position)).size == size == tuple(part.sizes[position])
    for number, annotation in enumerate(annotations):
        assert part.boxes[number] == pytest.approx(annotation["bbox"])
        assert ids[part.labels[number] - 1] == annotation["category_id"]
        assert part.crowds[number] == annotation["iscrowd"] == isinstance(annotation["segmentation"], dict)
        polygons = [] if annotation["iscrowd"] else annotation["segmentation"]
        assert [polygon.ravel().tolist() for polygon in part.polygons(number)] == polygons
        # Area and box of the mask that pycocotools draws.
        y, x = coco.annToMask(annotation).nonzero()
        assert len(x) == annotation["area"] == part.areas[number]
        assert annotation["bbox"] == [x.min(), y.min(), np.ptp(x) + 1, np.ptp(y) + 1]


# COCOeval of pycocotools 2.0.11
@pytest.mark.parametrize("alternating", [True, False])
@pytest.mark.parametrize(
    ("spread", "expected"),
    [(0.0, {"bbox": 1.0, "segm": 1.0}), (0.05, {"bbox": 0.7051357850070721, "segm": 0.5387123998114097})],
)
def test_average_precision_matches_pycocotools(ranks, data, spread, expected, alternating):
    """With images on alternating ranks, or all on the last rank."""
    images = len(data.val) - (spread > 0)
    own = range(ranks.rank, images, 2) if alternating else range(ranks.rank * images)
    detections = gather_detections(
        join_detections([empty(masks=True), *(noisy(data, position, spread) for position in own)]), ranks
    )
    if ranks.rank:
        assert detections is None
    else:
        single = join_detections([noisy(data, position, spread) for position in range(images)])
        assert to_bytes(detections) == to_bytes(single)
        assert coco_ap(data, detections, KINDS) == pytest.approx(expected, rel=1e-12)


def test_empty_and_repeated_detections(ranks, data):
    detections = gather_detections(empty(), ranks)
    assert detections is None if ranks.rank else coco_ap(data, detections) == {"bbox": 0.0}

    error = pytest.raises(RuntimeError, match="was evaluated 2 times, by different ranks")
    with nullcontext() if ranks.rank else error:
        gather_detections(noisy(data, int(data.val.with_objects[0]), 0.0), ranks)
