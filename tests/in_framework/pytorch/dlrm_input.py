"""DLRM's input: batches are the rows of the data set in the order of an epoch, and none is read before the clock."""

import ctypes
import dataclasses
import faulthandler
import itertools
import json
import mmap
import os
import threading
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
import torch

from benchmarks.common.run.mllog import MLLog
from benchmarks.common.run.ranks import Ranks
from benchmarks.dlrm import blocks, prepare
from benchmarks.dlrm.pytorch import data as inputs
from benchmarks.dlrm.pytorch import train
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import EvaluationInput, Loader, open_data, training_batches

CONFIG = Config(device="cpu", precision="fp32", cuda_graph=False, batch_size=700, eval_batch_size=100, seed=9)
CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 0, 1, CPU)


def row(number):
    # A row of Criteo's format that depends on its number.
    numbers = [str(number % (column + 2) - 1) if number % 5 else "" for column in range(13)]
    hashes = [f"{(number * 7919 + column) % (40 + column):08x}" for column in range(26)]
    return "\t".join([str(number % 3 // 2), *numbers, *hashes]) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Two days to train on, and one held out.
    raw, to = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("prepared") / "dlrm"
    for day in range(3):
        (raw / f"day_{day}").write_text("".join(row(day * 5001 + number) for number in range(5001)))
    assert prepare.main([str(raw), "-o", str(to)]) == 0
    return to


@pytest.fixture(scope="module")
def data(folder):
    return open_data(folder, CONFIG, 1, 1 << 40)


@pytest.fixture(scope="module")
def stored(data):
    # All training rows, int32 [columns, rows].
    return data.train.transpose(1, 0, 2).reshape(blocks.COLUMNS, -1)[:, : data.train_rows]


def test_batches_are_the_ordered_rows_read_by_the_step_and_many_at_once(data, stored, monkeypatch):
    order = inputs.epoch_order(1, 0, data.train_rows)
    ordered = np.concatenate([stored[:, b * 1024 : (b + 1) * 1024] for b in order.tolist()], axis=1)
    endless = np.concatenate([ordered, ordered, ordered], axis=1)
    batches = ((700, (3,)), (2600, (25, 3, 4)), (5120, range(26)))
    for words_at_once, (rank, ranks), (size, tables) in itertools.product(
        (1, 1 << 21), ((1, 2), (3, 4), (0, 1)), batches
    ):
        monkeypatch.setattr(inputs, "TASK_WORDS", words_at_once)
        loader, total = (
            Loader(data.train, data.train_rows, size, data, tables, Ranks(rank, ranks, rank, ranks, CPU)),
            size * ranks,
        )
        epoch = itertools.takewhile(lambda each: each.epoch == 0, loader.tasks(0))
        with closing(loader.batches(epoch, lambda _: order, 0)) as found:
            for step, batch in enumerate(found):
                first = step * total
                rows, mine = slice(first, first + total), slice(first + rank * size, first + (rank + 1) * size)
                assert np.array_equal(batch.indices, endless[[14 + table for table in tables], rows])
                assert np.array_equal(batch.numbers, endless[1:14, mine].view(np.float32).T)
                assert np.array_equal(batch.labels, endless[0, mine])
        assert step + 1 == -(-data.train_rows // total)


def key_of(numbers, indices):
    return [tuple(row) for row in np.concatenate([numbers.numpy(), indices.t().numpy()], axis=1).tolist()]


def rows_of_epoch(data, config, size, epoch):
    # Every row that the ranks see in an epoch.
    steps = -(-data.train_rows // (config.batch_size * size))
    every, found = range(blocks.TABLES), []
    ranks = [Ranks(rank, size, rank, size, CPU) for rank in range(size)]
    each_input = [training_batches(config, data, every, rank, epoch * steps) for rank in ranks]
    for _ in range(steps):
        for rank, each in enumerate(each_input):
            batch = next(each)
            mine = slice(rank * config.batch_size, (rank + 1) * config.batch_size)
            found += key_of(batch.numbers, batch.indices[:, mine])
    return found


@pytest.mark.parametrize("shuffle", ["blocks", "rows"])
def test_an_epoch_has_every_row_once_in_another_order(data, stored, shuffle):
    numbers = torch.from_numpy(stored[1:14].copy()).view(torch.float32).t()
    truth = key_of(numbers, torch.from_numpy(stored[14:].astype(np.int64)))
    config = dataclasses.replace(CONFIG, shuffle=shuffle)
    first, second, two = (rows_of_epoch(data, config, *which) for which in ((1, 0), (1, 1), (2, 0)))
    filled = Counter(first[: len(first) - len(truth)])  # the last batch begins again
    assert Counter(first) - filled == Counter(truth)
    assert first != second
    assert set(truth) <= set(two)


def test_every_evaluation_row_counts_once(data):
    every = [EvaluationInput(CONFIG, data, range(26), Ranks(r, 3, r, 3, CPU)) for r in range(3)]
    assert sum(counted for each in every for _, counted in each.one_pass()) == data.val_rows


def readers():
    # How many threads read ahead.
    return sum(thread.name.startswith("ThreadPool") for thread in threading.enumerate())


def test_threads_end_with_their_input_also_after_an_error(data):
    with closing(training_batches(CONFIG, data, range(26), ALONE, 0)) as one:
        next(one)
        assert readers() == min(2, len(os.sched_getaffinity(0))), "prefetch = 2"
    assert readers() == 0
    broken = data._replace(table_sizes=(1,) * 26)
    two = training_batches(CONFIG, broken, range(26), ALONE, 0)
    with closing(two), pytest.raises(SystemExit, match="indices"):
        next(two)
    assert readers() == 0


def test_warm_up_changes_nothing(data, monkeypatch):
    config = dataclasses.replace(CONFIG, bottom_mlp=(8, 4), top_mlp=(8, 1), warm_up_steps=2)
    training = train.build(config, data.table_sizes, ALONE, {})
    before, state, rates = [training.weights.clone(), training.tables.weight.clone()], torch.get_rng_state(), []
    update = training.update
    monkeypatch.setattr(training, "update", lambda rate: rates.append(float(rate)) or update(rate))
    train.warm_up(training, data.table_sizes)
    assert rates == [0.0, 0.0]
    assert all(map(torch.equal, before, (training.weights, training.tables.weight)))
    assert torch.equal(state, torch.get_rng_state())


def test_checkpoint_of_another_placement_is_refused():
    ranks, saved = Ranks(0, 2, 0, 2, CPU), {"tables": torch.zeros(4, 2), "placement": [[0, 2], [1]]}
    with pytest.raises(SystemExit, match="rank 0 saved 4 rows, and the recorded placement gives it 6"):
        train.saved_placement(saved, (4, 2, 2), ranks)
    with pytest.raises(SystemExit, match="gives it 0"):
        train.saved_placement({"tables": saved["tables"]}, (4, 2, 2), ranks)
    assert train.saved_placement({**saved, "placement": [[0], [1, 2]]}, (4, 2, 2), ranks) == ((0,), (1, 2))


def test_no_row_is_read_before_the_clock_starts(folder, tmp_path, monkeypatch):
    # Reading train.bin or val.bin before run_start would end the process.
    faulthandler.enable()  # shows where
    protect, mapped = ctypes.CDLL(None, use_errno=True).mprotect, []
    opened, run_start = blocks.open_blocks, MLLog.run_start

    def allow(array, protection):
        assert protect(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), protection) == 0

    def open_closed(*arguments):
        mapped.append(opened(*arguments))
        allow(mapped[-1], 0)
        return mapped[-1]

    def start(log):
        for each in mapped:
            allow(each, mmap.PROT_READ)
        run_start(log)

    monkeypatch.setattr(blocks, "open_blocks", open_closed)
    monkeypatch.setattr(MLLog, "run_start", start)
    settings = {"bottom_mlp": (8, 4), "top_mlp": (8, 1), "eval_interval": 4, "log_interval": 1, "warmup_steps": 1}
    small = dataclasses.asdict(dataclasses.replace(CONFIG, **settings, decay_start_step=2))
    (tmp_path / "config.json").write_text(json.dumps(small), encoding="utf-8")
    where = ["--config", str(tmp_path / "config.json"), "--data", str(folder), "--output", str(tmp_path)]
    assert train.main(where) == 0
    assert '"kind": "eval"' in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert mapped and readers() == 0
