"""DLRM on two ranks: its step with values of the submitted network and in a graph, sparse updates, the exact AUC."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from benchmarks.common.frameworks import pytorch
from benchmarks.dlrm.blocks import NUMBERS, TABLES
from benchmarks.dlrm.pytorch import auc, data, model, train
from benchmarks.dlrm.pytorch.config import Config
from tests.in_framework.splits import share_batch
from tests.in_framework.torch_checks import GraphStub, projection, record_collectives, set_fixed_weights

RANKS = (2,)
SIZES = tuple(3 + 7 * (table % 5) for table in range(TABLES))
GLOBAL_BATCH = 96
CONFIG = Config(
    device="cpu", precision="fp32", cuda_graph=False, bottom_mlp=(16, 8), top_mlp=(24, 12, 1), batch_size=GLOBAL_BATCH,
    weight_decay=0.01, table_learning_rate_factor=2.0, seed=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    # With a second process group, which a CUDA graph requires
    yield pytorch.start(SimpleNamespace(device="cpu", precision="fp32", cuda_graph=True))
    pytorch.finish()


def make_training(ranks, **settings):
    """Return a training with fixed weights, and this rank's part of the global batch."""
    config = share_batch(CONFIG, ranks, **settings)
    training, tables = train.build(config, SIZES, ranks, {}), [torch.empty(size, 8) for size in SIZES]
    for weights in (training.network.parameters(), tables):
        set_fixed_weights(weights, 0.4)
    training.tables.weight.copy_(torch.cat([tables[table] for table in training.tables.mine]))
    numbers = torch.arange(GLOBAL_BATCH * NUMBERS, dtype=torch.float64).square().sin().abs().view(-1, NUMBERS).float()
    rows = torch.arange(GLOBAL_BATCH)
    indices = torch.stack([rows**2 * (table + 1) % SIZES[table] for table in training.tables.mine])
    own = slice(ranks.rank * config.batch_size, (ranks.rank + 1) * config.batch_size)
    return training, data.Batch(numbers[own], (rows**2 % 7 < 2).float()[own], indices)


def gather(value, ranks):
    values = [None] * ranks.size
    dist.all_gather_object(values, value)
    return values


@pytest.mark.parametrize("settings", [{}, {"fused_relu": True}])
def test_step_matches_the_submitted_network(ranks, settings):
    """Logits, loss and updated weights of DlrmBase of NVIDIA's v0.7 submission (deprecated_model.py) in float64."""
    training, batch = make_training(ranks, **settings)
    logits = projection(*gather(training.scores(batch), ranks))
    loss = pytorch.total(train.train_step(training, batch, torch.tensor(0.5)).reshape(1))[0] / ranks.size
    tables = training.tables
    mine = dict(zip(tables.mine, tables.weight.split([SIZES[table] for table in tables.mine]), strict=True))
    by_number = dict(item for part in gather(mine, ranks) for item in part.items())
    updated = projection(training.weights), projection(*(by_number[table] for table in range(TABLES)))
    assert [logits, loss, *updated] == pytest.approx([-8.29952247, 1.52849768, -53.1608897, -4.89424701], rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"fused_relu": True}])
def test_bf16_scores_are_close_to_fp32(ranks, settings):
    (training, batch), (reference, _) = make_training(ranks, precision="bf16", **settings), make_training(ranks)
    scores, expected = training.scores(batch), reference.scores(batch)
    assert 0 < float((scores - expected).abs().max() / expected.abs().max()) < 0.02
    assert torch.isfinite(train.train_step(training, batch, torch.tensor(0.5)))


def test_sparse_update_equals_dense_autograd(ranks):
    """Bit for bit, with numbers whose sums are exact in fp32."""
    tables, generator = model.Tables(SIZES, CONFIG, ranks), torch.Generator().manual_seed(3)
    tables.weight.copy_(torch.randint(-64, 64, tables.weight.shape, generator=generator) / 8)
    rows = tables.rows(torch.stack([torch.randint(0, SIZES[t], (512,), generator=generator) for t in tables.mine]))
    gradient = torch.randint(-64, 64, (len(rows), tables.width), generator=generator) / 16
    dense = tables.weight.clone().requires_grad_()
    (functional.embedding(rows, dense) * gradient).sum().backward()
    tables.update(rows, gradient.reshape(-1), torch.tensor(0.25))
    assert torch.equal(tables.weight, dense.detach() - 0.25 * dense.grad)


NORMAL = torch.randn(2000, generator=torch.Generator().manual_seed(0))
LABELS = (torch.rand(2000, generator=torch.Generator().manual_seed(1)) < torch.sigmoid(NORMAL)).float()


# Recorded from the definition, in fractions: the share of (positive, negative) pairs in order, a tie is half a pair
@pytest.mark.parametrize(
    ("scores", "labels", "area"),
    [
        (NORMAL, LABELS, 0.7486822409707992),
        ((NORMAL * 4).round() / 4, LABELS, 0.7469027159643955),
        (torch.zeros(2000), LABELS, 0.5),
        (torch.where(NORMAL > 0, torch.tensor(0.0), torch.tensor(-0.0)), LABELS, 0.5),
        (torch.where(NORMAL > 1, torch.tensor(math.inf), NORMAL * 1e-42), LABELS, 0.7467376208696209),
        (NORMAL * 1e-6 + 1, LABELS, 0.7487022524974385),
        (NORMAL[:3], torch.tensor([0.0, 1.0, 0.0]), 0.0),
        (LABELS * 3 - 1, LABELS, 1.0),
    ],
    ids=["no ties", "many ties", "all tied", "both zeros", "extremes", "one bin", "few", "perfect"],
)
def test_auc_is_exact(ranks, scores, labels, area):
    """Also with shares of different sizes."""
    cut = [len(scores) * rank // ranks.size for rank in range(ranks.size)] + [len(scores)]
    own = slice(cut[ranks.rank], cut[ranks.rank + 1])
    assert auc.area_under_curve(scores[own], labels[own]) == area


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [([0.0, math.nan], [0.0, 1.0], "not a number"), ([0.0, 1.0], [1.0, 1.0], "0 negative rows")],
)
def test_auc_rejects_invalid_scores_and_labels(ranks, scores, labels, message):
    with pytest.raises(ValueError, match=message):
        auc.area_under_curve(torch.tensor(scores), torch.tensor(labels))


# -- the step in a CUDA graph --------------------------------------------------------------------------------

SMALL = dataclasses.replace(CONFIG, bottom_mlp=(8, 4), top_mlp=(8, 1), batch_size=8, eval_batch_size=8)


def test_graph_shares_no_process_group_with_other_collectives(ranks, monkeypatch):
    # In a stand-in for a CUDA graph, with evaluations in between
    calls, depth, step = {True: set(), False: set()}, [0], train.train_on_batch

    def record(name, *arguments, group=None, **options):
        calls[depth[0] > 0].add((name, {None: "default", pytorch.eager(): "eager"}.get(group, "other")))

    def train_on_batch(*arguments):
        depth[0] += 1
        loss = step(*arguments)
        depth[0] -= 1
        return loss

    monkeypatch.setattr(train, "Captured", GraphStub)
    monkeypatch.setattr(train, "train_on_batch", train_on_batch)
    training = train.build(SMALL, SIZES, ranks, {})
    training.config = dataclasses.replace(SMALL, device="gpu", cuda_graph=True, warm_up_steps=0)
    train.warm_up(training, SIZES)
    record_collectives(monkeypatch, ("all_reduce", "all_to_all_single", "all_gather", "broadcast", "barrier"), record)
    losses = pytorch.LaggedSums(ranks, "step")
    for _ in range(2):
        batch = data.synthetic_batch(SMALL, [SIZES[table] for table in training.tables.mine], ranks)
        batch.labels.copy_(torch.arange(SMALL.batch_size) % 2)
        losses.send(train.train_step(training, batch, torch.tensor(0.1)), False)
        auc.area_under_curve(training.scores(batch), batch.labels)
    losses.drain()
    assert GraphStub.instances[0].replays == 2
    assert calls[True] == {("all_to_all_single", "default"), ("all_reduce", "default")}
    assert calls[False] >= {(name, "eager") for name in ("all_to_all_single", "all_reduce", "all_gather")}
    assert {kind for _, kind in calls[False]} == {"eager"}
