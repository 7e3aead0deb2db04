"""BERT's step on any number of ranks and micro-batches next to a plain float64 one of the global batch."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional

from benchmarks.bert import noise
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import evaluation_input, part_of, samples_of_step, training_input
from benchmarks.bert.pytorch.train import Training, train_step, warm_up
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.language import ARRAYS, arrays

RANKS = (1, 2)
ENTRIES, LONGEST, STEPS, SAMPLES, RATE = 61, 20, 4, 37, 0.02
CONFIG = Config(
    device="cpu", precision="fp32", layers=2, width=64, heads=4, inner_width=48, positions=LONGEST, dropout=0.0,
    attention_dropout=0.0, masked_mean="global", gradient_clip=0.0, optimizer_kernel="fused", batch_size=16, seed=5,
    # So large that no gradient near 0 makes a step of the full rate in a direction of rounding.
    epsilon=1e-2,
)  # fmt: skip


@pytest.fixture(scope="module")
def samples():
    found = noise.sample_arrays(SAMPLES, LONGEST, 3, ENTRIES)
    return arrays.Samples(*(found[name].astype(dtype) for name, dtype in ARRAYS.items()))


@pytest.fixture(scope="module")
def config(ranks):
    # As many samples of all ranks together, however many there are.
    return dataclasses.replace(CONFIG, batch_size=CONFIG.batch_size // ranks.size)


@pytest.fixture(scope="module")
def expected(config, ranks, samples):
    # Losses of the plain steps, and the weights: all samples of the global batch in one row, LAMB by its equations.
    network = Training(config, ENTRIES, Ranks(0, 1, 0, 1, torch.device("cpu"))).network.double()
    parameters = dict(network.named_parameters())
    moments = {name: [torch.zeros_like(each), torch.zeros_like(each)] for name, each in parameters.items()}
    losses = []
    for step in range(STEPS):
        batch = part_of(samples, samples_of_step(config, SAMPLES, ranks.size, step))
        words, follows = network(batch.rows, batch.masked)
        loss = functional.cross_entropy(words, batch.labels) + functional.cross_entropy(follows, batch.next)
        network.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for name, parameter in parameters.items():
                lamb(parameter, name, moments[name], config, step + 1)
    return losses, [parameter.detach() for parameter in parameters.values()]


def lamb(weights, name, moments, config, done):
    first, second = moments
    first += (1 - config.beta1) * (weights.grad - first)
    second += (1 - config.beta2) * (weights.grad.square() - second)
    update = first / (1 - config.beta1**done) / ((second / (1 - config.beta2**done)).sqrt() + config.epsilon)
    scaled = not (name.endswith("bias") or "norm" in name)
    if scaled:
        update = update + config.weight_decay * weights
    parts = 3 if ".qkv." in name else 1
    for part, change in zip(weights.chunk(parts), update.chunk(parts)):
        ratio = part.norm() / change.norm() if scaled and part.norm() > 0 else 1.0
        part -= RATE * ratio * change


@pytest.mark.parametrize("settings", [{}, {"accumulation": 8}, {"split_optimizer": True, "accumulation": 2}], ids=str)
def test_step_is_the_plain_one_of_the_global_batch(settings, config, ranks, samples, expected):
    training = Training(dataclasses.replace(config, **settings), ENTRIES, ranks)
    before = [weight.detach().clone() for weight in training.network.parameters()]
    warm_up(training)
    assert all(map(torch.equal, before, training.network.parameters())), "the warm-up leaves no trace"
    batches = training_input(training.config, samples, ranks, 0)
    losses = [pytorch.total(train_step(training, next(batches), RATE)[None])[0] / ranks.size for _ in range(STEPS)]
    batches.close()
    assert losses == pytest.approx(expected[0], rel=1e-6)
    for ours, its in zip(training.network.parameters(), expected[1]):
        assert float((ours.detach().double() - its).abs().max() / its.abs().max()) < 1e-4
    share = training.optimizer.inner.flat.numel() / training.optimizer.gradients.numel()
    assert share == (1 / ranks.size if "split_optimizer" in settings else 1), "of the optimizer's state"


def test_every_evaluation_sample_counts_once(config, ranks, samples):
    training = Training(config, ENTRIES, ranks)
    parts = evaluation_input(dataclasses.replace(config, eval_batch_size=3), samples, ranks)
    mine = [training.network.figures(part) for part in parts if part is not None]
    each = sum(training.network.figures(part_of(samples, np.array([number]))) for number in range(SAMPLES))
    assert pytorch.total(sum(mine)) == pytest.approx(each.tolist(), rel=1e-6)
    assert each[3:].tolist() == [SAMPLES, len(samples.masked_labels)]


def test_every_precision_trains_and_an_overflow_changes_nothing(ranks, samples):
    if ranks.size > 1:
        pytest.skip("one rank shows it")
    losses = {}
    for precision in ("fp32", "bf16", "fp16"):
        # Always the same samples, so that the loss falls.
        config = dataclasses.replace(CONFIG, precision=precision, loss_scale=1024.0, epsilon=1e-6)
        training = Training(config, ENTRIES, ranks)
        batches = training_input(config, samples, ranks, 0)
        batch = next(batches)
        batches.close()
        losses[precision] = [float(train_step(training, batch, RATE)) for _ in range(12)]
    for precision, tolerance in (("bf16", 0.01), ("fp16", 0.002)):
        assert losses[precision] == pytest.approx(losses["fp32"], rel=tolerance)
        assert losses[precision] != losses["fp32"]
    assert losses["fp32"][-1] < 0.8 * losses["fp32"][0]
    training = Training(dataclasses.replace(CONFIG, precision="fp16", loss_scale=3e38), ENTRIES, ranks)
    before = [weight.detach().clone() for weight in training.network.parameters()]
    train_step(training, batch, RATE)
    assert all(map(torch.equal, before, training.network.parameters()))
    assert float(training.optimizer.scale.value) == pytest.approx(1.5e38)
