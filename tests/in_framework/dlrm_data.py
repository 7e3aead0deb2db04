"""Parsing, the block format and the order of an epoch; prints what the test asks about. Argument: a data set."""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.data.problem import Problem
from benchmarks.common.ranks import Ranks
from benchmarks.dlrm import blocks, criteo
from benchmarks.dlrm.placement import place
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import EvaluationInput, TrainingInput, check_memory, open_data

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


def refusal(call):
    try:
        call()
    except Problem as error:
        return str(error)
    return ""


def main():
    folder = Path(sys.argv[1])
    data = open_data(folder, CONFIG, 1, 1 << 40)
    stored = data.train.transpose(1, 0, 2).reshape(blocks.COLUMNS, -1)[:, : data.train_rows]
    numbers = torch.from_numpy(stored[1:14].copy()).view(torch.float32).t()
    truth = key_of(numbers, torch.from_numpy(stored[14:].astype(np.int64)))
    found = {"parse": parsed_like_python(), "malformed": malformed()}
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
    found["too large"] = refusal(lambda: check_memory((10**9, *[5] * 25), Config(), 8, 40 * 10**9))
    found["more ranks"] = refusal(lambda: check_memory([10**7] * 26, Config(), 1, 40 * 10**9))
    submitted = (39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10)
    submitted += (2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36)
    found["placed"] = [sum(submitted[t] for t in tables) for tables in place(submitted, 8)]
    found["each once"] = sorted(t for tables in place(submitted, 40) for t in tables) == list(range(26))
    print(json.dumps(found))


main()
