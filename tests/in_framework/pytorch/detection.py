"""COCO's data and average precision by any number of ranks, next to pycocotools."""

import io
import json
from contextlib import redirect_stdout

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from benchmarks.detection.annotations import open_data
from benchmarks.detection.detections import DTYPES, empty, joined, to_bytes
from benchmarks.detection.evaluation import KINDS, coco_ap
from benchmarks.detection.pytorch.boxes import gathered
from benchmarks.ssd import prepare
from tests.in_framework.some_detections import noisy

RANKS = (1, 2, 3)


@pytest.fixture(scope="module")
def data(ranks, tmp_path_factory):
    # Each rank's own copy of one set
    folder = tmp_path_factory.mktemp("data") / "ssd"
    assert prepare.main(["-o", str(folder), "--scenes", "200", "--workers", "1"]) == 0
    return open_data(folder)


def test_arrays_are_what_pycocotools_reads(data):
    # Every box, category, polygon and mask
    ids = [each.id for each in data.categories]
    for part in (data.train, data.val):
        coco, boxes = COCO(str(part.json)), json.loads(part.boxes_json.read_text())
        assert sorted(coco.imgs) == part.image_ids.tolist()
        assert sorted(coco.cats) == ids == [each["id"] for each in boxes["categories"]]
        assert [each["file_name"] for each in boxes["images"]] == list(part.files)
        annotations = [each for image in part.image_ids for each in coco.imgToAnns[image]]
        assert np.diff(part.offsets).tolist() == [len(coco.imgToAnns[image]) for image in part.image_ids]
        keys = ("image_id", "category_id", "bbox")
        assert [each["id"] for each in boxes["annotations"]] == list(range(1, len(annotations) + 1))
        assert [[each[key] for key in keys] for each in boxes["annotations"]] == [
            [each[key] for key in keys] for each in annotations
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
            assert [each.ravel().tolist() for each in part.polygons(number)] == polygons
            # The stated area and box are those of the mask that pycocotools paints.
            mask = coco.annToMask(annotation)
            assert mask.sum() == annotation["area"] == part.areas[number]
            y, x = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            assert annotation["bbox"] == [x[0], y[0], x[-1] - x[0] + 1, y[-1] - y[0] + 1]


def share(images, ranks, how):
    # The positions of a rank's images: in turn, or all with the last rank
    if how == "in turn":
        return range(ranks.rank, images, ranks.size)
    return range(images if ranks.rank == ranks.size - 1 else 0)


def by_pycocotools(data, found):
    # Average precision by pycocotools as its example has it
    precision = {}
    with redirect_stdout(io.StringIO()):
        objects = COCO(str(data.val.json))
        for kind in KINDS:
            rows = []
            for place, image in enumerate(found.images.tolist()):
                size = [objects.imgs[image]["height"], objects.imgs[image]["width"]]
                mask = {"size": size, "counts": found.masks[place]}
                shape = {"bbox": found.boxes[place].tolist()} if kind == "bbox" else {"segmentation": mask}
                category = data.categories[int(found.labels[place]) - 1].id
                score = float(found.scores[place])
                rows.append({"image_id": image, "category_id": category, "score": score, **shape})
            evaluation = COCOeval(objects, objects.loadRes(rows), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            precision[kind] = float(evaluation.stats[0])
    return precision


@pytest.mark.parametrize("how", ["in turn", "the last rank"])
@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_ranks_find_together_what_pycocotools_finds(ranks, data, spread, how):
    # To the last bit; 23 images divide by neither 2 nor 3
    images = len(data.val) - (spread > 0)
    parts = [noisy(data, position, spread) for position in share(images, ranks, how)]
    together = gathered(joined([empty(masks=True), *parts]), ranks)
    if ranks.rank:
        assert together is None
        return
    alone = joined([noisy(data, position, spread) for position in range(images)])
    assert to_bytes(together) == to_bytes(alone)
    assert {name: getattr(together, name).dtype for name in DTYPES} == DTYPES
    precision = coco_ap(data, together, KINDS)
    assert precision == by_pycocotools(data, together)
    assert precision == dict.fromkeys(KINDS, 1.0) if not spread else 0.1 < precision["segm"] < precision["bbox"] < 0.9


def test_nothing_that_was_found_has_no_precision_and_masks_are_needed(ranks, data):
    found = gathered(empty(), ranks)
    assert found is None if ranks.rank else coco_ap(data, found) == {"bbox": 0.0}
    with pytest.raises(RuntimeError, match="detections without masks cannot be compared with masks"):
        coco_ap(data, empty(), KINDS)


def test_an_image_of_two_ranks_is_noticed(ranks, data):
    own = noisy(data, int(data.val.with_objects[0]), 0.0)
    if ranks.size == 1 or ranks.rank:
        assert gathered(own, ranks) is None or ranks.size == 1
        return
    with pytest.raises(RuntimeError, match=f"was evaluated {ranks.size} times, by different ranks"):
        gathered(own, ranks)
