"""NCF's sampler on three ranks against the same epoch on a single rank, and the number of samples per rank."""

import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.ncf.pytorch import data, operators
from tests.in_framework.ncf_data import small_data

LONG = True
RANKS = (3,)


def columns(batch):
    return torch.stack((batch.users, batch.items, batch.labels.long()), 1)


def test_ranks_draw_the_samples_of_one_rank(ranks):
    parts = (ranks, Ranks(0, 1, 0, 1, torch.device("cpu")))
    shared, single = (data.Sampler(small_data(), 60 // part.size, 4, part) for part in parts)
    counts = []

    def draw_and_count(positions, *arguments):
        counts.append(len(positions))
        return operators.samples(positions, *arguments)

    shared.draws = draw_and_count
    shared.draw_epoch(1)
    single.draw_epoch(1)
    assert shared.steps_per_epoch == single.steps_per_epoch
    for step in range(single.steps_per_epoch):
        batch, expected = shared.batch(step), columns(single.batch(step))
        gathered = [None] * ranks.size
        dist.all_gather_object(gathered, columns(batch))
        assert torch.equal(torch.cat(gathered), expected) and batch.global_size == len(expected)
    assert counts == [sum(len(shared.batch(step).users) for step in range(shared.steps_per_epoch))]
    assert pytorch.total([float(counts[0])]) == [shared.samples] == [single.samples]
