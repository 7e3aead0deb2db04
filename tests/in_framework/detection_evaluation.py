"""Detections of a set's images on any number of ranks, gathered and compared with the objects, on rank 0 alone.

Arguments: a prepared data set, "plain" to compare with pycocotools' own loop. Rank 0 prints what it found as JSON.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from benchmarks.common.frameworks import pytorch
from benchmarks.detection.annotations import open_data
from benchmarks.detection.detections import arrays_of, empty, joined
from benchmarks.detection.evaluation import KINDS, coco_ap
from benchmarks.detection.pytorch.gather import gathered
from tests.in_framework.some_detections import noisy, perfect


def share(images: int, ranks: int, rank: int, how: str) -> range:
    """The positions of a rank's images: in turn, or all with the last rank."""
    if how == "in turn":
        return range(rank, images, ranks)
    return range(images if rank == ranks - 1 else 0)


def plainly(data, detections) -> dict[str, float]:
    """Average precision by pycocotools as its example has it."""
    found = {}
    with redirect_stdout(io.StringIO()):
        objects = COCO(str(data.val.json))
        for kind in KINDS:
            rows = []
            for place, image in enumerate(detections.images.tolist()):
                category = data.categories[int(detections.labels[place]) - 1].id
                row = {"image_id": image, "category_id": category, "score": float(detections.scores[place])}
                if kind == "bbox":
                    row["bbox"] = detections.boxes[place].tolist()
                else:
                    size = [objects.imgs[image]["height"], objects.imgs[image]["width"]]
                    row["segmentation"] = {"size": size, "counts": detections.masks[place]}
                rows.append(row)
            evaluation = COCOeval(objects, objects.loadRes(rows), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            found[kind] = float(evaluation.stats[0])
    return found


def main() -> None:
    ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32"))
    data = open_data(Path(sys.argv[1]))
    found = {"images": len(data.val), "crowds": int(data.val.crowds.sum())}
    cases = {"perfect": lambda position: perfect(data, position), "noisy": lambda position: noisy(data, position, 0.05)}
    for name, detect in cases.items():
        for how in ("in turn", "the last rank"):
            # 119 images divide by neither 2 nor 3.
            count = len(data.val) - (name == "noisy")
            parts = [detect(position) for position in share(count, ranks.size, ranks.rank, how)]
            together = gathered(joined(parts) if parts else empty(masks=True), ranks)
            if together is None:
                continue
            content = b"".join(array.tobytes() for array in arrays_of(together).values())
            entry = {"ap": coco_ap(data, together, KINDS), "digest": hashlib.sha256(content).hexdigest()}
            if "plain" in sys.argv:
                entry["plainly"] = plainly(data, together)
            found[f"{name}, {how}"] = entry
    own = perfect(data, int(data.val.with_objects[0]))
    try:
        found["an image on all ranks"] = len(gathered(own, ranks) or own) == len(own)
    except RuntimeError as error:
        found["an image on all ranks"] = str(error)
    boxes = gathered(empty(), ranks)
    if boxes is not None:
        found["nothing"] = coco_ap(data, boxes)
    if ranks.rank == 0:
        print(json.dumps(found))
    pytorch.finish()


main()
