"""NCF's sampler: the same samples on any number of ranks, evenly drawn, and nothing read before the clock starts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.ncf.interactions import draw_negatives
from benchmarks.ncf.pytorch import data, operators
from tests.in_framework.ncf_data import HELD_OUT, ITEMS, USERS, small_data

RANKS = (1, 3)
NEGATIVES, BATCH, EPOCHS = 4, 60, 200
CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def ranks():
    found = pytorch.start(SimpleNamespace(device="cpu", precision="fp32"))
    yield found
    pytorch.finish()


def samples_of_epoch(sampler, seed):
    # [user, item, label] of every sample of all ranks, in the order of the steps.
    sampler.draw_epoch(seed)
    found = []
    for step in range(sampler.steps_per_epoch):
        batch = sampler.batch(step)
        mine = torch.stack((batch.users, batch.items, batch.labels.long()), 1).tolist()
        if pytorch.size() > 1:
            everyone = [None] * pytorch.size()
            dist.all_gather_object(everyone, mine)
            mine = [sample for part in everyone for sample in part]
        assert len(mine) == batch.global_size
        found += mine
    return found


def test_samples_of_an_epoch_are_the_same_on_any_number_of_ranks(ranks):
    data_set = small_data()
    sampler = data.Sampler(data_set, BATCH // ranks.size, NEGATIVES, ranks)
    samples = samples_of_epoch(sampler, 1)
    assert samples == samples_of_epoch(sampler, 1) != samples_of_epoch(sampler, 2)
    # Rank 0 alone draws what all ranks draw together.
    everyone = [samples]
    if ranks.size > 1:
        dist.broadcast_object_list(everyone)
    alone = data.Sampler(data_set, BATCH, NEGATIVES, CPU)
    alone.draw_epoch(1)
    batches = [alone.batch(step) for step in range(alone.steps_per_epoch)]
    expected = [torch.stack((batch.users, batch.items, batch.labels.long()), 1).tolist() for batch in batches]
    assert everyone[0] == [sample for batch in expected for sample in batch]
    positives = sorted([user, item] for user, item, label in samples if label)
    assert positives == torch.stack((data_set.train_users, data_set.train_items), 1).tolist(), "each once an epoch"
    assert len(samples) == (1 + NEGATIVES) * len(positives)
    labels = [label for *_, label in samples]
    assert labels != sorted(labels, reverse=True)


def test_a_rank_draws_its_own_part_alone(ranks):
    data_set, asked = small_data(), []
    sampler = data.Sampler(data_set, BATCH // ranks.size, NEGATIVES, ranks)

    def counted(places, *others):
        asked.append(len(places))
        return operators.samples(places, *others)

    sampler.draws = counted
    sampler.draw_epoch(1)
    (mine,) = asked
    assert mine == sum(len(sampler.batch(step).users) for step in range(sampler.steps_per_epoch))
    assert pytorch.total([float(mine)]) == [sampler.samples]


@pytest.mark.parametrize("count", [1, 2, 3, 17, 1000, 1024, 12345])
def test_every_order_has_each_sample_once(count, ranks):
    seen = set()
    for seed in range(3):
        keys = torch.randint(1 << 32, (operators.ROUNDS + 1,), generator=torch.Generator().manual_seed(seed))
        order = operators.shuffled(torch.arange(count), count, keys)
        assert sorted(order.tolist()) == list(range(count))
        # What is at a place depends on no other place.
        some = torch.arange(count // 3, count)
        assert torch.equal(operators.shuffled(some, count, keys), order[some])
        seen.add(tuple(order.tolist()))
    assert len(seen) == 3 or count < 10


def test_orders_are_as_even_as_random_ones(ranks):
    # A sample's place, and how far neighbours are apart: chi-squared over the degrees of freedom.
    count, orders = 1000, 600
    numbers = torch.Generator().manual_seed(4)
    drawn = [torch.randint(1 << 32, (operators.ROUNDS + 1,), generator=numbers) for _ in range(orders)]
    found = torch.stack([operators.shuffled(torch.arange(count), count, keys) for keys in drawn])
    for values in (found[:, 500], *((found[:, lag:] - found[:, :-lag]) % count - 1 for lag in (1, 2, 32))):
        cells = 50 if values.dim() == 1 else count - 1
        counts = torch.bincount(values.flatten() * cells // (count if values.dim() == 1 else cells), minlength=cells)
        even = counts.double().mean()
        # Its standard deviation is the root of 2 / cells.
        assert float(((counts - even) ** 2 / even).mean()) == pytest.approx(1, abs=5 * (2 / cells) ** 0.5)


def test_negatives_fall_evenly_on_what_a_user_does_not_train_on(ranks):
    data_set = small_data()
    sampler = data.Sampler(data_set, BATCH, NEGATIVES, CPU)
    met = torch.zeros(USERS, ITEMS, dtype=torch.bool)
    met[data_set.train_users.long(), data_set.train_items.long()] = True
    counts = torch.zeros(USERS, ITEMS, dtype=torch.float64)
    for epoch in range(EPOCHS):
        sampler.draw_epoch(data.epoch_seed(7, epoch))
        for step in range(sampler.steps_per_epoch):
            batch = sampler.batch(step)
            flat = (batch.users * ITEMS + batch.items)[batch.labels == 0]
            counts.view(-1).index_add_(0, flat, torch.ones(len(flat), dtype=torch.float64))
    assert not counts[met].any()
    expected = counts.sum(1, keepdim=True) / (~met).sum(1, keepdim=True)
    # Each term of a chi-squared sum is about 1 - 1/k on the mean.
    assert float(((counts - expected) ** 2 / expected)[~met].mean()) == pytest.approx(1.0, abs=0.15)


def test_evaluation_draws_every_item_that_is_not_met(ranks):
    data_set = small_data()
    users, items = data_set.train_users.numpy(), data_set.train_items.numpy()
    drawn = draw_negatives(users, items, data_set.test_items.numpy(), ITEMS, 500, seed=1)
    known = set(zip(users.tolist(), items.tolist())) | {(user, HELD_OUT) for user in range(USERS)}
    pairs = {(user, int(item)) for user in range(USERS) for item in drawn[user]}
    assert pairs == {(user, item) for user in range(USERS) for item in range(ITEMS)} - known


def test_no_pair_is_read_before_the_clock_starts(ranks, tmp_path):
    # What comes before works on generated pairs, and afterwards on the same tensors with the pairs of the data set.
    data_set = small_data()
    content = {"facts": data_set.facts, "splits": {"train": {"count": len(data_set.train_users)}}}
    generated = data.synthetic(content, CPU.context)
    sampler = data.Sampler(generated, BATCH, NEGATIVES, CPU)
    sampler.draw_epoch(5)
    assert int(generated.train_users.max()) < USERS and int(generated.train_items.max()) < ITEMS
    held = [value for value in vars(sampler).values() if torch.is_tensor(value)][:3]
    for name in ("train_users", "train_items", "test_items"):
        np.save(f"{tmp_path}/{name}.npy", getattr(data_set, name).numpy())
    np.save(f"{tmp_path}/test_negatives.npy", np.asarray(data_set.negatives))
    loaded = data.load(tmp_path, generated)
    sampler.index()
    assert all(a is b for a, b in zip(loaded[2:5], generated[2:5]))
    assert all(any(each is now for now in vars(sampler).values()) for each in held)
    other = data.Sampler(data_set, BATCH, NEGATIVES, CPU)
    for each in (sampler, other):
        each.draw_epoch(1)
    for step in range(other.steps_per_epoch):
        assert all(map(torch.equal, sampler.batch(step)[:3], other.batch(step)[:3]))
