"""Measure the training step and the translation, compared with a plain PyTorch loop.

    $ python -m benchmarks.transformer.pytorch.bench --config config.json --data DATA

The plain loop uses the same network with unsorted batches of the same mean size, padded to the longest sentence, the
logits of the full batch, and torch.optim.Adam. Training speeds are target tokens/s; translation speeds are
sentences/s, in batches of eval_batch_size and for single sentences. The last line of the output is the result as
JSON.
"""

from functools import partial
from itertools import islice
from pathlib import Path

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.transformer.flops import training_flops
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.data import evaluation_input, order_of
from benchmarks.transformer.pytorch.model import Network, decode
from benchmarks.transformer.pytorch.train import build, train_step
from benchmarks.translation.arrays import open_data
from benchmarks.translation.orders import MARKS
from benchmarks.translation.pytorch.batches import PLAIN, synthetic_batch
from benchmarks.translation.pytorch.bench import subject


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    data = open_data(folder)
    training = build(config, data.vocabulary.size, ranks, {})
    orders = order_of(config, data, ranks)
    first, steps = orders(0), -(-len(data.test) // (config.eval_batch_size * ranks.size))
    length = max(2, config.max_length // 2)
    synthetic = synthetic_batch(training.words, max(1, config.batch_size // length), length, ranks)
    sentences, source = synthetic.source.shape
    plain = Network(config, len(training.network.table.weight)).to(ranks.context)
    return subject(
        training,
        data,
        orders,
        PLAIN,
        longest=config.max_length - MARKS,
        sentences=max(1, round(len(first.sentences) / first.steps)),
        tokens=(data.train.target.lengths[first.sentences].sum() + len(first.sentences)) / first.steps,
        synthetic=synthetic,
        synthetic_tokens=synthetic.tokens,
        synthetic_flops=training_flops(config, training.words, sentences, source, synthetic.target_in.shape[1]),
        step=lambda batch: train_step(training, batch, 0.0),
        plain=plain,
        logits=lambda batch: plain(batch.source, batch.target_in) @ plain.table.weight.t(),
        decode=partial(decode, training.network, training.words),
        # The longest come first.
        translated=next(islice(evaluation_input(config, data, ranks), steps // 2, None)),
        title=f"Transformer, {config.layers} + {config.layers} layers, width {config.width}, "
        f"{training.words:,} entries, {config.batch_size} positions",
    )


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
