"""DLRM's step on any number of ranks against a plain float64 model of the global batch; prints the errors.

The reference has one dense table a category, no fused interaction and no exchange; autograd does the rest.
"""

import dataclasses
import json

import torch
import torch.distributed as dist
from torch.nn import functional

from benchmarks.common.frameworks import pytorch
from benchmarks.dlrm.blocks import NUMBERS, TABLES
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import Batch
from benchmarks.dlrm.pytorch.model import Tables
from benchmarks.dlrm.pytorch.train import build, train_step

SIZES = tuple(3 + 7 * (table % 5) for table in range(TABLES))
CONFIG = Config(
    device="cpu",
    precision="fp32",
    cuda_graph=False,
    bottom_mlp=(16, 8),
    top_mlp=(24, 12, 1),
    batch_size=48,
    weight_decay=0.01,
    table_learning_rate_factor=2.0,
    seed=5,
)
GLOBAL = 96
RATE = 0.5


def whole_tables(tables, ranks):
    """The tables of all ranks, each (rows, width) float64, in their own order."""
    every = [None] * ranks.size
    if ranks.size > 1:
        dist.all_gather_object(every, tables.weight)
    else:
        every = [tables.weight]
    found = {}
    for joint, placed in zip(every, tables.placement):
        start = 0
        for table in placed:
            found[table] = joint[start : start + SIZES[table]].double().clone()
            start += SIZES[table]
    return [found[table] for table in range(TABLES)]


def linear_layers(sequence):
    return [layer for layer in sequence if isinstance(layer, torch.nn.Linear)]


def plain_logits(numbers, indices, tables, bottom, top):
    """The paper's network, written out: (rows,) logits in float64."""
    hidden = numbers.double()
    for weight, bias in bottom:
        hidden = torch.relu(hidden @ weight.t() + bias)
    vectors = [hidden, *(table[one] for table, one in zip(tables, indices))]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(1, len(vectors)) for j in range(i)]
    joined = torch.cat([hidden, torch.stack(pairs, 1)], 1)
    joined = functional.pad(joined, (0, top[0][0].shape[1] - joined.shape[1]))
    for number, (weight, bias) in enumerate(top):
        joined = joined @ weight.t() + bias
        if number < len(top) - 1:
            joined = torch.relu(joined)
    return joined.squeeze(1)


def copies(sequence):
    return [
        (layer.weight.detach().double().requires_grad_(), layer.bias.detach().double().requires_grad_())
        for layer in linear_layers(sequence)
    ]


def error(ours, theirs):
    return float((ours.double() - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))


def one_step(ranks, config):
    """Errors of scores, loss, gradients and weights after one step."""
    model = build(config, SIZES, ranks, {})
    generator = torch.Generator().manual_seed(1)
    numbers = torch.rand(GLOBAL, NUMBERS, generator=generator)
    labels = (torch.rand(GLOBAL, generator=generator) < 0.3).float()
    indices = torch.stack([torch.randint(0, size, (GLOBAL,), generator=generator) for size in SIZES])
    mine = slice(ranks.rank * config.batch_size, (ranks.rank + 1) * config.batch_size)
    batch = Batch(numbers[mine], labels[mine], indices[list(model.tables.mine)])
    tables = [table.requires_grad_() for table in whole_tables(model.tables, ranks)]
    bottom, top = copies(model.network.bottom), copies([*model.network.top, *model.network.last])
    logits = plain_logits(numbers, indices, tables, bottom, top)
    loss = functional.binary_cross_entropy_with_logits(logits, labels.double())
    loss.backward()
    found = {"scores": error(model.scores(batch), logits[mine].detach())}
    ours = train_step(model, batch, torch.tensor(RATE))
    mean = pytorch.total(ours.reshape(1))[0] / ranks.size
    found["loss"] = abs(mean - loss.item()) / loss.item()
    parameters = [p for layer in (*bottom, *top) for p in layer]
    gradients = torch.cat([p.grad.reshape(-1) for p in parameters])
    found["gradients"] = error(model.gradients.flat / ranks.size, gradients)
    kept = 1 - RATE * config.weight_decay
    after = torch.cat([(p.detach() * kept - RATE * p.grad).reshape(-1) for p in parameters])
    found["weights"] = error(model.weights, after)
    rate = RATE * config.table_learning_rate_factor
    updated = whole_tables(model.tables, ranks)
    found["tables"] = max(error(now, (before - rate * before.grad).detach()) for now, before in zip(updated, tables))
    return found


def update_is_exact(ranks, how):
    """The sparse update next to dense autograd, in numbers of which every sum is exact in fp32."""
    config = dataclasses.replace(CONFIG, embedding_update=how)
    tables = Tables(SIZES, config, ranks)
    generator = torch.Generator().manual_seed(3)
    tables.weight.copy_(torch.randint(-64, 64, tables.weight.shape, generator=generator) / 8)
    indices = torch.stack([torch.randint(0, SIZES[t], (512,), generator=generator) for t in tables.mine])
    rows = tables.rows(indices)
    gradient = torch.randint(-64, 64, (len(rows), tables.width), generator=generator) / 16
    dense = tables.weight.clone().requires_grad_()
    (functional.embedding(rows, dense) * gradient).sum().backward()
    expected = dense.detach() - 0.25 * dense.grad
    tables.update(rows, gradient.reshape(-1), torch.tensor(0.25))
    return bool(torch.equal(tables.weight, expected))


def main():
    ranks = pytorch.start(CONFIG)
    config = dataclasses.replace(CONFIG, batch_size=GLOBAL // ranks.size)
    found = {"one step": one_step(ranks, config)}
    found["bf16 scores"] = one_step(ranks, dataclasses.replace(config, precision="bf16"))["scores"]
    found["exact"] = [update_is_exact(ranks, how) for how in ("scatter", "sorted")]
    found["tables of each rank"] = [len(t) for t in Tables(SIZES, config, ranks).placement]
    if ranks.rank == 0:
        print(json.dumps(found))
    pytorch.finish()


main()
