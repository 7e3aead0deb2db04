"""The Transformer's step on any number of ranks against a plain float64 one of the global batch; prints the errors.

The reference has torch.optim.Adam, logits in one piece and no ranks; autograd does the rest.
"""

import dataclasses
import json

import numpy as np
import torch
from torch import nn

from benchmarks.common.frameworks import pytorch
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.train import Training, train_step, warm_up
from benchmarks.translation.arrays import Pairs, Sentences
from benchmarks.translation.orders import Order
from benchmarks.translation.pytorch.batches import TrainingInput
from benchmarks.translation.pytorch.loss import plain_loss

CONFIG = Config(
    device="cpu",
    precision="fp32",
    layers=2,
    width=32,
    heads=4,
    inner_width=48,
    dropout=0.0,
    attention_dropout=0.0,
    relu_dropout=0.0,
    # So large that no gradient near 0 makes a step of the full rate in a direction of rounding.
    epsilon=1e-3,
    optimizer_kernel="fused",
    batch_size=256,
    max_length=40,
    seed=5,
)
WORDS, LONGEST, STEPS, PAIRS = 57, 40, 4, 24
RATE = 0.02


def side(generator, count):
    """So many sentences of drawn lengths."""
    lengths = generator.randint(1, 12, count).astype(np.int32)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return Sentences(generator.randint(4, WORDS, offsets[-1]).astype(np.uint16), offsets)


def data():
    generator = np.random.RandomState(2)
    return Pairs(side(generator, STEPS * PAIRS), side(generator, STEPS * PAIRS))


def order(ranks):
    """The same steps for any number of ranks, of which the last has the fewest pairs."""
    cuts = [step * PAIRS + (PAIRS * rank + ranks - 1) // ranks for step in range(STEPS) for rank in range(ranks)]
    return Order(np.arange(STEPS * PAIRS), np.array([*cuts, STEPS * PAIRS]), STEPS, 0.0)


def taken(ranks, config):
    """Losses of the steps over all ranks, and the weights behind them."""
    training = Training(config, WORDS, WORDS, ranks, {})
    before = [weight.detach().clone() for weight in training.network.parameters()]
    warm_up(training)
    changed = any(not torch.equal(*each) for each in zip(before, training.network.parameters()))
    batches = TrainingInput(data(), lambda _: order(ranks.size), ranks, 0)
    losses = []
    for _ in range(STEPS):
        loss = train_step(training, batches.next(), RATE)
        losses.append(pytorch.total(loss[None])[0] / ranks.size)
    batches.close()
    return losses, [weight.detach().double() for weight in training.network.parameters()], changed


def expected(ranks, config):
    """The same of the plain step."""
    alone = dataclasses.replace(ranks, rank=0, size=1)
    network = Training(config, WORDS, WORDS, alone, {}).network.double()
    network.dtype = torch.float64
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE, betas=betas, eps=config.epsilon)
    batches = TrainingInput(data(), lambda _: order(1), alone, 0)
    losses = []
    for _ in range(STEPS):
        batch = batches.next()
        optimizer.zero_grad()
        logits = network(batch.source, batch.target_in) @ network.table.weight.t()
        loss = plain_loss(logits.flatten(0, 1), batch.target_out.flatten(), config.label_smoothing)
        mean = loss / int((batch.target_out != 0).sum())
        mean.backward()
        if config.gradient_clip:
            nn.utils.clip_grad_norm_(network.parameters(), config.gradient_clip)
        optimizer.step()
        losses.append(float(mean))
    batches.close()
    return losses, [weight.detach() for weight in network.parameters()]


def errors(ranks, **changes):
    """Largest differences of losses and of weights."""
    config = dataclasses.replace(CONFIG, **changes)
    losses, weights, changed = taken(ranks, config)
    wanted, others = expected(ranks, config)
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, wanted)),
        "weights": max(float((a - b).abs().max()) for a, b in zip(weights, others)),
        "changed by the warm-up": changed,
        "learnt": wanted[0] - wanted[-1],
    }


def main():
    ranks = pytorch.start(CONFIG)
    found = {
        "fp32": errors(ranks),
        "split": errors(ranks, split_optimizer=True, loss_chunk=7),
        "clipped": errors(ranks, gradient_clip=0.5, norm="post"),
        "fp16": errors(ranks, precision="fp16"),
        "bf16": errors(ranks, precision="bf16"),
    }
    if ranks.rank == 0:
        print(json.dumps(found))
    pytorch.finish()


main()
