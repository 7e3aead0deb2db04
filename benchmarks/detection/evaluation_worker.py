"""The process of an Evaluator: a request a line on standard input, an answer a line on standard output.

    $ python -m benchmarks.detection.evaluation_worker --data DATA --output OUT --workers 1 --kinds bbox segm
    {"epoch": 1, "file": "OUT/detections/epoch_0001.npz"}
    {"alive": 1}
    {"epoch": 1, "result": {"bbox": 0.21, "segm": 0.19}}
    {"drawn": 1}

After each part of its work it says that it is alive. It ends when standard input does, in the middle of an evaluation,
too: then its training has ended.

In OUT it leaves ``detections.jsonl``, the images of an evaluation with the best and the worst results: what was found
in them and what is there. A line is one image: a JPEG of at most LONGEST pixels a side, in base64, boxes in its pixels,
and masks as runs of its pixels. `encore report --detections` and the report draw them.
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
from benchmarks.detection.evaluation import KINDS, Chunk, Compared, Map, Match, Truth

PARENT_SECONDS = 0.5  # between two looks of a matching process at its parent
CHUNKS, CHUNKS_PER_WORKER = 16, 4  # parts of the work of one process, and of each of several
FILE = "detections.jsonl"  # in the folder of an experiment
SHOWN = 4  # images at each end
LONGEST = 400  # pixels of a picture's longer side; a smaller image stays as it is
LOWEST_SCORE = 0.3
MOST = 20  # detections that are drawn in an image, with at least LOWEST_SCORE
JPEG_QUALITY = 80
_truth: Dict[str, Truth] = {}  # this process's own; those that match inherit it


def main() -> None:
    # Ctrl-C and Slurm signal all processes of a job: the training decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of a prepared data set")
    parser.add_argument("--output", type=Path, required=True, help="folder of the experiment")
    parser.add_argument("--workers", type=int, default=1, help="processes that match detections with objects")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, required=True, help="what is compared")
    arguments = parser.parse_args()
    # What a library prints must not look like an answer.
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

        def watched(match: Any, parts: Any, epoch: int = request["epoch"]) -> Iterator[List[Match]]:
            for matches in processes(match, parts):
                answer({"alive": epoch})
                yield matches

        compared = truth.compare(detections.from_bytes(Path(request["file"]).read_bytes()), watched, chunks)
        answer({"epoch": request["epoch"], "result": truth.precision_of(compared)})
        try:
            write_pictures(arguments.output, request["epoch"], truth, compared, data)
        except (OSError, Problem) as problem:
            print(f"no pictures of epoch {request['epoch']}: {problem}", file=sys.stderr)
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


def write_pictures(output: Path, epoch: int, truth: Truth, compared: Compared, data: DataSet) -> None:
    """Replace the file by the pictures of ``epoch``, from 1; whoever reads finds the old file or the new one whole."""
    # The best pictures, from the best on, then the worst, from the worst on
    ranked = sorted(_precisions(truth, compared, data), key=lambda each: (-each[0], -each[1], each[2]))
    best, worst = ranked[:SHOWN], ranked[SHOWN:][-SHOWN:][::-1]
    with in_one_step(output / FILE) as file:
        for which, chosen in (("best", best), ("worst", worst)):
            for precision, _, position in chosen:
                facts = {"epoch": epoch, "which": which, "precision": round(precision, 4)}
                line = json.dumps({**facts, **_picture(position, truth, compared, data)})
                file.write(f"{line}\n".encode())


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


def _precisions(truth: Truth, compared: Compared, data: DataSet) -> Iterator[Tuple[float, int, int]]:
    # Precision at the lowest overlap, number of objects and position of each image that has an object
    kind = truth.kinds[-1]
    matched, ignored = (each[0] for each in compared.matches[kind])
    places = compared.keys % len(data.val)
    order = np.argsort(places, kind="stable")
    bounds = np.searchsorted(places[order], np.arange(len(data.val) + 1))
    for position in range(len(data.val)):
        of_image = slice(int(data.val.offsets[position]), int(data.val.offsets[position + 1]))
        objects = int(np.count_nonzero(~data.val.crowds[of_image]))
        if objects:
            own = order[bounds[position] : bounds[position + 1]]
            scores = compared.detections.scores[own]
            yield image_precision(matched[own], ignored[own], scores, objects), objects, position


def _picture(position: int, truth: Truth, compared: Compared, data: DataSet) -> Dict[str, Any]:
    with Image.open(data.val.path(position)) as opened:
        image = to_rgb(opened)
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


if __name__ == "__main__":
    main()
