"""The Transformer's step on one and two ranks with recorded values of torch.optim.Adam on the global batch."""

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks.common.data.arrays import Sequences
from benchmarks.common.frameworks import pytorch
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.train import build, train_step
from benchmarks.translation.arrays import Pairs
from benchmarks.translation.orders import Order
from benchmarks.translation.pytorch.batches import training_input
from tests.in_framework.torch_checks import projection, set_fixed_weights

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


# Losses and weights of torch.optim.Adam, with clip_grad_norm_, on the padded global batch in float64
@pytest.mark.parametrize(
    ("changes", "losses", "weights"),
    [
        *((changes, [4.041992446, 3.837933754, 3.705685471, 3.631343347], -222.4820746)
          for changes in ({}, {"packed": False}, {"split_optimizer": True, "loss_chunk": 7}, {"precision": "fp16"},
                          {"precision": "bf16"})),
        ({"gradient_clip": 0.5, "norm": "post"}, [4.168516683, 3.926682231, 3.797839656, 3.730710376], -221.9168473),
    ],
    ids=str,
)  # fmt: skip
def test_steps_match_adam_on_the_global_batch(changes, losses, weights, ranks):
    config = dataclasses.replace(CONFIG, vocabulary_multiple=1, **changes)
    cold, training = (build(dataclasses.replace(config, warm_up_steps=n), WORDS, ranks, {}) for n in (0, 3))
    parameters = list(training.network.parameters())
    assert all(map(torch.equal, parameters, cold.network.parameters())), "a warm-up changes nothing"
    set_fixed_weights(parameters, 0.3)
    steps = [pytorch.total(train_step(training, batch, RATE)[None])[0] / ranks.size for batch in batches(ranks)]
    assert steps == pytest.approx(losses, abs=0.02 if "precision" in changes else 1e-5)
    assert "precision" in changes or projection(*parameters) == pytest.approx(weights, rel=1e-6)
