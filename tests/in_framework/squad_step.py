"""BERT on SQuAD: loss against its definition, the update against float64, pretrained weights; prints JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.bert_squad.arrays import Windows
from benchmarks.bert_squad.pytorch import train
from benchmarks.bert_squad.pytorch.config import Config
from benchmarks.bert_squad.pytorch.data import Batch, chosen, filled, gathered, noise
from benchmarks.bert_squad.pytorch.model import Network, in_tables, loss_sum
from benchmarks.bert_squad.pytorch.train import Training, train_batch, train_step
from benchmarks.bert_squad.schedule import learning_rate
from benchmarks.common.data.problem import Problem
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch.generators import drawn_from
from benchmarks.language.pytorch.checkpoint import places_of
from benchmarks.language.pytorch.graphs import captured
from tests.in_framework.held import Held

RANKS = Ranks(0, 1, 0, 1, torch.device("cpu"))
SIZES: dict[str, Any] = {
    "device": "cpu", "precision": "fp32", "layers": 2, "width": 16, "heads": 2, "inner_width": 32, "positions": 40,
    "sequence_length": 40, "dropout": 0.0, "attention_dropout": 0.0, "batch_size": 6, "initializer_range": 0.2,
    "seed": 4,
}  # fmt: skip
VOCABULARY = 48


def some_windows(count: int = 30) -> Windows:
    """Windows of random tokens of all lengths."""
    random = np.random.RandomState(0)
    lengths = random.randint(10, 41, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    starts = random.randint(0, 5, count)
    return Windows(
        tokens=random.randint(0, VOCABULARY, total).astype(np.uint16),
        begins=np.zeros(total, np.uint16),
        ends=np.zeros(total, np.uint16),
        best=np.zeros(total, np.uint8),
        offsets=offsets,
        second=np.full(count, 4, np.uint16),
        start=starts.astype(np.uint16),
        end=(starts + random.randint(0, 5, count)).astype(np.uint16),
        question=np.arange(count, dtype=np.int32),
    )


def plain_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The loss window by window."""
    bounds, found = batch.rows.offsets.tolist(), []
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        shares = logits[begin:end].log_softmax(0)
        found.append(-(shares[batch.start[row], 0] + shares[batch.end[row], 1]) / 2)
    return torch.stack(found).sum()


def loss(windows: Windows) -> dict[str, Any]:
    batch = gathered(windows, np.arange(6))
    logits = torch.randn(len(batch.wide), 2, dtype=torch.float64, requires_grad=True)
    first, last = in_tables(logits, batch)
    ours, theirs = loss_sum(logits, batch), plain_loss(logits, batch)
    mine, its = (torch.autograd.grad(each, logits)[0] for each in (ours, theirs))
    return {
        "loss": abs(float(ours.detach() - theirs.detach())),
        "gradient": float((mine - its).abs().max()),
        "finite": int(torch.isfinite(first).sum()) == int(torch.isfinite(last).sum()) == len(batch.wide),
    }


def update(windows: Windows, kernel: str) -> dict[str, float]:
    """Five steps of ours next to the definition in float64."""
    # The bias of the keys changes no softmax: its gradient is rounding, which a smaller epsilon would blow up.
    config = Config(**SIZES, gradient_clip=0.5, weight_decay=0.1, learning_rate=0.01, epsilon=1e-4)
    ours = Training(config, VOCABULARY, RANKS, kernel, None)
    with drawn_from(config.seed):
        plain = Network(config, VOCABULARY, "padded").double()
    moments: list[Any] = [(torch.zeros_like(each), torch.zeros_like(each)) for each in plain.parameters()]
    norms, losses = [], []
    for step in range(5):
        batch = gathered(windows, chosen(config, windows, step, 5, RANKS))
        rate = learning_rate(config, step, 5)
        mine = train_step(ours, batch, rate)
        theirs = plain_loss(plain.span(plain.encoder(batch.rows)), batch) / len(batch)
        gradients = torch.autograd.grad(theirs, list(plain.parameters()))
        norm = torch.stack([each.norm() for each in gradients]).norm()
        factor = min(1.0, config.gradient_clip / (float(norm) + 1e-6))
        norms.append(float(norm))
        losses.append(abs(float(mine) - float(theirs.detach())))
        with torch.no_grad():
            for weight, gradient, (m, v) in zip(plain.parameters(), gradients, moments):
                m.mul_(config.beta1).add_(gradient * factor, alpha=1 - config.beta1)
                v.mul_(config.beta2).add_((gradient * factor) ** 2, alpha=1 - config.beta2)
                decay = config.weight_decay if weight.dim() > 1 else 0.0
                weight -= rate * (m / (v.sqrt() + config.epsilon) + decay * weight)
    pairs = zip(ours.network.parameters(), plain.parameters())
    weights = max(float((a.double() - b).abs().max()) for a, b in pairs)
    return {"least norm": min(norms), "losses": max(losses), "weights": weights}


def pretrained() -> dict[str, Any]:
    """An encoder saved under the published names begins another training; a file without a weight is refused."""
    config = Config(**SIZES)
    first = Training(config, VOCABULARY, RANKS, "plain", None)
    named = {f"encoder.{name}": each for name, each in first.network.encoder.state_dict().items()}
    published = {name: each.clone() for name, each in places_of(named).items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        torch.save({**published, "qa_outputs.weight": torch.zeros(2, 16)}, str(path))
        other = Config(**{**SIZES, "seed": 5, "checkpoint": "weights.pt"})
        second = Training(other, VOCABULARY, RANKS, "plain", train.weights_file(other, Path(folder)))
        lacking = sorted(published)[0]
        torch.save({name: each for name, each in published.items() if name != lacking}, str(path))
        refused = []
        for call in (
            lambda: Training(other, VOCABULARY, RANKS, "plain", path),
            lambda: train.weights_file(other, Path(folder) / "nowhere"),
        ):
            try:
                call()
            except Problem as problem:
                refused.append(str(problem))
    pairs = list(zip(first.network.encoder.parameters(), second.network.encoder.parameters()))
    return {
        "same encoder": all(torch.equal(a, b) for a, b in pairs),
        "same head": torch.equal(first.network.span.weight, second.network.span.weight),
        "lacking": lacking,
        "refused": refused,
    }


def graphs(windows: Windows) -> dict[str, Any]:
    """The largest distance of losses and gradients of filled rows, by held graphs too, from rows without padding."""
    config = SimpleNamespace(**{**dataclasses.asdict(Config(**SIZES)), "token_bucket": 32, "cuda_graph": True})
    training = Training(Config(**SIZES), VOCABULARY, RANKS, "plain", None)
    step = captured(
        partial(train_batch, training),
        lambda tokens: noise(config, VOCABULARY, RANKS, tokens),  # type: ignore[arg-type]
        config.batch_size * config.sequence_length, 32, 1, Held,
    )  # fmt: skip

    def gradients(of: Any, batch: Batch) -> list[torch.Tensor]:
        training.updates.gradients.zero_()
        return [of(batch).clone(), training.updates.gradients.clone()]

    distances, lengths = {"filled": 0.0, "by graphs": 0.0}, set()
    for number in range(5):
        batch = gathered(windows, chosen(Config(**SIZES), windows, number, 5, RANKS))
        full = filled(batch, config)  # type: ignore[arg-type]
        lengths.add(len(full.rows.tokens) - len(batch.rows.tokens))
        expected = gradients(partial(train_batch, training), batch)
        for name, of in (("filled", partial(train_batch, training)), ("by graphs", step)):
            found = gradients(of, full)
            distance = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected))
            distances[name] = max(distances[name], distance)
    return {
        **distances,
        "added": sorted(lengths),
        "lengths": [len(graph.held[0]) for graph in Held.made],
        "replays": sum(graph.replays for graph in Held.made),
    }


def main() -> int:
    torch.manual_seed(0)
    windows = some_windows()
    found = {
        "loss": loss(windows),
        "update": {kernel: update(windows, kernel) for kernel in ("plain", "fused")},
        "pretrained": pretrained(),
        "graphs": graphs(windows),
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
