"""Kill a run of Minigo by SIGKILL in each phase, resume it each time, and let it end.

The processes are forked after TensorFlow is imported. A process is killed at the first call, for which a condition
holds, of the function that the phase is in.
"""

import hashlib
import json
import os
import signal
from functools import partial
from unittest import mock

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.common.run.run import Run
from benchmarks.minigo import examples, prepare, records
from benchmarks.minigo.records import GameFile, encode, generation_folder, read_generation
from benchmarks.minigo.selfplay import MatchWorker
from benchmarks.minigo.tensorflow import generations, train
from benchmarks.minigo.tensorflow.generations import Generations
from benchmarks.minigo.tensorflow.train import Training
from tests.in_framework.minigo import TINY, config_of, frozen_graph, write

import tensorflow as tf  # isort: skip


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def torn_record(file, games):
    """Die in the middle of the second game's record."""
    file.seen = [*getattr(file, "seen", []), *games]
    if len(file.seen) > 1:
        first, second = (encode(game) for game in file.seen[:2])
        file._file.write(first + second[:-7])
        file._file.flush()
        die()


def after(function, calls):
    """Die at the end of so many calls."""
    count = 0

    def call(*values):
        nonlocal count
        found, count = function(*values), count + 1
        if count == calls:
            die()
        return found

    return call


def phases(output):
    play = MatchWorker.play

    def torn_evaluation(worker):
        """Die in the second model's match, a part of whose line is there."""
        if (output / generations.EVALUATIONS).exists():
            with (output / generations.EVALUATIONS).open("a", encoding="utf-8") as file:
                file.write('{"generation": 2, "win_')
            die()
        play(worker)

    return {
        "in the games": (GameFile, "add", torn_record),
        "after the games": (GameFile, "close", after(GameFile.close, 1)),
        "in the training": (Generations, "_train_on", after(Generations._train_on, 2)),
        "after the training": (Training, "share", after(Training.share, 1)),
        "in the match with the present model": (MatchWorker, "play", lambda *_: die()),
        "after the model is written": (records, "show", after(records.show, 1)),
        "after the checkpoint": (Run, "_save", after(Run._save, 1)),
        "in the match with the target": (MatchWorker, "play", torn_evaluation),
    }


def test_every_phase_can_be_killed_and_no_game_is_lost_or_there_twice(tmp_path):
    output, data = tmp_path / "out", tmp_path / "data"
    output.mkdir()
    target = tmp_path / "target.pb"
    arguments = ["--config", str(write(tmp_path / "config.json", **TINY)), "--data", str(data), "--output", str(output)]

    def in_child(call):
        """Return how a process ended, such as minus a signal: TensorFlow's threads would not survive a fork."""
        child = os.fork()
        if child == 0:
            os._exit(call())
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def preparation():
        graph = frozen_graph(np.random.RandomState(0).standard_normal((425, 27)) * 0.2, "nhwc", tf.float32)
        target.write_bytes(graph)
        return prepare.main(["-o", str(data), "--target", str(target)])

    def killed(place):
        with mock.patch.object(*place):
            return train.main(arguments) or 99

    assert in_child(preparation) == 0
    passport = json.loads((data / "dataset.json").read_text())
    assert passport["how"]["target"] == hashlib.sha256(target.read_bytes()).hexdigest()
    for phase, place in phases(output).items():
        assert in_child(partial(killed, place)) == -signal.SIGKILL, phase
    assert in_child(partial(train.main, arguments)) == 0
    for generation in (1, 2):
        numbers = [game.number for game in read_generation(generation_folder(output, generation), 5)]
        assert numbers == [generation * 1_000_000 + number for number in range(40)]
    assert sorted(path.name for path in (output / "models").iterdir()) == ["000001.npz", "000002.npz"]
    lines = (output / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["generation"] for line in lines] == [1, 2]

    # Games that are missing or damaged in such a run are named.
    config, path = config_of(**TINY), next(generation_folder(output, 1).glob("*.games"))
    assert len(examples.read_window(output, config, 2)) == 80
    whole = path.read_bytes()
    for content, words in (
        (whole[:-3], "has 39 games"),
        (whole[:60] + bytes([whole[60] ^ 1]) + whole[61:], "differs from its checksum"),
    ):
        path.write_bytes(content)
        with pytest.raises(Problem, match=words) as caught:
            examples.read_window(output, config, 2)
        assert "begin a new run" in caught.value.hint
