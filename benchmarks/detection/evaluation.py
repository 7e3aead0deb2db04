"""Average precision as COCO defines it: area of any size, 100 detections an image, IoU 0.50 to 0.95, by pycocotools.

Loads what all evaluations of a run compare with once: the annotations and, for masks, the polygons as RLE.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from benchmarks.detection.annotations import DataSet
from benchmarks.detection.detections import Detections

KINDS = ("bbox", "segm")
"""What is compared, by pycocotools' names: boxes and masks."""
ANY_AREA = [0, 1e5**2]
MOST_DETECTIONS = 100


def coco_ap(data: DataSet, detections: Detections, kinds: Sequence[str] = ("bbox",)) -> Dict[str, float]:
    """Return the average precision of each of ``kinds`` over all images of ``data.val``, 0 to 1."""
    return Truth(data.val.json, kinds).average_precision(detections)


class Truth:
    """The objects of a part, as pycocotools compares detections with them."""

    def __init__(self, path: Path, kinds: Sequence[str]) -> None:
        """Load ``path``, COCO's instances_*.json: all of its images are evaluated. ``kinds``: some of KINDS."""
        self.kinds = tuple(kinds)
        content = json.loads(path.read_text(encoding="utf-8"))
        self._objects = _indexed(content)
        self._categories: List[int] = sorted(each["id"] for each in content["categories"])
        self._images = {each["id"]: each for each in content["images"]}
        if "segm" in kinds:
            # pycocotools would draw every polygon at each evaluation.
            for each in content["annotations"]:
                each["segmentation"] = self._objects.annToRLE(each)

    def average_precision(self, detections: Detections) -> Dict[str, float]:
        """Return the average precision of each kind, 0 to 1; 0 where nothing was detected.

        Raises:
            RuntimeError: detections of an image that the part does not have.
        """
        foreign = np.setdiff1d(detections.images, list(self._images))
        if len(foreign):
            raise RuntimeError(f"detections in {len(foreign)} images that are not evaluated, first {foreign[0]}")
        found = _indexed({"images": list(self._images.values()), "annotations": self._listed(detections)})
        return {kind: self._precision_of(kind, found) for kind in self.kinds}

    def _listed(self, detections: Detections) -> List[Dict[str, Any]]:
        """Return the detections as pycocotools has them; ids count from 1 since 0 stands for no match there."""
        images, boxes, scores = (getattr(detections, name).tolist() for name in ("images", "boxes", "scores"))
        labels = [self._categories[label - 1] for label in detections.labels.tolist()]
        rows = zip(images, labels, boxes, scores)
        # The area selects nothing: areas of any size are compared.
        found = [
            {"id": id_, "image_id": image, "category_id": label, "bbox": box, "score": score, "area": 0, "iscrowd": 0}
            for id_, (image, label, box, score) in enumerate(rows, start=1)
        ]
        if "segm" in self.kinds:
            if detections.masks is None:
                raise RuntimeError("detections without masks cannot be compared with masks")
            for each, mask in zip(found, detections.masks):
                image = self._images[each["image_id"]]
                each["segmentation"] = {"size": [image["height"], image["width"]], "counts": mask}
        return found

    def _precision_of(self, kind: str, found: COCO) -> float:
        with redirect_stdout(io.StringIO()):
            evaluation = COCOeval(self._objects, found, kind)
            # Figures by area and by fewer detections, which are no target, would take four times as long.
            evaluation.params.areaRng, evaluation.params.areaRngLbl = [ANY_AREA], ["all"]
            evaluation.params.maxDets = [MOST_DETECTIONS]
            evaluation.evaluate()
            evaluation.accumulate()
        precision = evaluation.eval["precision"]
        return float(np.mean(precision[precision > -1]))


def _indexed(content: Dict[str, Any]) -> COCO:
    with redirect_stdout(io.StringIO()):
        made = COCO()
        made.dataset = content
        made.createIndex()
    return made
