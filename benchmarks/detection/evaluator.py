"""Average precision in processes of its own, next to training: rank 0's side of ``common/run/pending.py``."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Set

from benchmarks.common.data.problem import FAILED, Problem
from benchmarks.detection import detections
from benchmarks.detection.annotations import DataSet

# In the folder of an experiment: a file for each evaluation, of which only those stay that may be needed again
FOLDER = "detections"
FINISHING_SECONDS = 30.0
# The launcher's file in the folder of an experiment, with the seconds without a heartbeat after which a process hangs;
# and what holds where there is none. 0 never
HANG_LIMIT, HANG_SECONDS = "ranks/hang_seconds", 600.0
LONGEST_GAP = 10.0  # seconds between two looks that count at most: of a job that was suspended as a whole nothing hangs
ROOT = Path(__file__).resolve().parents[2]


class Evaluator:
    """Compares detections with the objects of ``data.val``, one evaluation after the other.

    Its process loads the annotations once, when it starts. It reads the detections from files, so that none are lost
    if a run is interrupted, and leaves pictures of the best and worst images of the last evaluation.
    """

    def __init__(self, data: DataSet, qualities: Mapping[str, str], output: Path, workers: int = 1) -> None:
        """Start nothing yet.

        Args:
            data: whose part ``val`` is evaluated.
            qualities: for "bbox" or "segm" or both the name of its average precision in a result.
            output: folder of the experiment.
            workers: processes that match detections with objects; one does not divide the work.
        """
        self._data, self._qualities, self._output, self._workers = data, dict(qualities), output, workers
        self._folder = output / FOLDER
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._unread = b""
        self._answers: List[Dict[str, Any]] = []
        self._queue: List[int] = []
        self._handed_out = self._drawn = 0
        self._looked, self._silent = time.monotonic(), 0.0

    def open(self) -> None:
        """Start the process, which loads the annotations while training begins."""
        self._folder.mkdir(parents=True, exist_ok=True)
        folders = ["--data", str(self._data.folder.resolve()), "--output", str(self._output.resolve())]
        options = [*folders, "--workers", str(self._workers), "--kinds", *self._qualities]
        command = [sys.executable, "-m", "benchmarks.detection.evaluation_worker", *options]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)

    def start(self, epoch: int, found: detections.Detections) -> None:
        """Begin to evaluate what was ``found`` after ``epoch``, from 1; returns when a file has it."""
        detections.write(self._file(epoch), found)
        self.again(epoch)

    def again(self, epoch: int) -> None:
        """Begin to evaluate what the file of ``epoch`` has.

        Raises:
            Problem: there is no such file.
        """
        if not self._file(epoch).exists():
            raise Problem(
                f"{self._file(epoch)} is missing",
                "the detections that are still to be evaluated",
                "start a new run; or restore the folder from a copy of your own",
            )
        if not self._queue:
            self._looked, self._silent = time.monotonic(), 0.0
        self._queue.append(epoch)
        request = json.dumps({"epoch": epoch, "file": str(self._file(epoch).resolve())}) + "\n"
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("the evaluator was not opened")
        try:
            self._process.stdin.write(request.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def poll(self) -> Optional[Mapping[str, float]]:
        """Return the oldest result that was not handed out, None while it is worked on.

        Raises:
            Problem: the process has ended, or hangs.
        """
        ended = self._read()
        if self._answers:
            answer = self._answers.pop(0)
            self._handed_out = self._queue.pop(0)
            return {self._qualities[kind]: value for kind, value in answer["result"].items()}
        if ended and self._queue:
            raise self._gone()
        now = time.monotonic()
        self._looked, self._silent = now, self._silent + min(now - self._looked, LONGEST_GAP)
        if self._queue and 0 < self._hang_seconds() < self._silent:
            raise self._hanging()
        return None

    def keep(self, epochs: Set[int]) -> None:
        for path in set(self._folder.glob("epoch_*.npz*")) - set(map(self._file, epochs)):
            path.unlink()

    def finish(self) -> None:
        """Wait for the pictures of the last result that was handed out, some seconds at most."""
        end = time.monotonic() + FINISHING_SECONDS
        while self._drawn < self._handed_out and time.monotonic() < end and not self._read():
            time.sleep(0.02)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def _file(self, epoch: int) -> Path:
        return self._folder / f"epoch_{epoch:04d}.npz"

    def _read(self) -> bool:
        if self._process is None or self._process.stdout is None:
            return True
        while True:
            try:
                data = os.read(self._process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return False
            if not data:
                return True
            self._silent = 0.0
            *lines, self._unread = (self._unread + data).split(b"\n")
            for answer in map(json.loads, lines):
                if "result" in answer:
                    self._answers.append(answer)
                elif "drawn" in answer:
                    self._drawn = answer["drawn"]

    def _hang_seconds(self) -> float:
        try:
            return float((self._output / HANG_LIMIT).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return HANG_SECONDS

    def _hanging(self) -> Problem:
        return Problem(
            f"the process that evaluates epoch {self._queue[0]} hangs: it gave no heartbeat for {self._silent:.0f} "
            f"s (process {self._process.pid if self._process is not None else '-'} on {socket.gethostname()})",
            "the average precision of its detections",
            "look for what stops processes on this node; where it is only slow, raise --hang-seconds; then resume the "
            "run, which has a checkpoint and loses no evaluation",
            FAILED,
        )

    def _gone(self) -> Problem:
        code = self._process.wait() if self._process is not None else 0
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        return Problem(
            f"the process that evaluates epoch {self._queue[0]} ended with {how}",
            "the average precision of its detections",
            "look for its message above; where it was killed, give the node more memory; then resume the run, "
            "which has a checkpoint and loses no evaluation",
            FAILED,
        )
