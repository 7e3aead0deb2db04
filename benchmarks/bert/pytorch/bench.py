"""Measure the training step, compared with a plain padded PyTorch loop, and LAMB compared with a loop over tensors.

    $ python -m benchmarks.bert.pytorch.bench --config config.json --data DATA

The plain loop is the same network with nn.TransformerEncoder, with unsorted samples padded to the longest in the
batch, and torch.optim.AdamW. Both use full batches of the data set. Speeds are sequences/s, for the optimizers
updates/s of the network's weights. The last line of the output is the result as JSON.
"""

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Callable, Dict

import torch
from torch import nn

from benchmarks.bert.pytorch import model
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import NO_WORD, Batch, MicroBatch, synthetic_batch, training_input
from benchmarks.bert.pytorch.train import Training, build, train_step
from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import lamb
from benchmarks.common.torch.flat_optimizer import ALIGNMENT
from benchmarks.language.arrays import DataSet, open_data
from benchmarks.language.flops import pretraining_flops
from benchmarks.language.pytorch import attention
from benchmarks.language.pytorch.encoder import Rows, lengths_of, shape_of
from benchmarks.language.pytorch.plain import PlainEncoder, plain_step

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


def everywhere(part: MicroBatch) -> MicroBatch:
    # Return a micro-batch with a label at every position; only masked positions count.
    labels = torch.full_like(part.rows.tokens, NO_WORD)
    labels[part.masked] = part.labels
    return part._replace(masked=torch.arange(len(labels), device=labels.device), labels=labels)


def lamb_loops(training: Training) -> Dict[str, bench.Loop]:
    # Update a copy of the weights with all implementations.
    named_parameters = list(training.network.named_parameters())
    groups = lamb.parameter_groups(named_parameters, lambda name: model.decay_of(name, training.config), model.parts_of)
    candidates = lamb.lamb_candidates(groups, lamb.Options((0.9, 0.999), 1e-6), None)
    size = max(-(-(piece.start + piece.size) // ALIGNMENT) for piece in groups) * ALIGNMENT
    loops = {}
    for title, name in LAMBS.items():
        flat = nn.Parameter(torch.full((size,), 0.1, device=training.ranks.context))
        flat.grad = torch.full_like(flat, 1e-3)
        optimizer: Any = candidates[name]([flat])
        optimizer.param_groups[0]["lr"] = 1e-6
        loops[title] = bench.repeated(optimizer.step)
    return loops


def attention_loops(config: Config, ranks: Ranks, rows: Rows) -> Dict[str, bench.Loop]:
    # Attention forward and backward on ``rows``, with all implementations that this device supports.
    size, dtype = config.width // config.heads, pytorch.DTYPES[config.precision]
    dropout = config.attention_dropout
    qkv = torch.randn(3, len(rows.tokens), config.heads, size, device=ranks.context).to(dtype).requires_grad_()

    def attended(name: str) -> None:
        attend = attention.IMPLEMENTATIONS[name]
        attend(*qkv.unbind(0), rows.offsets, rows.longest, dropout).float().sum().backward()

    names = attention.available(ranks.context, dtype, size, dropout)
    return {f"attention {name}": bench.repeated(partial(attended, name)) for name in names}


def endless(data: DataSet, config: Config, ranks: Ranks, inputs: ExitStack) -> Callable[[], Batch]:
    return partial(next, inputs.enter_context(closing(training_input(config, data.train, ranks, 0))))


def evaluated(training: Training, part: MicroBatch) -> None:
    training.network.eval()
    with pytorch.autocast(training.ranks.context, training.config.precision):
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
    network = model.Network(shape_of(config, training.vocabulary), "padded")
    network.encoder = PlainEncoder(config, training.vocabulary)
    # Read before the clock starts: the plain loop does not include its input pipeline.
    take = endless(data, replace(config, cuda_graph=False, fp8="none"), ranks, inputs)
    batches = [[everywhere(part) for part in take()] for _ in range(8)]
    rows = [part.rows for batch in batches for part in batch]
    share = 1 - sum(len(row.tokens) for row in rows) / sum((len(row.offsets) - 1) * row.longest for row in rows)
    loops = {
        "bare": bench.repeated(plain_step(config, network, network.loss, ranks.context, partial(next, cycle(batches)))),
        "synthetic": bench.training_loop(pytorch, config, ranks, step, lambda: synthetic),
        "real": bench.training_loop(pytorch, config, ranks, step, endless(data, config, ranks, inputs)),
        "input": bench.repeated(endless(data, config, ranks, inputs)),
        bench.EVALUATION: bench.repeated(lambda: evaluated(training, sample)),
        **lamb_loops(training),
        **attention_loops(config, ranks, synthetic[0].rows),
    }
    title = (
        f"BERT, {config.layers} layers, width {config.width}, {data.vocabulary.size:,} entries, {config.batch_size} "
        f"samples, {share:.0%} padding in the plain loop, {config.precision}, one {config.device}"
    )
    attentions = [name for name in loops if name.startswith("attention ")]
    samples = {**dict.fromkeys(LAMBS, 1), bench.EVALUATION: config.eval_batch_size}
    samples.update(dict.fromkeys(attentions, config.batch_size // config.accumulation))
    titles = {name: f"{name}, one layer there and back, sequences/s, next to padded" for name in attentions}
    flops = sum(
        pretraining_flops(config, data.vocabulary.size, lengths_of(part.rows), int((part.labels != NO_WORD).sum()))
        for part in synthetic
    )
    return bench.Subject(
        title,
        config.batch_size,
        loops,
        {**TITLES, **titles},
        samples,
        {**dict.fromkeys(LAMBS, "lamb by tensors"), **dict.fromkeys(attentions, attentions[-1])},
        inputs.close,
        flops={"synthetic": flops},
    )


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
