"""What the sampler draws on any number of ranks, and how the evaluator places ties; prints JSON on rank 0."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.ncf.pytorch import data, evaluation
from benchmarks.ncf.pytorch.config import Config
from benchmarks.ncf.sources.interactions import draw_negatives
from tests.in_framework.ncf_model import HELD_OUT, ITEMS, USERS, small_data

NEGATIVES = 4
BATCH = 60
EPOCHS = 200


def samples_of_epoch(sampler: data.Sampler, seed: int) -> list:
    """[user, item, label] of every sample of all ranks, in the order of the steps."""
    sampler.draw_epoch(seed)
    found = []
    for step in range(sampler.steps_per_epoch):
        batch = sampler.batch(step)
        mine = torch.stack((batch.users, batch.items, batch.labels.long()), 1).tolist()
        if pytorch.size() > 1:
            everyone: list = [None] * pytorch.size()
            dist.all_gather_object(everyone, mine)
            mine = [sample for part in everyone for sample in part]
        assert len(mine) == batch.global_size
        found += mine
    return found


def statistics(sampler: data.Sampler, data_set: data.DataSet) -> dict:
    """How evenly the negatives of many epochs fall, and whether any is one that the user trains on."""
    met = torch.zeros(USERS, ITEMS, dtype=torch.bool)
    met[data_set.train_users.long(), data_set.train_items.long()] = True
    counts = torch.zeros(USERS, ITEMS, dtype=torch.float64)
    for epoch in range(EPOCHS):
        sampler.draw_epoch(data.epoch_seed(7, epoch))
        for step in range(sampler.steps_per_epoch):
            batch = sampler.batch(step)
            drawn = batch.labels == 0
            flat = batch.users[drawn] * ITEMS + batch.items[drawn]
            counts.view(-1).index_add_(0, flat, torch.ones(len(flat), dtype=torch.float64))
    expected = counts.sum(1, keepdim=True) / (~met).sum(1, keepdim=True)
    deviations = ((counts - expected) ** 2 / expected)[~met]
    return {
        "known items drawn": int(counts[met].sum()),
        # Each term of a chi-squared sum is about 1 - 1/k on the mean.
        "chi-squared per item": float(deviations.mean()),
    }


def places_under_ties() -> dict:
    """Places of a held-out item by hand-made scores; columns: negatives, then itself."""
    rows = {
        "none ahead": ([5, 6, 7, 8], 9, [0.1, 0.2, 0.3, 0.4, 0.5]),
        "two ahead": ([5, 6, 7, 8], 9, [0.9, 0.2, 0.8, 0.4, 0.5]),
        "a tie": ([5, 6, 7, 8], 9, [0.5, 0.2, 0.3, 0.4, 0.5]),
        "one listed twice ahead": ([5, 5, 7, 8], 9, [0.9, 0.9, 0.3, 0.4, 0.5]),
        "itself among them": ([5, 9, 7, 8], 9, [0.1, 0.5, 0.3, 0.4, 0.5]),
        "itself among them, ties before and after": ([5, 9, 7, 8], 9, [0.5, 0.5, 0.5, 0.4, 0.5]),
        "not a number": ([5, 6, 7, 8], 9, [0.1, 0.2, 0.3, 0.4, float("nan")]),
        "a candidate is not a number": ([5, 6, 7, 8], 9, [float("nan"), 0.2, 0.3, 0.4, 0.5]),
    }
    found = {}
    for name, (negatives, held_out, scores) in rows.items():
        test_items = torch.tensor([held_out], dtype=torch.int32)
        one = small_data()._replace(users=1, test_items=test_items, negatives=np.array([negatives]))
        candidates = evaluation.Candidates(one, Ranks(0, 1, 0, 1, torch.device("cpu")))
        found[name] = int(candidates.ranks(torch.tensor([scores]), slice(0, 1)))
    near = torch.tensor([[5.0, 0.0, 0.0, 0.0, 5.004]])
    rounded = {
        precision: int(candidates.ranks(evaluation.compared(near, Config(precision=precision)), slice(0, 1)))
        for precision in ("fp32", "fp16")
    }
    gains = evaluation.gains(torch.tensor([0, 9, 10]))
    return {"places": found, "gains of places 0, 9, 10": gains.tolist(), "place of 5.004 behind 5": rounded}


def before_the_clock(data_set: data.DataSet) -> dict:
    """What works on generated pairs before the data set is read, and on the same tensors with its pairs afterwards."""
    users, items = data_set.users, data_set.items
    content = {"facts": data_set.facts, "splits": {"train": {"count": len(data_set.train_users)}}}
    ranks = Ranks(0, 1, 0, 1, torch.device("cpu"))
    generated = data.synthetic(content, ranks.context)
    sampler = data.Sampler(generated, BATCH, NEGATIVES, ranks)
    drawn = samples_of_epoch(sampler, 5)
    held = [value for value in vars(sampler).values() if torch.is_tensor(value)][:3]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("train_users", "train_items", "test_items"):
            np.save(f"{folder}/{name}.npy", getattr(data_set, name).numpy())
        np.save(f"{folder}/test_negatives.npy", np.asarray(data_set.negatives))
        loaded = data.load(Path(folder), generated)
    sampler.index()
    return {
        "generated samples that cannot be": sum(not (0 <= u < users and 0 <= i < items) for u, i, _ in drawn),
        "the same tensors": all(a is b for a, b in zip(loaded[2:5], generated[2:5]))
        and all(any(each is now for now in vars(sampler).values()) for each in held),
        "the samples of the data set": samples_of_epoch(sampler, 1)
        == samples_of_epoch(data.Sampler(data_set, BATCH, NEGATIVES, ranks), 1),
    }


def main() -> None:
    ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32"))
    data_set = small_data()
    sampler = data.Sampler(data_set, BATCH // ranks.size, NEGATIVES, ranks)
    found = {
        "first epoch": samples_of_epoch(sampler, 1),
        "again": samples_of_epoch(sampler, 1) == samples_of_epoch(sampler, 1),
        "another seed": samples_of_epoch(sampler, 2) != samples_of_epoch(sampler, 1),
        "pairs": torch.stack((data_set.train_users, data_set.train_items), 1).tolist(),
    }
    if ranks.size == 1:
        found.update(statistics(sampler, data_set))
        found.update(places_under_ties())
        found.update(before_the_clock(data_set))
        users, items = data_set.train_users.numpy(), data_set.train_items.numpy()
        drawn = draw_negatives(users, items, data_set.test_items.numpy(), ITEMS, 500, seed=1)
        known = set(map(tuple, found["pairs"])) | {(user, HELD_OUT) for user in range(USERS)}
        pairs = [(user, int(item)) for user in range(USERS) for item in drawn[user]]
        found["evaluation draws a known item"] = any(pair in known for pair in pairs)
        free = USERS * ITEMS - len(known)
        found["evaluation draws every other item"] = len(set(pairs)) == free
    if ranks.rank == 0:
        print(json.dumps(found))
    pytorch.finish()


if __name__ == "__main__":
    main()
