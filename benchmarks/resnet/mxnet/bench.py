"""Training speed with synthetic and real data, input speed, and a bare Gluon loop for comparison, in one process.

    $ python -m benchmarks.resnet.mxnet.bench --config config.json --data DATA

The bare loop follows MXNet's tutorials: the same network and batch, mx.optimizer.SGD in a gluon.Trainer, no Horovod,
no reports. The last line of the output is the result as JSON.
"""

from functools import partial
from pathlib import Path
from typing import Callable

import mxnet as mx
from mxnet import autograd, gluon

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import mxnet
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet.architecture import bench_title, input_shape
from benchmarks.resnet.inputs import bench_subject
from benchmarks.resnet.mxnet import data as tensors
from benchmarks.resnet.mxnet import model
from benchmarks.resnet.mxnet.config import Config
from benchmarks.resnet.mxnet.data import Batch
from benchmarks.resnet.mxnet.train import build, count_correct, train_step


def synthetic_batch(config: Config, context: mx.Context, batch_size: int = 0) -> Batch:
    """Return a batch of noise on the device, by default with the training batch size."""
    count = batch_size or config.batch_size
    dtype = "float16" if config.precision == "fp16" else "float32"
    images = mx.nd.random.uniform(shape=(count, *input_shape(config)[1:]), ctx=context).astype(dtype)
    labels = mx.nd.random.randint(0, config.num_classes, shape=(count,), ctx=context)
    return images, labels.astype("float32")


def bare_step(config: Config, context: mx.Context, batch: Batch) -> Callable[[], None]:
    """Return a plain Gluon training step with the same network and batch."""
    network = model.build(config)
    model.initialize(network, config, context)
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    loss_function.hybridize(static_alloc=True, static_shape=True)
    arguments = {"learning_rate": 0.01, "momentum": config.momentum, "wd": config.weight_decay}
    arguments["multi_precision"] = config.precision == "fp16"
    trainer = gluon.Trainer(network.collect_params(), "sgd", arguments, kvstore=None)

    def step() -> None:
        with autograd.record():
            loss = loss_function(network(batch[0]), batch[1])
        loss.backward()
        trainer.step(config.batch_size)

    return step


def prepare(config: Config, ranks: Ranks, data: Path) -> bench.Subject:
    batch, (images, labels) = (synthetic_batch(config, ranks.context, size) for size in (0, config.eval_batch_size))
    training = build(config, ranks, {})
    return bench_subject(
        mxnet,
        tensors,
        config,
        ranks,
        data,
        batch=batch,
        bare=bare_step(config, ranks.context, batch),
        step=partial(train_step, training, rate=bench.RATE),
        evaluation=lambda: count_correct(training, images, labels, len(labels)).wait_to_read(),
        titles=(bench_title(config), "bare Gluon loop, synthetic data"),
    )


if __name__ == "__main__":
    bench.main(__doc__, Config, mxnet, prepare)
