"""BERT's step on any number of ranks and parts against a plain float64 one of the global batch; prints the errors."""

import dataclasses
import json

import numpy as np
import torch
from torch.nn import functional

from benchmarks.bert import noise
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import EvaluationInput, TrainingInput, part_of, samples_of_step
from benchmarks.bert.pytorch.train import Training, train_step, warm_up
from benchmarks.common.frameworks import pytorch
from benchmarks.language import arrays

ENTRIES, LONGEST, STEPS, SAMPLES = 61, 20, 4, 37
CONFIG = Config(
    device="cpu",
    precision="fp32",
    layers=2,
    width=64,
    heads=4,
    inner_width=48,
    positions=LONGEST,
    dropout=0.0,
    attention_dropout=0.0,
    masked_mean="global",
    gradient_clip=0.0,
    # So large that no gradient near 0 makes a step of the full rate in a direction of rounding.
    epsilon=1e-2,
    optimizer_kernel="fused",
    batch_size=16,
    seed=5,
)
RATE = 0.02


def samples():
    found = noise.sample_arrays(SAMPLES, LONGEST, 3, ENTRIES)
    return arrays.Samples(*(found[name].astype(dtype) for name, dtype in arrays.ARRAYS.items()))


def taken(config, ranks):
    """Losses of the steps over all ranks, and the weights behind them."""
    training = Training(config, ENTRIES, ranks)
    before = [weight.detach().clone() for weight in training.network.parameters()]
    warm_up(training)
    changed = any(not torch.equal(*each) for each in zip(before, training.network.parameters()))
    batches = TrainingInput(config, samples(), ranks, 0)
    losses = []
    for _ in range(STEPS):
        loss = train_step(training, batches.next(), RATE)
        losses.append(pytorch.total(loss[None])[0] / ranks.size)
    batches.close()
    return losses, [weight.detach().double() for weight in training.network.parameters()], changed, training


def expected(config, ranks):
    """The same of the plain step: all samples of the global batch in one row, and the equations of LAMB."""
    alone = dataclasses.replace(ranks, rank=0, size=1)
    network = Training(config, ENTRIES, alone).network.double()
    parameters = dict(network.named_parameters())
    moments = {name: [torch.zeros_like(each), torch.zeros_like(each)] for name, each in parameters.items()}
    losses = []
    for step in range(STEPS):
        part = part_of(samples(), samples_of_step(config, SAMPLES, ranks.size, step))
        words, follows = network(part.rows, part.masked)
        loss = functional.cross_entropy(words, part.labels) + functional.cross_entropy(follows, part.next)
        for parameter in parameters.values():
            parameter.grad = None
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
    root = (second / (1 - config.beta2**done)).sqrt()
    update = first / (1 - config.beta1**done) / (root + config.epsilon)
    scaled = not (name.endswith("bias") or "norm" in name)
    if scaled:
        update = update + config.weight_decay * weights
    parts = 3 if ".qkv." in name else 1
    for part, change in zip(weights.chunk(parts), update.chunk(parts)):
        ratio = part.norm() / change.norm() if scaled and part.norm() > 0 else 1.0
        part -= RATE * ratio * change


def judged(training, config, ranks):
    """Sums over the evaluation set of all ranks, and those of one sample after the other."""
    evaluation = EvaluationInput(dataclasses.replace(config, eval_batch_size=3), samples(), ranks)
    parts = list(evaluation.one_pass())
    with torch.no_grad():
        sums = sum((training.judge(part) for part in parts if part is not None), torch.zeros(5, dtype=torch.float64))
        each = sum(training.judge(part_of(samples(), np.array([number]))) for number in range(SAMPLES))
    return {"batches": len(parts), "sums": pytorch.total(sums), "each": each.tolist(), "masked": evaluation.masked}


def precisions(ranks):
    """Losses of some steps in each type, and what an overflow does."""
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        # Always the same samples, so that the loss falls.
        config = dataclasses.replace(CONFIG, precision=precision, loss_scale=1024.0, epsilon=1e-6)
        training = Training(config, ENTRIES, ranks)
        batches = TrainingInput(config, samples(), ranks, 0)
        batch = batches.next()
        batches.close()
        found[precision] = [float(train_step(training, batch, RATE)) for _ in range(12)]
    training = Training(dataclasses.replace(CONFIG, precision="fp16", loss_scale=3e38), ENTRIES, ranks)
    before = [weight.detach().clone() for weight in training.network.parameters()]
    train_step(training, batch, RATE)
    same = all(map(torch.equal, before, training.network.parameters()))
    found["overflow"] = {"unchanged": same, "scale": float(training.updates.scale.value)}
    return found


def main():
    ranks = pytorch.start(CONFIG)
    runs = {}
    # As many samples of all ranks in each.
    share = dataclasses.replace(CONFIG, batch_size=CONFIG.batch_size // ranks.size)
    wanted_losses, wanted = expected(share, ranks)
    kinds = {
        "1 parts": {},
        "8 parts": {"accumulation": 8},
        "split": {"split_optimizer": True, "accumulation": 2},
    }
    for kind, settings in kinds.items():
        config = dataclasses.replace(share, **settings)
        losses, weights, changed, training = taken(config, ranks)
        runs[kind] = {
            "share": training.updates.optimizer.flat.numel() / training.updates.gradients.numel(),
            "losses": max(abs(a - b) / b for a, b in zip(losses, wanted_losses)),
            "weights": max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(weights, wanted)),
            "changed by warm-up": changed,
        }
    runs["judged"] = judged(training, share, ranks)
    if ranks.size == 1:
        runs["precisions"] = precisions(ranks)
    if ranks.rank == 0:
        print(json.dumps(runs))
    pytorch.finish()


if __name__ == "__main__":
    main()
