"""DLRM's step behind a stand-in for its graph, 100 times with evaluations between, on any number of ranks.

Prints the collectives by the group that they have, inside and outside of the graph, and whether the weights are those
of the same steps without a graph.
"""

import dataclasses
import json
from types import SimpleNamespace

import torch
import torch.distributed as dist
from held import Held

from benchmarks.common.frameworks import pytorch
from benchmarks.dlrm.blocks import NUMBERS, TABLES
from benchmarks.dlrm.pytorch import train
from benchmarks.dlrm.pytorch.auc import area_under_curve
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import synthetic_batch

SIZES = tuple(3 + 7 * (table % 5) for table in range(TABLES))
CONFIG = Config(
    device="cpu", precision="fp32", cuda_graph=False, bottom_mlp=(8, 4), top_mlp=(8, 1), batch_size=8, eval_batch_size=8
)
REPLAYS, BETWEEN = 100, 10
COLLECTIVES = ("all_reduce", "all_to_all_single", "all_gather", "broadcast", "barrier")
used = {"inside": set(), "outside": set()}
place = "outside"


def watched(name):
    """Return a collective that notes its group."""
    call = getattr(dist, name)

    def noted(*arguments, group=None, **options):
        used[place].add((name, "default" if group is None else "eager" if group is pytorch.eager() else "other"))
        return call(*arguments, group=group, **options)

    return noted


def inside(call):
    """Return ``call`` with what it sends noted as the graph's."""

    def noted(*arguments):
        global place
        place = "inside"
        try:
            return call(*arguments)
        finally:
            place = "outside"

    return noted


def trained(ranks, graph):
    config = CONFIG
    model = train.build(config, SIZES, ranks, {})
    model.config = dataclasses.replace(config, device="gpu", cuda_graph=graph, warm_up_steps=0)
    train.whole_step = inside(whole_step) if graph else whole_step
    train.warm_up(model, SIZES)
    generator = torch.Generator().manual_seed(ranks.rank)
    everyone = torch.Generator().manual_seed(1)
    losses, areas = pytorch.LaggedSums(ranks, "step"), []
    for number in range(REPLAYS):
        rows = config.batch_size * ranks.size
        every = torch.stack([torch.randint(0, size, (rows,), generator=everyone) for size in SIZES])
        numbers = torch.rand(config.batch_size, NUMBERS, generator=generator)
        labels = torch.tensor([0.0, 1.0]).repeat(config.batch_size // 2)
        # Laid out as a real batch, whose rows and columns decide the order of sums on some CPUs.
        mine = list(model.tables.mine)
        batch = synthetic_batch(config, [SIZES[table] for table in mine], ranks)
        for place_of, values in zip(batch, (numbers, labels, every[mine])):
            place_of.copy_(values)
        losses.send(train.train_step(model, batch, torch.tensor(0.1)), False)
        if number % BETWEEN == 0:
            areas.append(area_under_curve(model.scores(batch), labels))
            pytorch.total([1.0])
    losses.drain()
    return model.weights, model.tables.weight, areas


ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32", cuda_graph=True))
train.Captured = Held
whole_step = train.whole_step
for name in COLLECTIVES:
    setattr(dist, name, watched(name))
with_graph = trained(ranks, graph=True)
noted = {where: sorted(each) for where, each in used.items()}
without = trained(ranks, graph=False)
same = all(torch.equal(one, other) for one, other in zip(with_graph[:2], without[:2])) and with_graph[2] == without[2]
if ranks.rank == 0:
    replays, evaluations = Held.made[0].replays, len(without[2])
    print(json.dumps({"collectives": noted, "replays": replays, "evaluations": evaluations, "same": same}))
pytorch.finish()
