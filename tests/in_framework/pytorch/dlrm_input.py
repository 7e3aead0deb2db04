"""DLRM's input: batches are the rows of the data set in epoch order, and reading starts with the clock."""

import ctypes
import dataclasses
import itertools
import json
import mmap
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

CONFIG = Config(device="cpu", precision="fp32", cuda_graph=False, batch_size=350, eval_batch_size=100, seed=9)
CPU = torch.device("cpu")
ROWS_PER_DAY = 2501


def make_ranks(size):
    return [Ranks(rank, size, rank, size, CPU) for rank in range(size)]


def criteo_row(number):
    numbers = [str(number % (column + 2) - 1) if number % 5 else "" for column in range(13)]
    hashes = [f"{(number * 7919 + column) % (40 + column):08x}" for column in range(26)]
    return "\t".join([str(number % 3 // 2), *numbers, *hashes]) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # A data set of two training days and one for evaluation
    raw, prepared = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("prepared") / "dlrm"
    for day in range(3):
        (raw / f"day_{day}").write_text("".join(map(criteo_row, range(day * ROWS_PER_DAY, (day + 1) * ROWS_PER_DAY))))
    assert prepare.main([str(raw), "-o", str(prepared)]) == 0
    return prepared


@pytest.fixture(scope="module")
def data(folder):
    return inputs.open_data(folder, CONFIG, 1, 1 << 40)


@pytest.fixture(scope="module")
def stored(data):
    # All training rows, int32 (columns, rows)
    return data.train.transpose(1, 0, 2).reshape(blocks.COLUMNS, -1)[:, : data.train_rows]


@pytest.mark.parametrize("words_at_once", [1, 1 << 21])
@pytest.mark.parametrize(("rank", "ranks"), [(1, 2), (3, 4), (0, 1)])
@pytest.mark.parametrize(("size", "tables"), [(350, (3,)), (1300, (25, 3, 4)), (2560, range(26))])
def test_batches_are_the_ordered_rows(words_at_once, rank, ranks, size, tables, data, stored, monkeypatch):
    monkeypatch.setattr(inputs, "TASK_WORDS", words_at_once)
    order, total = inputs.epoch_order(1, 0, data.train_rows), size * ranks
    ordered = np.concatenate([stored[:, block * 1024 : (block + 1) * 1024] for block in order.tolist()], axis=1)
    endless = np.concatenate([ordered] * 4, axis=1)
    loader = inputs.Loader(data.train, data.train_rows, size, data, tables, make_ranks(ranks)[rank])
    epoch = itertools.takewhile(lambda task: task.epoch == 0, loader.tasks(0))
    with closing(loader.batches(epoch, lambda _: order, 0)) as batches:
        for step, batch in enumerate(batches):
            own = slice(step * total + rank * size, step * total + (rank + 1) * size)
            expected = endless[[14 + table for table in tables], step * total : (step + 1) * total]
            assert np.array_equal(batch.indices, expected)
            assert np.array_equal(batch.numbers, endless[1:14, own].view(np.float32).T)
            assert np.array_equal(batch.labels, endless[0, own])
    assert step + 1 == -(-data.train_rows // total)


def rows_of_epoch(data, config, size, epoch):
    # Return all rows that the ranks read in an epoch, as tuples
    steps, rows = -(-data.train_rows // (config.batch_size * size)), []
    for rank in make_ranks(size):
        own = slice(rank.rank * config.batch_size, (rank.rank + 1) * config.batch_size)
        for batch in itertools.islice(inputs.training_batches(config, data, range(26), rank, epoch * steps), steps):
            rows += map(tuple, torch.cat((batch.numbers, batch.indices[:, own].t()), 1).tolist())
    return rows


@pytest.mark.parametrize("shuffle", ["blocks", "rows"])
def test_an_epoch_has_every_row_once_in_another_order(data, stored, shuffle):
    expected = np.concatenate((stored[1:14].view(np.float32), stored[14:].astype(np.float32))).T.tolist()
    config = dataclasses.replace(CONFIG, shuffle=shuffle)
    first, second, two_ranks = (rows_of_epoch(data, config, *case) for case in ((1, 0), (1, 1), (2, 0)))
    # The first rows are in the last batch again.
    assert Counter(first) - Counter(first[: len(first) - len(expected)]) == Counter(map(tuple, expected))
    assert first != second and {*map(tuple, expected)} <= {*two_ranks}


def test_every_evaluation_row_counts_once(data):
    passes = [inputs.EvaluationInput(CONFIG, data, range(26), rank).one_pass() for rank in make_ranks(3)]
    assert sum(count for _, count in itertools.chain(*passes)) == data.val_rows


def test_reader_threads_end_after_an_error(data):
    invalid = inputs.training_batches(CONFIG, data._replace(table_sizes=(1,) * 26), range(26), *make_ranks(1), 0)
    with closing(invalid), pytest.raises(SystemExit, match="indices"):
        next(invalid)
    assert not any(thread.name.startswith("ThreadPool") for thread in threading.enumerate())


SMALL = {"bottom_mlp": (8, 4), "top_mlp": (8, 1)}


def test_warm_up_changes_nothing(data):
    training = train.build(dataclasses.replace(CONFIG, **SMALL, warm_up_steps=2), data.table_sizes, *make_ranks(1), {})
    tensors = [training.weights, training.tables.weight]
    before = [tensor.clone() for tensor in (*tensors, torch.get_rng_state())]
    train.warm_up(training, data.table_sizes)
    assert all(map(torch.equal, before, (*tensors, torch.get_rng_state())))


def test_checkpoint_of_another_placement_is_rejected():
    rank, saved = Ranks(0, 2, 0, 2, CPU), {"tables": torch.zeros(4, 2), "placement": [[0, 2], [1]]}
    with pytest.raises(SystemExit, match="rank 0 saved 4 rows, and the recorded placement gives it 6"):
        train.saved_placement(saved, (4, 2, 2), rank)

    assert train.saved_placement({**saved, "placement": [[0], [1, 2]]}, (4, 2, 2), rank) == ((0,), (1, 2))


def test_no_row_is_read_before_the_clock_starts(folder, tmp_path, monkeypatch):
    """The mapped files are unreadable before run_start: an earlier access kills the process."""
    mprotect, arrays = ctypes.CDLL(None, use_errno=True).mprotect, []
    open_blocks, run_start = blocks.open_blocks, MLLog.run_start

    def protect(array, access):
        assert mprotect(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), access) == 0

    def open_protected(*arguments):
        arrays.append(open_blocks(*arguments))
        protect(arrays[-1], 0)
        return arrays[-1]

    def start(log):
        for array in arrays:
            protect(array, mmap.PROT_READ)
        run_start(log)

    monkeypatch.setattr(blocks, "open_blocks", open_protected)
    monkeypatch.setattr(MLLog, "run_start", start)
    settings = {**SMALL, "eval_interval": 4, "log_interval": 1, "warmup_steps": 1, "decay_start_step": 2}
    config = json.dumps(dataclasses.asdict(dataclasses.replace(CONFIG, **settings)))
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    arguments = ["--config", str(tmp_path / "config.json"), "--data", str(folder), "--output", str(tmp_path)]
    assert train.main(arguments) == 0
    assert arrays and '"kind": "eval"' in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
