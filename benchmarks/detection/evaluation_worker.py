"""The process of an Evaluator: a request a line on standard input, an answer a line on standard output.

    $ python -m benchmarks.detection.evaluation_worker --data DATA --output OUT --workers 1 --kinds bbox segm
    {"epoch": 1, "file": "OUT/detections/epoch_0001.npz"}
    {"alive": 1}
    {"epoch": 1, "result": {"bbox": 0.21, "segm": 0.19}}
    {"drawn": 1}

After each part of its work it says that it is alive. It ends when standard input does, in the middle of an evaluation,
too: then its training has ended.
"""

from __future__ import annotations

import argparse
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
from typing import Any, Dict, Iterator, List

from benchmarks.common.data.problem import Problem
from benchmarks.detection import detections, shown
from benchmarks.detection.annotations import open_data
from benchmarks.detection.evaluation import KINDS, Chunk, Map, Match, Truth

PARENT_SECONDS = 0.5  # between two looks of a matching process at its parent
CHUNKS, CHUNKS_PER_WORKER = 16, 4  # parts of the work of one process, and of each of several
_truth: Dict[str, Truth] = {}  # of this process; those that match inherit it


def main() -> None:
    """Load the annotations and answer requests."""
    # Ctrl-C and Slurm signal all processes of a job: the training decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    arguments = _arguments()
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
            shown.write(arguments.output, request["epoch"], truth, compared, data)
        except (OSError, Problem) as problem:
            print(f"no pictures of epoch {request['epoch']}: {problem}", file=sys.stderr)
        answer({"drawn": request["epoch"]})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of a prepared data set")
    parser.add_argument("--output", type=Path, required=True, help="folder of the experiment")
    parser.add_argument("--workers", type=int, default=1, help="processes that match detections with objects")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, required=True, help="what is compared")
    return parser.parse_args()


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


if __name__ == "__main__":
    main()
