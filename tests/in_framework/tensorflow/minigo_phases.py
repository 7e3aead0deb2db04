"""Kill a run of Minigo by SIGKILL in each phase, resume it each time, and let it end.

The processes are forked after TensorFlow is imported. A process is killed at a call of the function that the phase is
in.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import signal
from functools import partial
from unittest import mock

import numpy as np

from benchmarks.common.run.run import Run
from benchmarks.minigo import prepare, records, selfplay
from benchmarks.minigo.tensorflow import generations, train
from tests.in_framework.minigo import TINY, config_of, frozen_graph

import tensorflow as tf  # isort: skip

LONG = True
add = records.GameFile.add


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def torn_record(file, games):
    # Die in the middle of the second game's record
    if file.numbers:
        file._file.write(records.encode(*games)[:-7])
        file._file.flush()
        die()
    add(file, games)


def after(owner, name, calls=1):
    # Die at the end of so many calls
    function, count = getattr(owner, name), itertools.count(1)

    def call(*values, **named):
        found = function(*values, **named)
        return die() if next(count) == calls else found

    return owner, name, call


PHASES = {
    "in the games": (records.GameFile, "add", torn_record),
    "after the games": after(records.GameFile, "close"),
    "in the training": after(generations.Generations, "_train_on", calls=2),
    "after the training": after(train.Training, "share"),
    "in the match with the present model": (selfplay.MatchWorker, "play", die),
    "after the model is written": after(records, "show"),
    "after the checkpoint": after(Run, "_save"),
    "in the match with the target": (generations.Generations, "_play_together", die),
}


def in_child(call):
    # How a process ended, such as minus a signal: TensorFlow's threads would not survive a fork
    child = os.fork()
    if child == 0:
        os._exit(call())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_every_phase_can_be_killed_and_no_game_is_lost_or_there_twice(tmp_path):
    output, data, target, config = (tmp_path / name for name in ("out", "data", "target.pb", "config.json"))
    output.mkdir()
    config.write_text(json.dumps(dataclasses.asdict(config_of(**TINY))))
    run = partial(train.main, ["--config", str(config), "--data", str(data), "--output", str(output)])

    def preparation():
        weights = np.random.RandomState(0).standard_normal((425, 27)) * 0.2
        target.write_bytes(frozen_graph(weights, "nhwc", tf.float32))
        return prepare.main(["-o", str(data), "--target", str(target)])

    def killed(place):
        with mock.patch.object(*place):
            return run() or 99

    assert in_child(preparation) == 0
    manifest = json.loads((data / "dataset.json").read_text())
    assert manifest["how"]["target"] == hashlib.sha256(target.read_bytes()).hexdigest()
    for phase, place in PHASES.items():
        assert in_child(partial(killed, place)) == -signal.SIGKILL, phase
    assert in_child(run) == 0
    for generation in (1, 2):
        numbers = [game.number for game in records.read_generation(records.generation_folder(output, generation), 5)]
        assert numbers == [generation * 1_000_000 + number for number in range(40)]
    lines = (output / generations.EVALUATIONS).read_text().splitlines()
    assert [json.loads(line)["generation"] for line in lines] == [1, 2]
