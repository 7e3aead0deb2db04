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
from benchmarks.bert.pytorch.data import NO_WORD, Batch, MicroBatch, TrainingInput, synthetic_batch
from benchmarks.bert.pytorch.train import Training, build, train_step
from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import lamb
from benchmarks.common.torch.flat_optimizer import ALIGNMENT
from benchmarks.language.arrays import DataSet, open_data
from benchmarks.language.pytorch.pieces import NORM_EPSILON
from benchmarks.language.pytorch.plain import PlainEncoder, tables

TITLES = {
    "bare": "plain padded PyTorch loop, sequences/s",
    "synthetic": "training step, synthetic data without padding, sequences/s",
    "real": "training step, real data, sequences/s",
    "input": "input pipeline alone, sequences/s",
    "evaluation": "evaluation, synthetic data without padding, sequences/s",
    "lamb by tensors": "LAMB, one tensor after the other, updates/s",
    "lamb": "LAMB, all tensors together, updates/s, next to one after the other",
}
LAMBS = {"lamb by tensors": "plain", "lamb": "fused"}


class PlainNetwork(nn.Module):
    # The same network by PyTorch's own module, with the vocabulary at every position.

    def __init__(self, config: Config, vocabulary: int) -> None:
        super().__init__()
        width = config.width
        self.encoder, self.norm = PlainEncoder(config, vocabulary), nn.LayerNorm(width, NORM_EPSILON)
        self.transform, self.pooler, self.next = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 2)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, *given: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, length, vocabulary) and (B, 2) of tokens, segments and where a token is."""
        hidden = self.encoder(*given)
        words = self.norm(functional.gelu(self.transform(hidden)))
        logits = words @ self.encoder.words.weight.t() + self.bias
        return logits, self.next(torch.tanh(self.pooler(hidden[:, 0])))


def padded(part: MicroBatch) -> Tuple[torch.Tensor, ...]:
    """Return tokens, segments, where a token is and labels (B, longest) of a micro-batch, and its next sentences."""
    tokens, segments, there = tables(part.rows, part.rows.longest)
    labels = torch.full_like(part.rows.tokens, NO_WORD)
    labels[part.masked] = part.labels
    wide = torch.full(there.shape, NO_WORD, device=labels.device)
    wide[there] = labels
    return tokens, segments, there, wide, part.next


def plain_step(
    config: Config, network: PlainNetwork, ranks: Ranks, next_batch: Callable[[], List[Tuple[torch.Tensor, ...]]]
) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(network.parameters(), bench.RATE, (config.beta1, config.beta2), config.epsilon)

    def step() -> None:
        optimizer.zero_grad()
        for *given, labels, follows in next_batch():
            with pytorch.autocast(ranks.context, config.precision):
                words, next_logits = network(*given)
            loss = functional.cross_entropy(words.flatten(0, 1).float(), labels.flatten(), ignore_index=NO_WORD)
            (loss + functional.cross_entropy(next_logits.float(), follows)).backward()
        optimizer.step()

    return step


def lamb_loops(training: Training) -> Dict[str, bench.Loop]:
    # Update a copy of the weights by each implementation.
    named = list(training.network.named_parameters())
    groups = lamb.parameter_groups(named, lambda name: model.decay_of(name, training.config), model.parts_of)
    candidates = lamb.lamb_candidates(groups, lamb.Options((0.9, 0.999), 1e-6), None)
    size = max(-(-(piece.begin + piece.size) // ALIGNMENT) for piece in groups) * ALIGNMENT
    loops = {}
    for title, name in LAMBS.items():
        flat = nn.Parameter(torch.full((size,), 0.1, device=training.ranks.context))
        flat.grad = torch.full_like(flat, 1e-3)
        optimizer: Any = candidates[name]([flat])
        optimizer.param_groups[0]["lr"] = 1e-6
        loops[title] = bench.repeated(optimizer.step)
    return loops


def endless(data: DataSet, config: Config, ranks: Ranks, inputs: ExitStack) -> Callable[[], Batch]:
    return inputs.enter_context(closing(TrainingInput(config, data.train, ranks, 0))).next


def in_turn(batches: List[List[Tuple[torch.Tensor, ...]]]) -> Callable[[], List[Tuple[torch.Tensor, ...]]]:
    """Return what gives one of ``batches`` after the other, again and again."""
    numbers: Iterator[int] = count()
    return lambda: batches[next(numbers) % len(batches)]


def evaluated(training: Training, part: MicroBatch) -> None:
    training.network.eval()
    with training.mixed_precision():
        training.network.figures(part)
    training.network.train()


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    data = open_data(folder)
    training = build(config, data, ranks, {})
    inputs = ExitStack()

    def step(batch: Batch) -> torch.Tensor:
        return train_step(training, batch, 0.0)

    synthetic = synthetic_batch(config, training.vocabulary, ranks)
    (sample,) = synthetic_batch(
        replace(config, batch_size=config.eval_batch_size, accumulation=1), training.vocabulary, ranks
    )
    network = PlainNetwork(config, training.vocabulary).to(ranks.context)
    # Padded before the clock: the plain loop is not charged with its input.
    take = endless(data, replace(config, cuda_graph=False, fp8=False), ranks, inputs)
    batches = [[padded(part) for part in take()] for _ in range(8)]
    tokens = [(int(there.sum()), there.numel()) for batch in batches for _, _, there, _, _ in batch]
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
