"""How fast the step is, next to a plain padded PyTorch loop, in one run; and LAMB next to a loop over tensors.

    $ python -m benchmarks.bert.pytorch.bench --config config.json --data DATA

The plain loop is what one would write first: nn.TransformerEncoder on any samples, padded to the longest of the batch,
the vocabulary at every place, torch.optim.AdamW. Both kinds of steps take whole batches of the data set. Speeds are
sequences/s; those of the optimizer alone are updates/s of this network's weights. The last line of the output is the
result as JSON.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.bert.pytorch import model
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import Batch, Part, TrainingInput, noise
from benchmarks.bert.pytorch.train import Training, build, train_step
from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import lamb
from benchmarks.common.torch.updates import ALIGNMENT
from benchmarks.language.arrays import DataSet, open_data
from benchmarks.language.pytorch.attention import pad
from benchmarks.language.pytorch.pieces import NORM_EPSILON

TITLES = {
    "bare": "plain padded PyTorch loop, sequences/s",
    "synthetic": "training step, noise without padding, sequences/s",
    "real": "training step, real data, sequences/s",
    "input": "input pipeline alone, sequences/s",
    "evaluation": "evaluation, noise without padding, sequences/s",
    "lamb by tensors": "LAMB, one tensor after the other, updates/s",
    "lamb": "LAMB, all tensors together, updates/s, next to one after the other",
}
LAMBS = {"lamb by tensors": "plain", "lamb": "fused"}
ABSENT = -100
"""Label of places without a masked word, which the loss leaves out."""


class PlainNetwork(nn.Module):
    """The same network by PyTorch's own module."""

    def __init__(self, config: Config, vocabulary: int) -> None:
        super().__init__()
        width = config.width
        sizes = (vocabulary, config.positions, 2)
        self.words, self.places, self.segments = (nn.Embedding(size, width) for size in sizes)
        self.norm, self.transform_norm = (nn.LayerNorm(width, NORM_EPSILON) for _ in range(2))
        layer = nn.TransformerEncoderLayer(
            width, config.heads, config.inner_width, config.dropout, "gelu", NORM_EPSILON, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.transform, self.pooler, self.next = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 2)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(
        self, tokens: torch.Tensor, segments: torch.Tensor, absent: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, length, vocabulary) and (B, 2)."""
        places = self.places.weight[: tokens.shape[1]]
        hidden = self.layers(
            self.norm(self.words(tokens) + places + self.segments(segments)), src_key_padding_mask=absent
        )
        words = self.transform_norm(functional.gelu(self.transform(hidden)))
        return words @ self.words.weight.t() + self.bias, self.next(torch.tanh(self.pooler(hidden[:, 0])))


def padded(part: Part) -> Tuple[torch.Tensor, ...]:
    """Return tokens, segments, absent places and labels (B, longest) of a part, and its next sentences."""
    rows = part.rows
    lengths = (rows.offsets[1:] - rows.offsets[:-1]).long()
    there = torch.arange(rows.longest, device=lengths.device) < lengths[:, None]
    labels = torch.full_like(rows.tokens, ABSENT)
    labels[part.masked] = part.labels
    wide = torch.full(there.shape, ABSENT, device=lengths.device)
    wide[there] = labels
    return pad(rows.tokens, there), pad(rows.segments, there), ~there, wide, part.next


def plain_step(
    config: Config, network: PlainNetwork, ranks: Ranks, next_batch: Callable[[], List[Tuple[torch.Tensor, ...]]]
) -> Callable[[], None]:
    """A step of a plain loop."""
    optimizer = torch.optim.AdamW(network.parameters(), bench.RATE, (config.beta1, config.beta2), config.epsilon)

    def step() -> None:
        optimizer.zero_grad()
        for tokens, segments, absent, labels, follows in next_batch():
            with pytorch.autocast(ranks.context, config.precision):
                words, next_logits = network(tokens, segments, absent)
            loss = functional.cross_entropy(words.flatten(0, 1).float(), labels.flatten(), ignore_index=ABSENT)
            (loss + functional.cross_entropy(next_logits.float(), follows)).backward()
        optimizer.step()

    return step


def lamb_loops(training: Training) -> Dict[str, bench.Loop]:
    """Update a copy of the weights by each implementation."""
    named = list(training.network.named_parameters())
    pieces = lamb.pieces_of(named, lambda name: model.decay_of(name, training.config), model.parts_of)
    candidates = lamb.lamb_candidates(pieces, lamb.Options((0.9, 0.999), 1e-6), None)
    size = max(-(-(piece.begin + piece.size) // ALIGNMENT) for piece in pieces) * ALIGNMENT
    loops = {}
    for title, name in LAMBS.items():
        flat = nn.Parameter(torch.full((size,), 0.1, device=training.ranks.context))
        flat.grad = torch.full_like(flat, 1e-3)
        optimizer: Any = candidates[name]([flat])
        optimizer.param_groups[0]["lr"] = 1e-6
        loops[title] = bench.repeated(optimizer.step)
    return loops


def endless(data: DataSet, config: Config, ranks: Ranks, inputs: ExitStack) -> Callable[[], Batch]:
    """Return what gives the batches of a training."""
    return inputs.enter_context(closing(TrainingInput(config, data.train, ranks, 0))).next


def in_turn(batches: List[List[Tuple[torch.Tensor, ...]]]) -> Callable[[], List[Tuple[torch.Tensor, ...]]]:
    """Return what gives one of ``batches`` after the other, again and again."""
    numbers: Iterator[int] = count()
    return lambda: batches[next(numbers) % len(batches)]


def evaluated(training: Training, part: Part) -> None:
    """Evaluate a part of noise."""
    training.network.eval()
    training.judge(part)
    training.network.train()


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    """Build what is measured."""
    data = open_data(folder)
    training = build(config, data, ranks, {})
    inputs = ExitStack()

    def step(batch: Batch) -> torch.Tensor:
        return train_step(training, batch, 0.0)

    synthetic = noise(config, training.vocabulary, ranks)
    (sample,) = noise(replace(config, batch_size=config.eval_batch_size, accumulation=1), training.vocabulary, ranks)
    network = PlainNetwork(config, training.vocabulary).to(ranks.context)
    # Padded before the clock: the plain loop is not charged with its input.
    take = endless(data, replace(config, cuda_graph=False, fp8=False), ranks, inputs)
    batches = [[padded(part) for part in take()] for _ in range(8)]
    tokens = [(int((~absent).sum()), absent.numel()) for batch in batches for _, _, absent, _, _ in batch]
    share = 1 - sum(there for there, _ in tokens) / sum(places for _, places in tokens)
    loops = {
        "bare": bench.repeated(plain_step(config, network, ranks, in_turn(batches))),
        "synthetic": bench.training_loop(pytorch, config, ranks, step, lambda: synthetic),
        "real": bench.training_loop(pytorch, config, ranks, step, endless(data, config, ranks, inputs)),
        "input": bench.repeated(endless(data, config, ranks, inputs)),
        bench.EVALUATION: bench.repeated(lambda: evaluated(training, sample)),
        **lamb_loops(training),
    }
    title = (
        f"BERT, {config.layers} layers, width {config.width}, {data.vocabulary.size:,} entries, {config.batch_size} "
        f"samples, {share:.0%} padding in the plain loop, {config.precision}, one {config.device}"
    )
    samples = {**dict.fromkeys(LAMBS, 1), bench.EVALUATION: config.eval_batch_size}
    against = dict.fromkeys(LAMBS, "lamb by tensors")
    return bench.Subject(title, config.batch_size, loops, TITLES, samples, against, inputs.close)


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
