"""Average precision in separate processes while training continues: implements ``common/run/pending.py`` on rank 0."""

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

# In the experiment folder: one file per evaluation, kept while it may still be needed
FOLDER = "detections"
FINISHING_SECONDS = 30.0
# File of the launcher in the experiment folder: seconds without a heartbeat after which a process counts as hung;
# default. 0: never
HANG_LIMIT, HANG_SECONDS = "ranks/hang_seconds", 600.0
LONGEST_GAP = 10.0  # maximum seconds counted between two polls: a suspended job is not hung
ROOT = Path(__file__).resolve().parents[2]


class Evaluator:
    """Compares detections with the objects of ``data.val``, in the order of the evaluations.

    The process loads the annotations when it starts. It reads detections from files, so that an interrupted run does
    not lose them, and writes images of the best and worst results of the last evaluation.
    """

    def __init__(self, data: DataSet, qualities: Mapping[str, str], output: Path, workers: int = 1) -> None:
        """Set up without starting the process.

        Args:
            data: ``val`` is evaluated.
            qualities: name of the average precision in a result, by kind ("bbox", "segm").
            output: experiment folder.
            workers: processes that match detections with objects.
        """
        self._data, self._qualities, self._output, self._workers = data, dict(qualities), output, workers
        self._folder = output / FOLDER
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._unread = b""
        self._answers: List[Dict[str, Any]] = []
        self._queue: List[int] = []
        self._reported = self._drawn = 0
        self._looked, self._silent = time.monotonic(), 0.0

    def open(self) -> None:
        """Start the process, which loads the annotations while training starts."""
        self._folder.mkdir(parents=True, exist_ok=True)
        folders = ["--data", str(self._data.folder.resolve()), "--output", str(self._output.resolve())]
        options = [*folders, "--workers", str(self._workers), "--kinds", *self._qualities]
        command = [sys.executable, "-m", "benchmarks.detection.evaluation_worker", *options]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)

    def start(self, epoch: int, results: detections.Detections) -> None:
        """Write the detections of ``epoch`` (from 1) to a file and request the evaluation."""
        detections.write(self._file(epoch), results)
        self.again(epoch)

    def again(self, epoch: int) -> None:
        """Request the evaluation of the file of ``epoch``.

        Raises:
            Problem: the file is missing.
        """
        if not self._file(epoch).exists():
            raise Problem(
                f"{self._file(epoch)} is missing",
                "the detections that are still to be evaluated",
                "start a new run; or restore the folder from a backup",
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
            raise self._exit_problem() from None

    def poll(self) -> Optional[Mapping[str, float]]:
        """Return the oldest unreported result, or None if it is not ready.

        Raises:
            Problem: the process has exited, or hangs.
        """
        at_eof = self._read()
        if self._answers:
            answer = self._answers.pop(0)
            self._reported = self._queue.pop(0)
            return {self._qualities[kind]: value for kind, value in answer["result"].items()}
        if at_eof and self._queue:
            raise self._exit_problem()
        now = time.monotonic()
        self._looked, self._silent = now, self._silent + min(now - self._looked, LONGEST_GAP)
        if self._queue and 0 < self._hang_seconds() < self._silent:
            process = self._process.pid if self._process is not None else "-"
            raise Problem(
                f"the process that evaluates epoch {self._queue[0]} hangs: it gave no heartbeat for {self._silent:.0f} "
                f"s (process {process} on {socket.gethostname()})",
                "the average precision of its detections",
                "find out what stops processes on this node, or raise --hang-seconds if it is only slow; then resume "
                "the run: its checkpoint keeps all evaluations",
                FAILED,
            )
        return None

    def keep(self, epochs: Set[int]) -> None:
        for path in set(self._folder.glob("epoch_*.npz*")) - set(map(self._file, epochs)):
            path.unlink()

    def finish(self) -> None:
        """Wait up to FINISHING_SECONDS for the images of the last reported result."""
        end = time.monotonic() + FINISHING_SECONDS
        while self._drawn < self._reported and time.monotonic() < end and not self._read():
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

    def _exit_problem(self) -> Problem:
        code = self._process.wait() if self._process is not None else 0
        status = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        return Problem(
            f"the process that evaluates epoch {self._queue[0]} ended with {status}",
            "the average precision of its detections",
            "see its message above; if it was killed, the node may need more memory; then resume the run: its "
            "checkpoint keeps all evaluations",
            FAILED,
        )
