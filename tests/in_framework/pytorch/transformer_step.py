"""The Transformer's step on one and two ranks against torch.optim.Adam in float64 on the global batch."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.common.data.arrays import Sequences
from benchmarks.common.frameworks import pytorch
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.train import build, train_step
from benchmarks.translation.arrays import Pairs
from benchmarks.translation.orders import Order
from benchmarks.translation.pytorch.batches import training_input
from benchmarks.translation.pytorch.loss import plain_loss

LONG = True
RANKS = (1, 2)
# With an epsilon so large that no gradient near 0 makes a step of the full rate in a direction of rounding.
CONFIG = Config(device="cpu", precision="fp32", layers=2, width=32, heads=4, inner_width=48, batch_size=256,
                dropout=0.0, attention_dropout=0.0, relu_dropout=0.0, max_length=40, seed=5, optimizer_kernel="fused",
                epsilon=1e-3)  # fmt: skip
WORDS, STEPS, PAIRS, RATE = 57, 4, 24, 0.02


def sentences(factor, count=STEPS * PAIRS):
    # Lengths 1 to 11, and all tokens that are words
    offsets = np.concatenate(([0], np.cumsum(1 + np.arange(count) * factor % 11)))
    return Sequences((4 + np.arange(offsets[-1]) ** 2 % (WORDS - 4)).astype(np.uint16), offsets)


def batches(ranks):
    # The same steps for any number of ranks; the last one has the fewest pairs
    size = ranks.size
    cuts = [step * PAIRS + (PAIRS * rank + size - 1) // size for step in range(STEPS) for rank in range(size)]
    order = Order(np.arange(STEPS * PAIRS), np.array([*cuts, STEPS * PAIRS]), STEPS)
    stream = training_input(Pairs(sentences(3), sentences(7)), lambda _: order, ranks, 0)
    return [next(stream) for _ in range(STEPS)]


def train_reference(network, config, single):
    # Losses of the plain steps, which change the network
    network = network.double()
    network.dtype = torch.float64
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE, betas=betas, eps=config.epsilon)
    losses = []
    for batch in batches(single):
        optimizer.zero_grad()
        logits = network(batch.source, batch.target_in) @ network.table.weight.t()
        loss = plain_loss(logits.flatten(0, 1), batch.target_out.flatten(), config.label_smoothing)
        mean = loss / int((batch.target_out != 0).sum())
        mean.backward()
        if config.gradient_clip:
            nn.utils.clip_grad_norm_(network.parameters(), config.gradient_clip)
        optimizer.step()
        losses.append(float(mean))
    return losses


@pytest.mark.parametrize(
    "changes",
    [{}, {"packed": False}, {"split_optimizer": True, "loss_chunk": 7}, {"gradient_clip": 0.5, "norm": "post"},
     {"precision": "fp16"}, {"precision": "bf16"}],
    ids=str,
)  # fmt: skip
def test_steps_are_those_of_adam_on_the_global_batch(changes, ranks):
    config = dataclasses.replace(CONFIG, vocabulary_multiple=1, **changes)
    cold, training = (build(dataclasses.replace(config, warm_up_steps=n), WORDS, ranks, {}) for n in (0, 3))
    weights = list(training.network.parameters())
    assert all(map(torch.equal, weights, cold.network.parameters())), "a warm-up changes nothing"
    losses = [pytorch.total(train_step(training, batch, RATE)[None])[0] / ranks.size for batch in batches(ranks)]
    expected = train_reference(cold.network, config, dataclasses.replace(ranks, rank=0, size=1))
    assert losses == pytest.approx(expected, abs=0.02 if "precision" in changes else 1e-5)
    assert expected[0] - expected[-1] > 0.3
    if "precision" not in changes:
        for ours, theirs in zip(weights, cold.network.parameters(), strict=True):
            assert (ours.double() - theirs).abs().max() < 1e-5
