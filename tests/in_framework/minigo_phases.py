"""Kill a run of Minigo by SIGKILL in each phase, resume it each time, and let it end: how each process ended, as JSON.

The processes are forked after TensorFlow is imported. A process is killed at the first call, for which a condition
holds, of the function that the phase is in.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common.run.run import Run
from benchmarks.minigo import shown
from benchmarks.minigo.records import GameFile, encode
from benchmarks.minigo.selfplay import MatchWorker
from benchmarks.minigo.tensorflow import generations, train
from benchmarks.minigo.tensorflow.generations import Generations
from benchmarks.minigo.tensorflow.train import Training

config, data, output = sys.argv[1:]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def torn_record(file: GameFile, games: list[Any]) -> None:
    """Die in the middle of the second game's record."""
    file.kept = [*getattr(file, "kept", []), *games]  # type: ignore[attr-defined]
    if len(file.kept) > 1:  # type: ignore[attr-defined]
        first, second = (encode(game) for game in file.kept[:2])  # type: ignore[attr-defined]
        file._file.write(first + second[:-7])
        file._file.flush()
        die()


def torn_evaluation(worker: MatchWorker) -> None:
    """Die in the second model's match, a part of whose line is there."""
    path = Path(output) / generations.EVALUATIONS
    if path.exists():
        with path.open("a", encoding="utf-8") as file:
            file.write('{"generation": 2, "win_')
        die()
    play(worker)


def after(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Die at the end of so many calls."""
    count = 0

    def call(*values: Any) -> Any:
        nonlocal count
        found, count = function(*values), count + 1
        if count == calls:
            die()
        return found

    return call


play = MatchWorker.play
PHASES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "in the games": (GameFile, "add", torn_record),
    "after the games": (GameFile, "close", after(GameFile.close, 1)),
    "in the training": (Generations, "_train_on", after(Generations._train_on, 2)),
    "after the training": (Training, "share", after(Training.share, 1)),
    "in the match with the present model": (MatchWorker, "play", lambda *_: die()),
    "after the model is written": (shown, "write", after(shown.write, 1)),
    "after the checkpoint": (Run, "_save", after(Run._save, 1)),
    "in the match with the target": (MatchWorker, "play", torn_evaluation),
}


def in_child(place: tuple[Any, str, Callable[..., Any]] | None) -> int:
    """Return how a run ended that is to die in a phase: 0, or minus the signal."""
    child = os.fork()
    if child == 0:
        arguments = ["--config", config, "--data", data, "--output", output]
        if place is None:
            os._exit(train.main(arguments))
        with mock.patch.object(*place):
            os._exit(train.main(arguments) or 99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


ended = {phase: in_child(place) for phase, place in PHASES.items()}
print(json.dumps({"killed": ended, "last": in_child(None)}))
