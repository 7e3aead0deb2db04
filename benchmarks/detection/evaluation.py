"""COCO average precision for objects of any size: 100 detections, IoU 0.50 to 0.95, matched by pycocotools.

The loop of pycocotools loads the annotations and rasterizes the polygons for every evaluation, and visits all
categories of all images for four size ranges. Here the objects are loaded only at the start, and pycocotools matches
only one size range, and only images with objects of the category: without objects there are no matches. The figures
are bit-identical.
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

KINDS = ("bbox", "segm")  # iouType of pycocotools: boxes and masks
ANY_AREA = [0, 1e5**2]
MOST_DETECTIONS = 100  # per category and image
Pair = Tuple[int, int]  # image id, category id


class Chunk(NamedTuple):
    """Detections in a few pairs, by falling score, for a process to match."""

    kind: str
    pairs: Sequence[Pair]
    scores: Sequence[List[float]]
    shapes: Sequence[List[Any]]  # boxes, or masks as RLE


# For D detections in a pair, bool (thresholds, D): is matched; is ignored because it matches a crowd
Match = Tuple[np.ndarray, np.ndarray]
Matching = Callable[[Chunk], List[Match]]
Map = Callable[[Matching, Iterable[Chunk]], Iterable[List[Match]]]


def coco_ap(data: DataSet, detections: Detections, kinds: Sequence[str] = ("bbox",)) -> Dict[str, float]:
    """Return the average precision of ``kinds`` over all images of ``data.val``, 0 to 1."""
    truth = Truth(data.val.json, kinds)
    return truth.precision_of(truth.compare(detections))


@dataclass(frozen=True)
class Comparison:
    """Counted detections, sorted by category, image and descending score, with matches."""

    detections: Detections
    keys: np.ndarray  # int64 (D,), ascending: category position * number of images + image position
    matches: Dict[str, Match]  # by kind


class Truth:
    """Objects in a data set part, with pycocotools' detection evaluation."""

    def __init__(self, path: Path, kinds: Sequence[str]) -> None:
        """Load the JSON file ``path`` (instances_*.json); all images are evaluated. ``kinds``: subset of KINDS."""
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        self.kinds = tuple(kinds)
        self._images = np.array(sorted(entry["id"] for entry in content["images"]), np.int64)
        self._categories: List[int] = sorted(entry["id"] for entry in content["categories"])
        self._sizes = {entry["id"]: [entry["height"], entry["width"]] for entry in content["images"]}
        self._objects: Dict[Pair, List[Dict[str, Any]]] = {}
        for number, entry in enumerate(content["annotations"], start=1):
            # The fields that pycocotools reads; crowds are ignored.
            crowd = entry.get("iscrowd", 0)
            annotation = {"id": number, "area": entry["area"], "iscrowd": crowd, "ignore": crowd, "bbox": entry["bbox"]}
            if "segm" in kinds:
                annotation["segmentation"] = to_rle(entry["segmentation"], *self._sizes[entry["image_id"]])
            self._objects.setdefault((entry["image_id"], entry["category_id"]), []).append(annotation)
        self._object_counts = dict.fromkeys(self._categories, 0)
        for (_, category), objects in self._objects.items():
            self._object_counts[category] += sum(not entry["ignore"] for entry in objects)
        self._pairs = sorted(self._objects, key=lambda pair: (pair[1], pair[0]))
        self._evaluations = {kind: COCOeval(iouType=kind) for kind in kinds}  # a COCOeval compares one pair at a time
        for evaluation in self._evaluations.values():
            evaluation.params.maxDets = [MOST_DETECTIONS]
            evaluation._gts = self._objects

    def compare(self, detections: Detections, processes: Map = map, chunks: int = 1) -> Comparison:
        """Match detections with objects.

        Args:
            detections: in images of this part.
            processes: map function that calls ``match`` on all chunks, possibly in other processes, and returns the
                results in order.
            chunks: number of chunks for the pairs of image and category.

        Raises:
            RuntimeError: a detection has an unknown image or category, or masks are missing.
        """
        if "segm" in self.kinds and detections.masks is None:
            raise RuntimeError("detections without masks cannot be compared with masks")
        detections_sorted, keys = self._sort(detections)
        matches = {kind: self._match_all(kind, detections_sorted, keys, processes, chunks) for kind in self.kinds}
        return Comparison(detections_sorted, keys, matches)

    def precision_of(self, comparison: Comparison) -> Dict[str, float]:
        """Return the average precision by kind, 0 to 1; 0 without detections."""
        return {kind: self._precision(kind, comparison) for kind in self.kinds}

    def objects_of(self, image: int) -> List[Tuple[int, Dict[str, Any]]]:
        """Return an image's objects in pycocotools' form, with labels 1 to C."""
        pairs = ((label, (image, category)) for label, category in enumerate(self._categories, start=1))
        return [(label, annotation) for label, pair in pairs for annotation in self._objects.get(pair, ())]

    def _sort(self, detections: Detections) -> Tuple[Detections, np.ndarray]:
        # Counted detections, which are the highest scores per category and image, with their keys
        foreign = np.setdiff1d(detections.images, self._images)
        if len(foreign):
            raise RuntimeError(f"detections in {len(foreign)} images that are not evaluated, first {foreign[0]}")
        if len(detections) and not 1 <= detections.labels.min() <= detections.labels.max() <= len(self._categories):
            raise RuntimeError(f"labels of detections must be in 1 to {len(self._categories)}")
        image_indices = np.searchsorted(self._images, detections.images)
        keys = (detections.labels.astype(np.int64) - 1) * len(self._images) + image_indices
        order = np.lexsort((-detections.scores, keys))
        keys = keys[order]
        first = np.searchsorted(keys, keys)
        is_top = np.arange(len(keys)) - first < MOST_DETECTIONS
        return detections.take(order[is_top]), keys[is_top]

    def _match_all(self, kind: str, detections: Detections, keys: np.ndarray, processes: Map, chunks: int) -> Match:
        images, categories = (np.array([pair[axis] for pair in self._pairs], np.int64) for axis in (0, 1))
        pair_keys = np.searchsorted(self._categories, categories) * len(self._images)
        pair_keys += np.searchsorted(self._images, images)
        bounds = zip(self._pairs, *(np.searchsorted(keys, pair_keys, axis).tolist() for axis in ("left", "right")))
        # Pairs with objects and detections: first and last index of the detections
        slices = [(pair, start, end) for pair, start, end in bounds if start < end]
        jobs = [slices[number::chunks] for number in range(chunks)]
        thresholds = len(self._evaluations[kind].params.iouThrs)
        matched, ignored = (np.zeros((thresholds, len(keys)), bool) for _ in range(2))
        for job, matches in zip(jobs, processes(self.match, [self._chunk(kind, job, detections) for job in jobs])):
            for (_, start, end), (pair_matched, pair_ignored) in zip(job, matches):
                matched[:, start:end], ignored[:, start:end] = pair_matched, pair_ignored
        return matched, ignored

    def match(self, chunk: Chunk) -> List[Match]:
        evaluation = self._evaluations[chunk.kind]
        return [_match_pair(evaluation, *arguments) for arguments in zip(chunk.pairs, chunk.scores, chunk.shapes)]

    def _chunk(self, kind: str, job: Sequence[Tuple[Pair, int, int]], detections: Detections) -> Chunk:
        scores = [detections.scores[start:end].tolist() for _, start, end in job]
        if kind == "bbox":
            shapes: List[List[Any]] = [detections.boxes[start:end].tolist() for _, start, end in job]
        else:
            masks = detections.masks or ()
            shapes = [
                [{"size": self._sizes[pair[0]], "counts": mask} for mask in masks[start:end]]
                for pair, start, end in job
            ]
        return Chunk(kind, [pair for pair, _, _ in job], scores, shapes)

    def _precision(self, kind: str, comparison: Comparison) -> float:
        # Let pycocotools accumulate all detections per category as if they were in one image
        evaluation, (matched, ignored) = COCOeval(iouType=kind), comparison.matches[kind]
        parameters = evaluation.params
        parameters.imgIds, parameters.catIds = [0], self._categories
        parameters.areaRng, parameters.areaRngLbl, parameters.maxDets = [ANY_AREA], ["all"], [len(matched[0])]
        evaluation._paramsEval = parameters
        firsts = np.arange(len(self._categories) + 1) * len(self._images)
        bounds = np.searchsorted(comparison.keys, firsts).tolist()
        evaluation.evalImgs = [
            {
                "dtScores": comparison.detections.scores[start:end].astype(np.float64),
                "dtMatches": matched[:, start:end],
                "dtIgnore": ignored[:, start:end],
                "gtIgnore": np.zeros(self._object_counts[category]),
            }
            for category, start, end in zip(self._categories, bounds, bounds[1:])
        ]
        with redirect_stdout(io.StringIO()):
            evaluation.accumulate()
        precision = evaluation.eval["precision"]
        return float(np.mean(precision[precision > -1]))


def to_rle(segmentation: Any, height: int, width: int) -> Dict[str, Any]:
    """Return a segmentation as a JSON file has it, polygons or runs of pixels, as compressed RLE."""
    if isinstance(segmentation, list):
        return rle.merge(rle.frPyObjects(segmentation, height, width))
    return rle.frPyObjects(segmentation, height, width) if isinstance(segmentation["counts"], list) else segmentation


def _match_pair(evaluation: COCOeval, pair: Pair, scores: List[float], shapes: List[Any]) -> Match:
    thresholds = evaluation.params.iouThrs
    matched, ignored = (np.zeros((len(thresholds), len(scores)), bool) for _ in range(2))
    shape = "bbox" if evaluation.params.iouType == "bbox" else "segmentation"
    # Ids start at 1 because 0 means unmatched in pycocotools. The area is ignored with ANY_AREA.
    rows = enumerate(zip(scores, shapes), start=1)
    rows_by_id = [{"id": id_, "score": score, shape: geometry, "area": 0} for id_, (score, geometry) in rows]
    evaluation._dts = {pair: rows_by_id}
    overlaps = evaluation.computeIoU(*pair)
    # Detections below the lowest threshold for all objects do not affect the matching.
    candidates = np.flatnonzero((overlaps >= thresholds.min()).any(axis=1))
    if len(candidates):
        evaluation._dts = {pair: [rows_by_id[index] for index in candidates]}
        evaluation.ious = {pair: overlaps[candidates]}
        result = evaluation.evaluateImg(*pair, ANY_AREA, MOST_DETECTIONS)
        matched[:, candidates], ignored[:, candidates] = result["dtMatches"] > 0, result["dtIgnore"]
    return matched, ignored
