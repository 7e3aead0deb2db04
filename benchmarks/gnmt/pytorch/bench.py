"""Measure the training step and the translation, compared with a plain PyTorch loop.

    $ python -m benchmarks.gnmt.pytorch.bench --config config.json --data DATA

The plain loop uses unsorted batches padded to the longest sentence, nn.LSTM, attention with broadcasting, the logits
of the full batch, and torch.optim.Adam. Training speeds are tokens/s of both languages; translation speeds are
sentences/s, in batches and for single sentences. The last line of the output is the result as JSON.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.gnmt.flops import training_flops
from benchmarks.gnmt.pytorch import attention
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.gnmt.pytorch.data import evaluation_input, order_of, shape
from benchmarks.gnmt.pytorch.model import GNMT, decode
from benchmarks.gnmt.pytorch.train import build, train_step
from benchmarks.translation.arrays import open_data
from benchmarks.translation.orders import GNMT_MARKS
from benchmarks.translation.pytorch.batches import synthetic_batch
from benchmarks.translation.pytorch.bench import subject

DECODED = 32  # maximum batch size of translation on a CPU, which takes seconds
MARKS = 3  # additional tokens per pair: BOS and EOS of the source, EOS of the target


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    data = open_data(folder)
    vocabulary_size = data.vocabulary.size
    training = build(config, vocabulary_size, ranks, {})
    mean = data.train.source.lengths.mean() + data.train.target.lengths.mean()
    length = round(float((mean + MARKS) / 2))
    at_once = config.eval_batch_size if config.device == "gpu" else min(DECODED, config.eval_batch_size)
    plain = GNMT(config, vocabulary_size).to(ranks.context)
    plain.decoder.attention.weigh = attention.plain
    return subject(
        training,
        data,
        order_of(config, data, ranks),
        shape(config),
        longest=config.max_length_train - GNMT_MARKS,
        sentences=config.batch_size,
        tokens=config.batch_size * (mean + MARKS),
        synthetic=synthetic_batch(vocabulary_size, config.batch_size, length, ranks),
        synthetic_tokens=2 * length * config.batch_size,
        synthetic_flops=training_flops(config, vocabulary_size, config.batch_size, length, length),
        step=lambda batch: train_step(training, batch, bench.RATE),
        plain=plain,
        logits=lambda batch: plain.classifier(plain(batch.source, batch.source_lengths, batch.target_in)),
        decode=partial(decode, training.network, vocabulary_size),
        translated=next(evaluation_input(replace(config, eval_batch_size=at_once), data, ranks)),
        title=f"GNMT, width {config.width}, {config.layers} layers, vocabulary {vocabulary_size:,}, "
        f"batch {config.batch_size}",
    )


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
