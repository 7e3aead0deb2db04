"""NeuMF against a plain float64 model: scores, gradients and one step of Adam; with AMP, roughly."""

from __future__ import annotations

import copy
import json

import numpy as np
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import optimizers
from benchmarks.ncf.pytorch import data, model, train
from benchmarks.ncf.pytorch.config import Config
from benchmarks.ncf.pytorch.train import assemble, build, content, train_step

USERS, ITEMS, PAIRS, FACTORS = 40, 30, 500, 4
HELD_OUT = 29
LAYERS = (12, 10, 6, 3)
RATE, BETA1, BETA2, EPSILON = 0.0045, 0.25, 0.5, 1e-8
CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))


def reference(values, users, items, labels):
    """Mean loss of NeuMF as equations 7 to 12 of the paper have it, on float64 tensors."""
    product = values["gmf_users"][users] * values["gmf_items"][items]
    hidden = torch.cat((values["mlp_users"][users], values["mlp_items"][items]), 1)
    for number in range(len(LAYERS) - 1):
        hidden = torch.relu(hidden @ values[f"weights.{number}"].T + values[f"biases.{number}"])
    final = torch.cat((values["out_gmf"], values["out_mlp"]))
    scores = torch.cat((product, hidden), 1) @ final + values["out_bias"]
    probability = torch.sigmoid(scores)
    loss = -(labels * probability.log() + (1 - labels) * (1 - probability).log()).mean()
    return scores, loss


def relative(found, expected) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def compare(first_layer: str, kernel: str) -> dict:
    """Largest relative errors of one step."""
    torch.manual_seed(0)
    config = Config(
        device="cpu", precision="fp32", factors=FACTORS, layers=LAYERS, first_layer=first_layer,
        learning_rate=RATE, beta1=BETA1, beta2=BETA2, epsilon=EPSILON, batch_size=PAIRS, optimizer_kernel=kernel,
    )  # fmt: skip
    network = model.build(config, USERS, ITEMS)
    for parameter in network.parameters():
        # Larger than fresh weights, so that every layer matters, and biases that are not 0.
        parameter.data.uniform_(-0.5, 0.5)
    values = {name: p.detach().double().requires_grad_() for name, p in network.named_parameters()}
    sampler = data.Sampler(small_data(), PAIRS, 4, CPU)
    sampler.draw_epoch(1)
    users, items, labels, _ = sampler.batch(0)
    expected_scores, expected_loss = reference(values, users, items, labels.double())
    expected_loss.backward()
    found = {"scores": relative(network(users, items).detach(), expected_scores.detach())}
    loss = model.loss_sum(network(users, items), labels) / PAIRS
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    found["gradients"] = max(relative(gradients[name], values[name].grad) for name in values)
    network.zero_grad()
    made = assemble(config, network, sampler, CPU)
    train_step(made, 0)
    found["loss"] = abs(float(made.losses[0]) / float(expected_loss.detach()) - 1)
    errors = []
    for name, parameter in network.named_parameters():
        gradient = values[name].grad
        # Kingma and Ba 2015, algorithm 1, at t = 1.
        first = (1 - BETA1) * gradient / (1 - BETA1)
        second = (1 - BETA2) * gradient**2 / (1 - BETA2)
        expected = values[name].detach() - RATE * first / (second.sqrt() + EPSILON)
        # Where a gradient is all but 0, its sign is a matter of rounding.
        clear = (gradient.abs() > 1e-6) | (gradient == 0)
        errors.append(float(((parameter.detach().double() - expected).abs() * clear).max()))
    found["weights after Adam"] = max(errors)
    found["by tables"] = network.by_tables
    return found


def small_data() -> data.DataSet:
    generator = torch.Generator().manual_seed(3)
    met = torch.rand(USERS, ITEMS, generator=generator) < 0.3
    met[:, 0] = True
    met[:, HELD_OUT] = False
    pairs = met.nonzero().int()
    held_out = torch.full((USERS,), HELD_OUT, dtype=torch.int32)
    return data.DataSet(
        USERS, ITEMS, pairs[:, 0], pairs[:, 1], held_out, np.zeros((USERS, 1)), {"users": USERS, "items": ITEMS}
    )


def bf16_error() -> float:
    """Largest error of a gradient under bf16, relative to the largest gradient of its tensor."""
    torch.manual_seed(0)
    network = model.NeuMF(USERS, ITEMS, FACTORS, LAYERS, by_tables=True)
    for parameter in network.parameters():
        parameter.data.uniform_(-0.5, 0.5)
    users, items = torch.randint(USERS, (PAIRS,)), torch.randint(ITEMS, (PAIRS,))
    labels = (torch.rand(PAIRS) < 0.2).float()
    found = []
    for precision in ("fp32", "bf16"):
        network.zero_grad()
        with pytorch.autocast(torch.device("cpu"), precision):
            scores = network(users, items)
        model.loss_sum(scores, labels).backward()
        found.append([parameter.grad.double() for parameter in network.parameters()])
    return max(relative(low, exact) for exact, low in zip(*found))


class HeldCapture:
    """A capture that knows the optimizer's tensors by their memory, as a CUDA graph does."""

    optimizer: torch.optim.Optimizer

    def __init__(self, function, example, warm_up) -> None:
        warm_up(*example)
        self.memory = memory(self.optimizer)


def memory(optimizer: torch.optim.Optimizer) -> list:
    return [value.data_ptr() for state in optimizer.state.values() for value in state.values()]


def resumed_capture(kernel: str) -> dict:
    """Does a checkpoint reach the tensors that a graph holds, and do they train on like those never stopped?"""
    settings = {
        "precision": "fp32", "factors": FACTORS, "layers": LAYERS, "batch_size": 100, "optimizer_kernel": kernel,
    }  # fmt: skip
    eager, graphed = Config(device="cpu", **settings), Config(device="gpu", **settings)
    sampler = data.Sampler(small_data(), 100, 4, CPU)
    whole = build(eager, USERS, ITEMS, sampler, CPU, {})
    sampler.draw_epoch(1)
    for step in range(3):
        train_step(whole, step)
    saved = copy.deepcopy(content(whole))
    candidates, assembled = optimizers.adam_candidates, train.assemble

    def assemble_and_watch(*arguments):
        made = assembled(*arguments)
        HeldCapture.optimizer = made.optimizer
        return made

    train.Captured, train.assemble = HeldCapture, assemble_and_watch
    # PyTorch refuses a capturable optimizer on a CPU.
    optimizers.adam_candidates = lambda *options, capturable: candidates(*options)
    fresh = build(graphed, USERS, ITEMS, sampler, CPU, {})
    resumed = build(graphed, USERS, ITEMS, sampler, CPU, saved)
    optimizers.adam_candidates, train.assemble = candidates, assembled
    sampler.draw_epoch(2)
    for step in range(3):
        train_step(whole, step)
        train_step(resumed, step)
    pairs = zip(whole.network.parameters(), resumed.network.parameters())
    return {
        "tensors": len(resumed.graph.memory),
        "the same tensors": memory(resumed.optimizer) == resumed.graph.memory,
        "the same weights": all(torch.equal(ours, theirs) for ours, theirs in pairs),
        "fresh after the warm-up": all(not v.any() for s in fresh.optimizer.state.values() for v in s.values()),
    }


def main() -> None:
    found = {
        f"{first_layer}, {kernel}": compare(first_layer, kernel)
        for first_layer in ("tables", "rows", "auto")
        for kernel in ("plain", "fused")
    }
    resumed = {kernel: resumed_capture(kernel) for kernel in ("plain", "fused")}
    print(json.dumps({"steps": found, "bf16": bf16_error(), "resumed": resumed}))


if __name__ == "__main__":
    main()
