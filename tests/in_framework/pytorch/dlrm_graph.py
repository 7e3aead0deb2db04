"""DLRM's step in a stand-in for its CUDA graph, with evaluations in between, on two ranks.

Collectives in the graph and outside of it use different process groups, and the weights equal those without a graph.
"""

import dataclasses
from types import SimpleNamespace

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.dlrm.blocks import NUMBERS, TABLES
from benchmarks.dlrm.pytorch import train
from benchmarks.dlrm.pytorch.auc import area_under_curve
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import synthetic_batch
from tests.in_framework.torch_checks import GraphStub, record_collectives

LONG = True
RANKS = (2,)
SIZES = tuple(3 + 7 * (table % 5) for table in range(TABLES))
CONFIG = Config(
    device="cpu", precision="fp32", cuda_graph=False, bottom_mlp=(8, 4), top_mlp=(8, 1), batch_size=8, eval_batch_size=8
)
STEPS, EVALUATION_INTERVAL = 20, 5


def train_with_evaluations(ranks, graph):
    """Return weights, tables and AUCs. A batch has the memory layout of a real one, which decides the order of sums."""
    training = train.build(CONFIG, SIZES, ranks, {})
    training.config = dataclasses.replace(CONFIG, device="gpu", cuda_graph=graph, warm_up_steps=0)
    train.warm_up(training, SIZES)
    rank_random, shared_random = torch.Generator().manual_seed(ranks.rank), torch.Generator().manual_seed(1)
    losses, areas = pytorch.LaggedSums(ranks, "step"), []
    labels, tables = torch.tensor([0.0, 1.0]).repeat(CONFIG.batch_size // 2), list(training.tables.mine)
    for number in range(STEPS):
        indices = [torch.randint(size, (CONFIG.batch_size * ranks.size,), generator=shared_random) for size in SIZES]
        batch = synthetic_batch(CONFIG, [SIZES[table] for table in tables], ranks)
        batch.numbers.copy_(torch.rand(CONFIG.batch_size, NUMBERS, generator=rank_random))
        batch.labels.copy_(labels)
        batch.indices.copy_(torch.stack(indices)[tables])
        losses.send(train.train_step(training, batch, torch.tensor(0.1)), False)
        if number % EVALUATION_INTERVAL == 0:
            areas.append(area_under_curve(training.scores(batch), labels))
            pytorch.total([1.0])
    losses.drain()
    return training.weights, training.tables.weight, areas


def test_graph_shares_no_process_group_with_other_collectives(monkeypatch):
    ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32", cuda_graph=True))
    calls, in_graph = {True: set(), False: set()}, [False]

    def record(name, *arguments, group=None, **options):
        kind = "default" if group is None else "eager" if group is pytorch.eager() else "other"
        calls[in_graph[-1]].add((name, kind))

    def train_on_batch(*arguments, plain=train.train_on_batch):
        in_graph.append(True)
        try:
            return plain(*arguments)
        finally:
            in_graph.pop()

    monkeypatch.setattr(train, "Captured", GraphStub)
    names = ("all_reduce", "all_to_all_single", "all_gather", "broadcast", "barrier")
    record_collectives(monkeypatch, names, record)
    with monkeypatch.context() as patch:
        patch.setattr(train, "train_on_batch", train_on_batch)
        weights, tables, areas = train_with_evaluations(ranks, graph=True)
    assert GraphStub.instances[0].replays == STEPS
    assert calls[True] == {("all_to_all_single", "default"), ("all_reduce", "default")}
    assert calls[False] >= {(name, "eager") for name in ("all_to_all_single", "all_reduce", "all_gather")}
    assert {kind for _, kind in calls[False]} == {"eager"}
    expected = train_with_evaluations(ranks, graph=False)
    assert torch.equal(weights, expected[0]) and torch.equal(tables, expected[1]) and areas == expected[2]
    pytorch.finish()
