"""Average precision as COCO defines it: objects of any size, 100 detections, IoU 0.50 to 0.95, matched by pycocotools.

pycocotools' own loop loads the annotations and draws the polygons anew at each evaluation, and visits every category of
every image for four ranges of sizes. Here what detections are compared with is loaded once, and pycocotools matches
them in one range of sizes and only where an image has objects of the category: elsewhere nothing can match. Its
figures come out the same to the last bit.
"""

import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Sequence, Tuple

import numpy as np
from pycocotools import mask as rle
from pycocotools.cocoeval import COCOeval

from benchmarks.detection.annotations import DataSet
from benchmarks.detection.detections import Detections

KINDS = ("bbox", "segm")  # what is compared, by pycocotools' names: boxes and masks
ANY_AREA = [0, 1e5**2]
MOST_DETECTIONS = 100  # detections of a category in an image
Pair = Tuple[int, int]  # ids of an image and of a category


class Chunk(NamedTuple):
    """Detections in a few pairs, by falling score, for a process to match."""

    kind: str
    pairs: Sequence[Pair]
    scores: Sequence[List[float]]
    shapes: Sequence[List[Any]]  # boxes, or masks as RLE


# For D detections in a pair, whether each is matched, and whether it counts for nothing since a crowd matches; bool
# (thresholds, D)
Match = Tuple[np.ndarray, np.ndarray]
Matching = Callable[[Chunk], List[Match]]
Map = Callable[[Matching, Iterable[Chunk]], Iterable[List[Match]]]


def coco_ap(data: DataSet, detections: Detections, kinds: Sequence[str] = ("bbox",)) -> Dict[str, float]:
    """Return the average precision of each of ``kinds`` over all images of ``data.val``, 0 to 1."""
    truth = Truth(data.val.json, kinds)
    return truth.precision_of(truth.compare(detections))


@dataclass(frozen=True)
class Compared:
    """Detections that count, by category, image and falling score, and what they match."""

    detections: Detections
    keys: np.ndarray  # int64 (D,): category's place x images + image's place; ascending
    matches: Dict[str, Match]  # by kind


class Truth:
    """The objects of a part, as pycocotools compares detections with them."""

    def __init__(self, path: Path, kinds: Sequence[str]) -> None:
        """Load ``path``, COCO's instances_*.json: all of its images are evaluated. ``kinds``: some of KINDS."""
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        self.kinds = tuple(kinds)
        self._images = np.array(sorted(each["id"] for each in content["images"]), np.int64)
        self._categories: List[int] = sorted(each["id"] for each in content["categories"])
        self._sizes = {each["id"]: [each["height"], each["width"]] for each in content["images"]}
        self._objects: Dict[Pair, List[Dict[str, Any]]] = {}
        for number, each in enumerate(content["annotations"], start=1):
            # What pycocotools reads of an object; a crowd is ignored.
            crowd = each.get("iscrowd", 0)
            found = {"id": number, "area": each["area"], "iscrowd": crowd, "ignore": crowd, "bbox": each["bbox"]}
            if "segm" in kinds:
                found["segmentation"] = drawn(each["segmentation"], *self._sizes[each["image_id"]])
            self._objects.setdefault((each["image_id"], each["category_id"]), []).append(found)
        self._counted = dict.fromkeys(self._categories, 0)
        for (_, category), objects in self._objects.items():
            self._counted[category] += sum(not each["ignore"] for each in objects)
        self._pairs = sorted(self._objects, key=lambda pair: (pair[1], pair[0]))
        self._evaluations = {kind: COCOeval(iouType=kind) for kind in kinds}  # each compares one pair at a time
        for evaluation in self._evaluations.values():
            evaluation.params.maxDets = [MOST_DETECTIONS]
            evaluation._gts = self._objects

    def compare(self, detections: Detections, processes: Map = map, chunks: int = 1) -> Compared:
        """Find out which detections match an object.

        Args:
            detections: in images of this part.
            processes: calls ``match`` with each chunk, maybe elsewhere, and returns the results in order.
            chunks: in how many to split the pairs of image and category.

        Raises:
            RuntimeError: detections of an image that the part does not have, or of a category; masks are missing.
        """
        if "segm" in self.kinds and detections.masks is None:
            raise RuntimeError("detections without masks cannot be compared with masks")
        found, keys = self._sorted(detections)
        matches = {kind: self._matches(kind, found, keys, processes, chunks) for kind in self.kinds}
        return Compared(found, keys, matches)

    def precision_of(self, compared: Compared) -> Dict[str, float]:
        """Return the average precision of each kind, 0 to 1; 0 where nothing was detected."""
        return {kind: self._precision(kind, compared) for kind in self.kinds}

    def objects_of(self, image: int) -> List[Tuple[int, Dict[str, Any]]]:
        """Return the objects of an image with their labels, 1 to C; each as pycocotools has it."""
        pairs = ((label, (image, category)) for label, category in enumerate(self._categories, start=1))
        return [(label, each) for label, pair in pairs for each in self._objects.get(pair, ())]

    def _sorted(self, detections: Detections) -> Tuple[Detections, np.ndarray]:
        # The detections that count, of each category in each image those with the highest scores, and keys
        foreign = np.setdiff1d(detections.images, self._images)
        if len(foreign):
            raise RuntimeError(f"detections in {len(foreign)} images that are not evaluated, first {foreign[0]}")
        if len(detections) and not 1 <= detections.labels.min() <= detections.labels.max() <= len(self._categories):
            raise RuntimeError(f"labels of detections must be in 1 to {len(self._categories)}")
        places = np.searchsorted(self._images, detections.images)
        keys = (detections.labels.astype(np.int64) - 1) * len(self._images) + places
        order = np.lexsort((-detections.scores, keys))
        keys = keys[order]
        first = np.searchsorted(keys, keys)
        kept = np.arange(len(keys)) - first < MOST_DETECTIONS
        return detections.take(order[kept]), keys[kept]

    def _matches(self, kind: str, found: Detections, keys: np.ndarray, processes: Map, chunks: int) -> Match:
        images, categories = (np.array([pair[side] for pair in self._pairs], np.int64) for side in (0, 1))
        every = np.searchsorted(self._categories, categories) * len(self._images)
        every += np.searchsorted(self._images, images)
        bounds = zip(self._pairs, *(np.searchsorted(keys, every, side).tolist() for side in ("left", "right")))
        # The pairs that have objects and detections, with the bounds of their detections
        slices = [(pair, begin, end) for pair, begin, end in bounds if begin < end]
        jobs = [slices[number::chunks] for number in range(chunks)]
        thresholds = len(self._evaluations[kind].params.iouThrs)
        matched, ignored = (np.zeros((thresholds, len(keys)), bool) for _ in range(2))
        for job, matches in zip(jobs, processes(self.match, [self._chunk(kind, job, found) for job in jobs])):
            for (_, begin, end), (of_pair, without) in zip(job, matches):
                matched[:, begin:end], ignored[:, begin:end] = of_pair, without
        return matched, ignored

    def match(self, chunk: Chunk) -> List[Match]:
        evaluation = self._evaluations[chunk.kind]
        return [_matched(evaluation, *each) for each in zip(chunk.pairs, chunk.scores, chunk.shapes)]

    def _chunk(self, kind: str, job: Sequence[Tuple[Pair, int, int]], detections: Detections) -> Chunk:
        scores = [detections.scores[begin:end].tolist() for _, begin, end in job]
        if kind == "bbox":
            shapes: List[List[Any]] = [detections.boxes[begin:end].tolist() for _, begin, end in job]
        else:
            masks = detections.masks or ()
            shapes = [
                [{"size": self._sizes[pair[0]], "counts": mask} for mask in masks[begin:end]]
                for pair, begin, end in job
            ]
        return Chunk(kind, [pair for pair, _, _ in job], scores, shapes)

    def _precision(self, kind: str, compared: Compared) -> float:
        # Let pycocotools accumulate all detections of a category as if they were in one image
        evaluation, (matched, ignored) = COCOeval(iouType=kind), compared.matches[kind]
        parameters = evaluation.params
        parameters.imgIds, parameters.catIds = [0], self._categories
        parameters.areaRng, parameters.areaRngLbl, parameters.maxDets = [ANY_AREA], ["all"], [len(matched[0])]
        evaluation._paramsEval = parameters
        firsts = np.arange(len(self._categories) + 1) * len(self._images)
        bounds = np.searchsorted(compared.keys, firsts).tolist()
        evaluation.evalImgs = [
            {
                "dtScores": compared.detections.scores[begin:end].astype(np.float64),
                "dtMatches": matched[:, begin:end],
                "dtIgnore": ignored[:, begin:end],
                "gtIgnore": np.zeros(self._counted[category]),
            }
            for category, begin, end in zip(self._categories, bounds, bounds[1:])
        ]
        with redirect_stdout(io.StringIO()):
            evaluation.accumulate()
        precision = evaluation.eval["precision"]
        return float(np.mean(precision[precision > -1]))


def drawn(segmentation: Any, height: int, width: int) -> Dict[str, Any]:
    """Return a segmentation as a JSON file has it, polygons or runs of pixels, as compressed RLE."""
    if isinstance(segmentation, list):
        return rle.merge(rle.frPyObjects(segmentation, height, width))
    return rle.frPyObjects(segmentation, height, width) if isinstance(segmentation["counts"], list) else segmentation


def _matched(evaluation: COCOeval, pair: Pair, scores: List[float], shapes: List[Any]) -> Match:
    thresholds = evaluation.params.iouThrs
    matched, ignored = (np.zeros((len(thresholds), len(scores)), bool) for _ in range(2))
    shape = "bbox" if evaluation.params.iouType == "bbox" else "segmentation"
    # Ids count from 1: 0 is no match to pycocotools. The area selects nothing where any area counts.
    rows = enumerate(zip(scores, shapes), start=1)
    found = [{"id": id_, "score": score, shape: each, "area": 0} for id_, (score, each) in rows]
    evaluation._dts = {pair: found}
    overlaps = evaluation.computeIoU(*pair)
    # What overlaps with nothing well enough has no part in the matching of the others.
    places = np.flatnonzero((overlaps >= thresholds.min()).any(axis=1))
    if len(places):
        evaluation._dts = {pair: [found[place] for place in places]}
        evaluation.ious = {pair: overlaps[places]}
        result = evaluation.evaluateImg(*pair, ANY_AREA, MOST_DETECTIONS)
        matched[:, places], ignored[:, places] = result["dtMatches"] > 0, result["dtIgnore"]
    return matched, ignored
