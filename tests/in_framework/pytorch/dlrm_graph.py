"""DLRM's step behind a stand-in for its graph, 100 times with evaluations between, on two ranks.

The collectives inside of the graph and outside of it have groups of their own, and the weights are those of the same
steps without a graph.
"""

import dataclasses
from types import SimpleNamespace

import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch
from benchmarks.dlrm.blocks import NUMBERS, TABLES
from benchmarks.dlrm.pytorch import train
from benchmarks.dlrm.pytorch.auc import area_under_curve
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import synthetic_batch
from tests.in_framework.held import Held

RANKS = (2,)
SIZES = tuple(3 + 7 * (table % 5) for table in range(TABLES))
CONFIG = Config(
    device="cpu", precision="fp32", cuda_graph=False, bottom_mlp=(8, 4), top_mlp=(8, 1), batch_size=8, eval_batch_size=8
)
REPLAYS, BETWEEN = 100, 10
COLLECTIVES = ("all_reduce", "all_to_all_single", "all_gather", "broadcast", "barrier")
sent = {"inside": set(), "outside": set()}
place = ["outside"]


def noting_group(name):
    # Return a collective that notes its group.
    call = getattr(dist, name)

    def noted(*arguments, group=None, **options):
        kind = "default" if group is None else "eager" if group is pytorch.eager() else "other"
        sent[place[-1]].add((name, kind))
        return call(*arguments, group=group, **options)

    return noted


def inside(call):
    # Return ``call`` with what it sends noted as the graph's.
    def noted(*arguments):
        place.append("inside")
        try:
            return call(*arguments)
        finally:
            place.pop()

    return noted


def trained(ranks, graph):
    # Weights, tables and areas of a training; a batch is laid out as a real one, which decides the order of sums.
    training = train.build(CONFIG, SIZES, ranks, {})
    training.config = dataclasses.replace(CONFIG, device="gpu", cuda_graph=graph, warm_up_steps=0)
    train.warm_up(training, SIZES)
    own, everyone = torch.Generator().manual_seed(ranks.rank), torch.Generator().manual_seed(1)
    losses, areas = pytorch.LaggedSums(ranks, "step"), []
    labels = torch.tensor([0.0, 1.0]).repeat(CONFIG.batch_size // 2)
    for number in range(REPLAYS):
        every = [torch.randint(0, size, (CONFIG.batch_size * ranks.size,), generator=everyone) for size in SIZES]
        mine = list(training.tables.mine)
        batch = synthetic_batch(CONFIG, [SIZES[table] for table in mine], ranks)
        batch.numbers.copy_(torch.rand(CONFIG.batch_size, NUMBERS, generator=own))
        batch.labels.copy_(labels)
        batch.indices.copy_(torch.stack(every)[mine])
        losses.send(train.train_step(training, batch, torch.tensor(0.1)), False)
        if number % BETWEEN == 0:
            areas.append(area_under_curve(training.scores(batch), labels))
            pytorch.total([1.0])
    losses.drain()
    return training.weights, training.tables.weight, areas


def test_a_graph_shares_no_group_with_what_is_sent_next_to_it(monkeypatch):
    ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32", cuda_graph=True))
    monkeypatch.setattr(train, "Captured", Held)
    for name in COLLECTIVES:
        monkeypatch.setattr(dist, name, noting_group(name))
    with monkeypatch.context() as graphs:
        graphs.setattr(train, "whole_step", inside(train.whole_step))
        with_graph = trained(ranks, graph=True)
    assert Held.made[0].replays == REPLAYS
    assert sent["inside"] == {("all_to_all_single", "default"), ("all_reduce", "default")}
    assert sent["outside"] >= {(name, "eager") for name in ("all_to_all_single", "all_reduce", "all_gather")}
    assert {kind for _, kind in sent["outside"]} == {"eager"}
    without = trained(ranks, graph=False)
    assert all(map(torch.equal, with_graph[:2], without[:2])) and with_graph[2] == without[2]
    pytorch.finish()
