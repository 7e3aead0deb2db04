"""Process of an Evaluator: requests on standard input, answers on standard output, one per line.

    $ python -m benchmarks.detection.evaluation_worker --data DATA --output OUT --workers 1 --kinds bbox segm
    {"epoch": 1, "file": "OUT/detections/epoch_0001.npz"}
    {"alive": 1}
    {"epoch": 1, "result": {"bbox": 0.21, "segm": 0.19}}
    {"drawn": 1}

"alive" is reported after every chunk of work. The process exits at the end of standard input, also during an
evaluation, because then the training has ended.

OUT/detections.jsonl contains the images with the best and worst results of the evaluation, one per line: a JPEG in
base64 of up to LONGEST pixels per side, with detections and objects. Boxes and masks (runs of pixels) refer to this
JPEG. `encore report --detections` and the report draw the images.
"""

import argparse
import base64
import io
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
from PIL import Image
from pycocotools import mask as rle

from benchmarks.common.data.files import in_one_step
from benchmarks.common.data.images import to_rgb
from benchmarks.common.data.problem import Problem
from benchmarks.detection import detections
from benchmarks.detection.annotations import DataSet, open_data
from benchmarks.detection.evaluation import KINDS, Chunk, Comparison, Map, Match, Truth

PARENT_SECONDS = 0.5  # polling interval for the parent process
CHUNKS, CHUNKS_PER_WORKER = 16, 4  # chunks for a single process, and per worker process
FILE = "detections.jsonl"  # in the experiment folder
SHOWN = 4  # images in the best and in the worst group
LONGEST = 400  # pixels of the longer side after downscaling; smaller images are not resized
LOWEST_SCORE = 0.3
MOST = 20  # detections drawn per image, with a score of at least LOWEST_SCORE
JPEG_QUALITY = 80
_truth: Dict[str, Truth] = {}  # inherited by the forked worker processes


def main() -> None:
    # Ctrl-C and Slurm send signals to all job processes; the training process stops this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of a prepared data set")
    parser.add_argument("--output", type=Path, required=True, help="folder of the experiment")
    parser.add_argument("--workers", type=int, default=1, help="processes that match detections with objects")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, required=True, help="what is compared")
    arguments = parser.parse_args()
    # Output of libraries must not be read as an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    data = open_data(arguments.data)
    truth = _truth["val"] = Truth(data.val.json, arguments.kinds)
    processes, chunks = _processes(arguments.workers)
    # After the fork: a forked process has the locks of the threads that were there, but not the threads.
    requests: "SimpleQueue[Dict[str, Any]]" = SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        request = requests.get()

        def answer(content: Dict[str, Any]) -> None:
            print(json.dumps(content), file=answers, flush=True)

        def report_progress(match: Any, parts: Any, epoch: int = request["epoch"]) -> Iterator[List[Match]]:
            for matches in processes(match, parts):
                answer({"alive": epoch})
                yield matches

        comparison = truth.compare(detections.from_bytes(Path(request["file"]).read_bytes()), report_progress, chunks)
        answer({"epoch": request["epoch"], "result": truth.precision_of(comparison)})
        try:
            write_pictures(arguments.output, request["epoch"], truth, comparison, data)
        except (OSError, Problem) as problem:
            print(f"no images of epoch {request['epoch']}: {problem}", file=sys.stderr)
        answer({"drawn": request["epoch"]})


def _read(requests: "SimpleQueue[Dict[str, Any]]") -> None:
    with os.fdopen(os.dup(0), encoding="utf-8") as lines:
        for line in lines:
            requests.put(json.loads(line))
    os._exit(0)


def _processes(workers: int) -> "tuple[Map, int]":
    if workers == 1:
        return map, CHUNKS
    # Forked, since this process has loaded the annotations and no framework.
    pool = ProcessPoolExecutor(workers, get_context("fork"), _end_with_parent)
    list(pool.map(_match, [Chunk(_truth["val"].kinds[0], (), (), ())] * workers))
    return (lambda _, chunks: pool.map(_match, chunks)), CHUNKS_PER_WORKER * workers


def _match(chunk: Chunk) -> List[Match]:
    return _truth["val"].match(chunk)


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


# -- pictures --------------------------------------------------------------------------------------------


def write_pictures(output: Path, epoch: int, truth: Truth, comparison: Comparison, data: DataSet) -> None:
    """Replace the file of images with the images of ``epoch``, counted from 1, atomically."""
    # The best pictures, from the best on, then the worst, from the worst on
    ranked = sorted(_precisions(truth, comparison, data), key=lambda row: (-row[0], -row[1], row[2]))
    best, worst = ranked[:SHOWN], ranked[SHOWN:][-SHOWN:][::-1]
    with in_one_step(output / FILE) as file:
        for rank_kind, ranking in (("best", best), ("worst", worst)):
            for precision, _, position in ranking:
                header = {"epoch": epoch, "which": rank_kind, "precision": round(precision, 4)}
                line = json.dumps({**header, **_picture(position, truth, comparison, data)})
                file.write(f"{line}\n".encode())


def image_precision(matched: np.ndarray, ignored: np.ndarray, scores: np.ndarray, objects: int) -> float:
    """Return the average precision in an image at one IoU threshold, over all categories, 0 to 1.

    Args:
        matched: bool (D,), in any order.
        ignored: bool (D,): matches a crowd.
        scores: float (D,)
        objects: number of objects without crowds, at least 1.
    """
    order = np.argsort(-scores[~ignored], kind="stable")
    hits = matched[~ignored][order]
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float(envelope[hits].sum() / objects)


def _precisions(truth: Truth, comparison: Comparison, data: DataSet) -> Iterator[Tuple[float, int, int]]:
    # For every image with objects: precision at the lowest IoU threshold, number of objects, position
    kind = truth.kinds[-1]
    matched, ignored = (array[0] for array in comparison.matches[kind])
    image_positions = comparison.keys % len(data.val)
    order = np.argsort(image_positions, kind="stable")
    bounds = np.searchsorted(image_positions[order], np.arange(len(data.val) + 1))
    for position in range(len(data.val)):
        of_image = slice(int(data.val.offsets[position]), int(data.val.offsets[position + 1]))
        objects = int(np.count_nonzero(~data.val.crowds[of_image]))
        if objects:
            selection = order[bounds[position] : bounds[position + 1]]
            scores = comparison.detections.scores[selection]
            yield image_precision(matched[selection], ignored[selection], scores, objects), objects, position


def _picture(position: int, truth: Truth, comparison: Comparison, data: DataSet) -> Dict[str, Any]:
    with Image.open(data.val.path(position)) as opened:
        image = to_rgb(opened)
    scale = min(1.0, LONGEST / max(image.size))
    size = tuple(max(1, round(length * scale)) for length in image.size)
    jpeg = io.BytesIO()
    image.resize(size, Image.BILINEAR).save(jpeg, "JPEG", quality=JPEG_QUALITY)
    names = [category.name for category in data.categories]
    number = int(data.val.image_ids[position])
    selection = np.flatnonzero(comparison.detections.images == number)
    selection = selection[np.argsort(-comparison.detections.scores[selection], kind="stable")][:MOST]
    selection = selection[comparison.detections.scores[selection] >= LOWEST_SCORE]
    selected, matched = comparison.detections.take(selection), comparison.matches[truth.kinds[-1]][0][0, selection]
    masks: Sequence[Optional[bytes]] = selected.masks or [None] * len(selected)
    rows = zip(selected.labels.tolist(), selected.boxes.tolist(), selected.scores.tolist(), matched.tolist(), masks)
    original = (image.size[1], image.size[0])
    return {
        "image": number,
        "file": data.val.files[position],
        "width": size[0],
        "height": size[1],
        "jpeg": base64.b64encode(jpeg.getvalue()).decode("ascii"),
        "truth": [
            {
                **_shape(names[label - 1], category["bbox"], category.get("segmentation"), size, scale),
                "crowd": bool(category["iscrowd"]),
            }
            for label, category in truth.objects_of(number)
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
    # x, y and length of the horizontal runs in ``mask`` (height, width)
    edges = np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    rows, begins = np.nonzero(edges == 1)
    _, ends = np.nonzero(edges == -1)
    return np.stack([begins, rows, ends - begins], axis=1).reshape(-1).tolist()


if __name__ == "__main__":
    main()
