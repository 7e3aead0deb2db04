"""Parsing, the block format and the order of an epoch; prints what the test asks about. Argument: a data set."""

import ctypes
import dataclasses
import faulthandler
import itertools
import json
import mmap
import os
import sys
import tempfile
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.run.mllog import MLLog
from benchmarks.common.run.ranks import Ranks
from benchmarks.dlrm import blocks, criteo, reading
from benchmarks.dlrm.pytorch import train
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import EvaluationInput, TrainingInput, Words, open_data

CONFIG = Config(device="cpu", precision="fp32", cuda_graph=False, batch_size=700, eval_batch_size=100, seed=9)
LIMIT = 40_000_000
CPU = torch.device("cpu")


def parsed_like_python():
    """Random rows, parsed as a whole and field by field."""
    generator = np.random.default_rng(0)
    lines = []
    for _ in range(500):
        numbers = [str(n) if n % 7 else "" for n in generator.integers(-3, 10 ** generator.integers(1, 9), 13)]
        hashes = [format(int(h), "x") if h % 5 else "" for h in generator.integers(0, 2**32, 26)]
        lines.append("\t".join([str(int(generator.integers(2))), *numbers, *hashes]))
    text = ("\n".join(lines[:250]) + "\n" + "\r\n".join(lines[250:]) + "\r\n").encode()
    expected = [
        [int(f[0]), *(int(x or 0) for x in f[1:14]), *(int(x or "0", 16) % LIMIT for x in f[14:])]
        for f in (line.split("\t") for line in lines)
    ]
    found = criteo.parse(text, LIMIT)
    return found.malformed == 0 and np.array_equal(found.columns.T, expected)


def malformed():
    """Which of these lines are rows; the text names what is wrong with the others."""
    good = "1" + "\t5" * 13 + "\tab" * 26
    lines = {
        "good": good,
        "label 2": "2" + good[1:],
        "no label": good[1:],
        "a field short": good[:-3],
        "a field long": good + "\tab",
        "negative id": good[:-2] + "-5",
        "nine digits": good[:-2] + "123456789",
        "no hexadecimal": good[:-2] + "xy",
        "no integer": good.replace("5", "a", 1),
        "larger than 32 bits": good.replace("5", "4294967296", 1),
        "sign alone": good.replace("5", "-", 1),
        "empty": "",
        "negative number": good.replace("5", "-2", 1),
    }
    return [name for name, line in lines.items() if criteo.parse(line.encode() + b"\n", LIMIT).malformed]


def key_of(numbers, indices):
    return [tuple(row) for row in np.concatenate([numbers.numpy(), indices.t().numpy()], axis=1).tolist()]


def rows_of_epoch(data, config, size, epoch):
    """Every row that the ranks see in an epoch."""
    steps = -(-data.train_rows // (config.batch_size * size))
    found = []
    every = range(blocks.TABLES)
    inputs = [TrainingInput(config, data, every, Ranks(r, size, r, size, CPU), epoch * steps) for r in range(size)]
    for _ in range(steps):
        for rank, each in enumerate(inputs):
            batch = each.next()
            mine = slice(rank * config.batch_size, (rank + 1) * config.batch_size)
            found += key_of(batch.numbers, batch.indices[:, mine])
    return found


def read_as_stored(data, stored):
    """Whether batches of any size and tables are the ordered rows, read by the step and many steps at once."""
    order, same = reading.epoch_order(1, 0, data.train_rows), []
    ordered = np.concatenate([stored[:, b * 1024 : (b + 1) * 1024] for b in order.tolist()], axis=1)
    endless = np.concatenate([ordered, ordered, ordered], axis=1)
    cases = itertools.product(
        (1, 1 << 21), ((1, 2), (3, 4), (0, 1)), ((700, (3,)), (2600, (25, 3, 4)), (5120, range(26)))
    )
    for reading.TASK_WORDS, (rank, ranks), (size, tables) in cases:
        me, total = Ranks(rank, ranks, rank, ranks, CPU), size * ranks
        reader = reading.Reader(data.train, data.train_rows, size, tables, data.table_sizes, me)
        steps = 0
        for task in itertools.takewhile(lambda each: each.epoch == 0, reader.tasks(0)):
            words = Words.empty(len(tables), *reader.words)
            reader.ask_for(order, task)
            for places in reader.fill(order, task, *(part.numpy() for part in words.parts())):
                batch, first = words.batch(*places), steps * total
                rows, mine = slice(first, first + total), slice(first + rank * size, first + (rank + 1) * size)
                same.append(np.array_equal(batch.indices, endless[[14 + table for table in tables], rows]))
                same.append(np.array_equal(batch.numbers, endless[1:14, mine].view(np.float32).T))
                same.append(np.array_equal(batch.labels, endless[0, mine]))
                steps += 1
        same.append(steps == -(-data.train_rows // total))
    return all(same)


def refusal(call):
    try:
        call()
    except SystemExit as error:
        return str(error)
    return ""


class Guard:
    """Lets the process die where it reads train.bin or val.bin before ``open`` is called."""

    def __init__(self):
        self._mapped = []
        self._protect = ctypes.CDLL(None, use_errno=True).mprotect
        self.opened = blocks.open_blocks

    def open_blocks(self, *arguments):
        found = self.opened(*arguments)
        self._mapped.append(found)
        self._set(found, 0)
        return found

    def open(self):
        for each in self._mapped:
            self._set(each, mmap.PROT_READ)

    def _set(self, array, protection):
        address, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        assert self._protect(address, size, protection) == 0, os.strerror(ctypes.get_errno())


def trained(folder):
    """A whole training whose data set may be read from run_start on, and not before."""
    guard, run_start = Guard(), MLLog.run_start
    blocks.open_blocks = guard.open_blocks

    def start(log):
        guard.open()
        run_start(log)

    MLLog.run_start = start
    with tempfile.TemporaryDirectory() as output:
        config = Path(output) / "config.json"
        settings = {"bottom_mlp": (8, 4), "top_mlp": (8, 1), "eval_interval": 4, "log_interval": 1, "warmup_steps": 1}
        small = dataclasses.replace(CONFIG, **settings, decay_start_step=2)
        config.write_text(json.dumps(dataclasses.asdict(small)), encoding="utf-8")
        code = train.main(["--config", str(config), "--data", str(folder), "--output", output])
        stream = (Path(output) / "metrics.jsonl").read_text(encoding="utf-8")
    blocks.open_blocks, MLLog.run_start = guard.opened, run_start
    return code == 0 and '"kind": "eval"' in stream


def readers():
    """How many threads read ahead."""
    return sum(thread.name.startswith("ThreadPool") for thread in threading.enumerate())


def threads(data):
    """The readers while an input is used, and after its end."""
    found = {}
    with closing(TrainingInput(CONFIG, data, range(26), Ranks(0, 1, 0, 1, CPU), 0)) as one:
        one.next()
        found["running"] = readers()
    found["closed"] = readers()
    broken = data._replace(table_sizes=(1,) * 26)
    with closing(TrainingInput(CONFIG, broken, range(26), Ranks(0, 1, 0, 1, CPU), 0)) as two:
        assert "has indices from" in refusal(two.next)
    found["after an error"] = readers()
    return found


def changed_by_warm_up(sizes):
    """The largest change of any weight by the steps on noise."""
    config = dataclasses.replace(CONFIG, bottom_mlp=(8, 4), top_mlp=(8, 1), warm_up_steps=2)
    model = train.build(config, sizes, Ranks(0, 1, 0, 1, CPU), {})
    before = model.weights.clone(), model.tables.weight.clone()
    state, updated = torch.get_rng_state(), []
    update = model.update
    model.update = lambda rate: updated.append(float(rate)) or update(rate)
    train.warm_up(model, sizes)
    assert updated == [0.0, 0.0]
    assert torch.equal(state, torch.get_rng_state())
    return max(float((a - b).abs().max()) for a, b in zip(before, (model.weights, model.tables.weight)))


def main():
    folder = Path(sys.argv[1])
    data = open_data(folder, CONFIG, 1, 1 << 40)
    stored = data.train.transpose(1, 0, 2).reshape(blocks.COLUMNS, -1)[:, : data.train_rows]
    numbers = torch.from_numpy(stored[1:14].copy()).view(torch.float32).t()
    truth = key_of(numbers, torch.from_numpy(stored[14:].astype(np.int64)))
    found = {"read": read_as_stored(data, stored), "parse": parsed_like_python(), "malformed": malformed()}
    for shuffle in ("blocks", "rows"):
        config = dataclasses.replace(CONFIG, shuffle=shuffle)
        first, second, two = (rows_of_epoch(data, config, *which) for which in ((1, 0), (1, 1), (2, 0)))
        filled = len(first) - len(truth)
        counts = Counter(first)
        counts.subtract(Counter(first[:filled]))
        found[shuffle] = {
            "every row once": counts == Counter(truth),
            "another order": first != second,
            "ranks together": set(truth) <= set(two),
        }
    first = [EvaluationInput(CONFIG, data, range(26), Ranks(r, 3, r, 3, CPU)) for r in range(3)]
    found["evaluated"] = sum(counted for each in first for _, counted in each.one_pass())
    found["counts"] = [data.train_rows, data.val_rows]
    found["threads"] = threads(data)
    found["changed by the warm-up"] = changed_by_warm_up(data.table_sizes)
    ranks, saved = Ranks(0, 2, 0, 2, CPU), {"tables": torch.zeros(4, 2), "placement": [[0, 2], [1]]}
    found["another placement"] = refusal(lambda: train.saved_placement(saved, (4, 2, 2), ranks))
    found["no placement"] = refusal(lambda: train.saved_placement({"tables": saved["tables"]}, (4, 2, 2), ranks))
    assert train.saved_placement({**saved, "placement": [[0], [1, 2]]}, (4, 2, 2), ranks) == ((0,), (1, 2))
    faulthandler.enable()  # shows where the data set was read too early
    found["trained"] = trained(folder)
    found["threads"]["after the training"] = readers()
    print(json.dumps(found))


main()
