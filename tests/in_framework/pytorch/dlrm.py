"""DLRM on any number of ranks: its step next to a plain float64 model of the global batch, and the exact AUC.

The reference has one dense table a category, no fused interaction and no exchange; autograd does the rest.
"""

import dataclasses
import math
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from benchmarks.common.frameworks import pytorch
from benchmarks.dlrm.blocks import NUMBERS, TABLES
from benchmarks.dlrm.pytorch.auc import area_under_curve
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import Batch
from benchmarks.dlrm.pytorch.model import Tables
from benchmarks.dlrm.pytorch.train import build, train_step

RANKS = (1, 3)
SIZES = tuple(3 + 7 * (table % 5) for table in range(TABLES))
CONFIG = Config(
    device="cpu", precision="fp32", cuda_graph=False, bottom_mlp=(16, 8), top_mlp=(24, 12, 1), batch_size=48,
    weight_decay=0.01, table_learning_rate_factor=2.0, seed=5,
)  # fmt: skip
GLOBAL, RATE = 96, 0.5


@pytest.fixture(scope="module")
def ranks():
    found = pytorch.start(CONFIG)
    yield found
    pytorch.finish()


def whole_tables(tables, ranks):
    # The tables of all ranks, each (rows, width) float64, in their own order.
    every = [tables.weight] * ranks.size
    if ranks.size > 1:
        dist.all_gather_object(every, tables.weight)
    found = {}
    for joint, placed in zip(every, tables.placement):
        found.update(zip(placed, joint.double().split([SIZES[table] for table in placed])))
    return [found[table].clone() for table in range(TABLES)]


def plain_logits(numbers, indices, tables, bottom, top):
    # The paper's network, written out: (rows,) logits in float64.
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
    linear = [layer for layer in sequence if isinstance(layer, torch.nn.Linear)]
    return [[each.detach().double().requires_grad_() for each in (layer.weight, layer.bias)] for layer in linear]


def error(ours, theirs):
    return float((ours.detach().double() - theirs.detach()).abs().max() / theirs.detach().abs().max())


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"precision": "fp32", "fused_relu": True, "early_sums": True},
        {"precision": "bf16", "fused_relu": True},
    ],
)
def test_step_is_that_of_a_plain_model(ranks, settings):
    precision = settings["precision"]
    config = dataclasses.replace(CONFIG, batch_size=GLOBAL // ranks.size, **settings)
    training = build(config, SIZES, ranks, {})
    network, tables = training.network, training.tables
    assert sorted(sum(tables.placement, ())) == list(range(TABLES))
    generator = torch.Generator().manual_seed(1)
    numbers = torch.rand(GLOBAL, NUMBERS, generator=generator)
    labels = (torch.rand(GLOBAL, generator=generator) < 0.3).float()
    indices = torch.stack([torch.randint(0, size, (GLOBAL,), generator=generator) for size in SIZES])
    mine = slice(ranks.rank * config.batch_size, (ranks.rank + 1) * config.batch_size)
    batch = Batch(numbers[mine], labels[mine], indices[list(tables.mine)])
    dense = [table.requires_grad_() for table in whole_tables(tables, ranks)]
    bottom, top = copies(network.bottom), copies([*network.top, *network.last])
    logits = plain_logits(numbers, indices, dense, bottom, top)
    loss = functional.binary_cross_entropy_with_logits(logits, labels.double())
    loss.backward()
    scores = training.scores(batch)
    assert error(scores, logits[mine]) < (2e-6 if precision == "fp32" else 0.02)
    mean = pytorch.total(train_step(training, batch, torch.tensor(RATE)).reshape(1))[0] / ranks.size
    if precision == "bf16":
        return
    assert mean == pytest.approx(loss.item(), rel=2e-6)
    parameters = [p for layer in (*bottom, *top) for p in layer]
    gradients = torch.cat([p.grad.reshape(-1) for p in parameters])
    assert error(training.gradients / ranks.size, gradients) < 2e-6
    whole = torch.cat([p.detach().reshape(-1) for p in parameters])
    assert error(training.weights, whole * (1 - RATE * config.weight_decay) - RATE * gradients) < 2e-6
    for now, before in zip(whole_tables(tables, ranks), dense):
        assert error(now, before - RATE * config.table_learning_rate_factor * before.grad) < 2e-6


@pytest.mark.parametrize("how", ["scatter", "sorted"])
def test_sparse_update_is_dense_autograd_bit_for_bit(ranks, how):
    # In numbers of which every sum is exact in fp32.
    tables = Tables(SIZES, dataclasses.replace(CONFIG, embedding_update=how), ranks)
    generator = torch.Generator().manual_seed(3)
    tables.weight.copy_(torch.randint(-64, 64, tables.weight.shape, generator=generator) / 8)
    indices = torch.stack([torch.randint(0, SIZES[t], (512,), generator=generator) for t in tables.mine])
    rows = tables.rows(indices)
    gradient = torch.randint(-64, 64, (len(rows), tables.width), generator=generator) / 16
    dense = tables.weight.clone().requires_grad_()
    (functional.embedding(rows, dense) * gradient).sum().backward()
    tables.update(rows, gradient.reshape(-1), torch.tensor(0.25))
    assert torch.equal(tables.weight, dense.detach() - 0.25 * dense.grad)


def by_definition(scores, labels):
    # Share of (positive, negative) pairs in the right order; a tie is half a pair.
    positive, negative = ([s for s, y in zip(scores.tolist(), labels.tolist()) if y == kind] for kind in (1, 0))
    twice = sum(2 * (p > n) + (p == n) for p in positive for n in negative)
    return float(Fraction(twice, 2 * len(positive) * len(negative)))


NORMAL = torch.randn(2000, generator=torch.Generator().manual_seed(0))
LABELS = (torch.rand(2000, generator=torch.Generator().manual_seed(1)) < torch.sigmoid(NORMAL)).float()


@pytest.mark.parametrize(
    ("scores", "labels"),
    [
        (NORMAL, LABELS),
        ((NORMAL * 4).round() / 4, LABELS),
        (torch.zeros(2000), LABELS),
        (torch.where(NORMAL > 0, torch.tensor(0.0), torch.tensor(-0.0)), LABELS),
        (torch.where(NORMAL > 1, torch.tensor(math.inf), NORMAL * 1e-42), LABELS),
        (NORMAL * 1e-6 + 1, LABELS),
        (NORMAL[:3], torch.tensor([0.0, 1.0, 0.0])),
        (LABELS * 3 - 1, LABELS),
    ],
    ids=["no ties", "many ties", "all tied", "both zeros", "extremes", "one bin", "few", "perfect"],
)
def test_auc_is_exact(ranks, scores, labels):
    # Uneven shares, and none at all for some rank.
    cut = [len(scores) * rank // ranks.size for rank in range(ranks.size)] + [len(scores)]
    mine = slice(cut[ranks.rank], cut[ranks.rank + 1])
    assert area_under_curve(scores[mine], labels[mine]) == by_definition(scores, labels)


def test_auc_refuses_what_has_none(ranks):
    with pytest.raises(ValueError, match="not a number"):
        area_under_curve(torch.tensor([0.0, math.nan]), torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match="0 negative rows"):
        area_under_curve(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]))
