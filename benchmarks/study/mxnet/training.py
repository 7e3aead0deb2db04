"""Devices, network, trainer and batches for a measurement, for all communication methods."""

from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import mxnet as mx
from mxnet import autograd

from benchmarks.common.data.problem import Problem
from benchmarks.study.mxnet import model
from benchmarks.study.mxnet.config import Config

# Images (batch_size, 3, image, image) and labels (batch_size,) for each device of this process.
Batch = List[Tuple[mx.nd.NDArray, mx.nd.NDArray]]
_KINDS = {"fp16": "float16", "fp32": "float32"}


class ProcessInfo(NamedTuple):
    """Rank and devices of this process."""

    rank: int
    processes: int
    contexts: List[Any]  # all devices with a key-value store, one with Horovod
    # Returns rank 0's value on all processes, so that they agree on a number of steps.
    first_from_all: Callable[[float], float]


class Training(NamedTuple):
    network: mx.gluon.SymbolBlock
    loss: mx.gluon.HybridBlock
    trainer: mx.gluon.Trainer
    facts: Dict[str, Any]  # of the network; see model.describe
    process: ProcessInfo
    config: Config


def start(config: Config) -> ProcessInfo:
    """Join the other processes; raise RuntimeError if their number differs from the configuration."""
    device = mx.gpu if config.device == "gpu" else mx.cpu
    if config.way != "horovod":
        return ProcessInfo(0, 1, [device(number) for number in range(config.ranks)], lambda value: value)
    # Imported on demand: a single process does not need Horovod.
    from benchmarks.common.frameworks import mxnet

    ranks = mxnet.start(config)
    if ranks.size != config.ranks:
        raise RuntimeError(f"{ranks.size} processes for ranks={config.ranks}: start with horovodrun -np {config.ranks}")

    def first(value: float) -> float:
        return mxnet.total([value if ranks.rank == 0 else 0.0])[0]

    return ProcessInfo(ranks.rank, ranks.size, [ranks.context], first)


def finish(config: Config) -> None:
    mx.nd.waitall()
    if config.way == "horovod":
        from benchmarks.common.frameworks import mxnet

        mxnet.finish()


def build(config: Config, process: ProcessInfo) -> Training:
    """Build network and trainer; the parameters depend only on the seed and are equal on all devices."""
    mx.random.seed(config.seed)
    symbol = model.build(config.network, config.classes, config.image, config.dropout)
    facts = model.describe(symbol, (config.batch_size, 3, config.image, config.image))
    data = mx.sym.Variable("data", dtype=_KINDS[config.precision])
    if config.precision == "fp16":
        symbol = mx.sym.Cast(symbol, dtype="float32")
    network = mx.gluon.SymbolBlock(symbol, data)
    _initialize(network, symbol, config, process)
    network.hybridize(static_alloc=True, static_shape=True)
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    loss.hybridize(static_alloc=True, static_shape=True)
    return Training(network, loss, _trainer(network, config), facts, process, config)


# Initialize on the host, so that all communication methods and numbers of devices start from the same weights.
def _initialize(network: mx.gluon.SymbolBlock, symbol: mx.sym.Symbol, config: Config, process: ProcessInfo) -> None:
    shape = (config.batch_size, 3, config.image, config.image)
    names = symbol.list_arguments() + symbol.list_auxiliary_states()
    arguments, _, auxiliary = symbol.infer_shape(data=shape)
    # fp16 data makes fp16 weights, but batch norms keep theirs in fp32.
    kinds, _, auxiliary_kinds = symbol.infer_type(data=_KINDS[config.precision])
    parameters, draw = network.collect_params(), mx.init.Xavier(magnitude=2.0)
    for name, shape, kind in zip(names, list(arguments) + list(auxiliary), list(kinds) + list(auxiliary_kinds)):
        if name == "data":
            continue
        values = mx.nd.zeros(shape)
        if name.endswith("_moving_var"):
            values[:] = 1.0
        elif not name.endswith("_moving_mean"):
            draw(mx.init.InitDesc(name), values)
        parameters[name].shape, parameters[name].dtype = shape, kind
        parameters[name].initialize(mx.init.Zero(), ctx=process.contexts)
        parameters[name].set_data(values.astype(kind))
    mx.nd.waitall()


def _trainer(network: mx.gluon.SymbolBlock, config: Config) -> mx.gluon.Trainer:
    options: Dict[str, Any] = {"learning_rate": config.learning_rate, "momentum": config.momentum}
    if config.precision == "fp16":
        options["multi_precision"] = True
    parameters = network.collect_params()
    if config.way == "horovod":
        from benchmarks.common.frameworks.mxnet import hvd

        return hvd.DistributedTrainer(parameters, "sgd", options)
    return mx.gluon.Trainer(parameters, "sgd", options, kvstore=config.way)


def synthetic(config: Config, process: ProcessInfo) -> Batch:
    """Return the synthetic batch: the global batch is the same for any number of devices."""
    mx.random.seed(config.seed + 1)
    joint = config.batch_size * config.ranks
    images = mx.nd.random.uniform(-1.0, 1.0, shape=(joint, 3, config.image, config.image), ctx=mx.cpu())
    labels = mx.nd.random.randint(0, config.classes, shape=(joint,), ctx=mx.cpu()).astype("float32")
    return split_batch(config, process, images, labels)


def split_batch(config: Config, process: ProcessInfo, images: mx.nd.NDArray, labels: mx.nd.NDArray) -> Batch:
    """Return a global batch's parts for the devices of this process."""
    parts = []
    for number, context in enumerate(process.contexts, process.rank):
        part = slice(number * config.batch_size, (number + 1) * config.batch_size)
        parts.append(
            (images[part].astype(_KINDS[config.precision]).as_in_context(context), labels[part].as_in_context(context))
        )
    mx.nd.waitall()
    return parts


def forward_backward(training: Training, batch: Batch) -> List[mx.nd.NDArray]:
    """Forward and backward propagation on every device of this process; return the losses, not waited for."""
    with autograd.record():
        losses = [training.loss(training.network(images), labels) for images, labels in batch]
    autograd.backward(losses)
    return losses


def weight_update(training: Training) -> None:
    """Let the gradients of all devices meet, and update the weights; not waited for."""
    config = training.config
    # Horovod's trainer also divides by the number of processes.
    training.trainer.step(config.batch_size * len(training.process.contexts))


def metric(training: Training, batch: Batch) -> float:
    """Forward pass and accuracy; synchronizes."""
    right = [
        (training.network(images).argmax(axis=1).astype("float32") == labels).mean().asscalar()
        for images, labels in batch
    ]
    return float(sum(right)) / len(right)


def batches(config: Config, process: ProcessInfo) -> Callable[[], Batch]:
    """Return a function for the next batch of this process's devices."""
    if not config.records:
        batch = synthetic(config, process)
        return lambda: batch
    if not Path(config.records).is_file():
        raise Problem(f"no file {config.records}", "a RecordIO file with images", "encore data prepare resnet")
    shape = (3, config.image, config.image)
    parts = {"num_parts": process.processes, "part_index": process.rank}
    count = config.batch_size * len(process.contexts)
    # 58.4: the mean spread of ImageNet's channels; the study needs no more than plausible numbers.
    scaling = {"mean_r": 123.7, "mean_g": 116.8, "mean_b": 103.9, "scale": 1 / 58.4}
    source = mx.io.ImageRecordIter(
        path_imgrec=config.records, data_shape=shape, batch_size=count, shuffle=True, resize=config.image,
        rand_crop=True, rand_mirror=True, seed=config.seed, **scaling, **parts,
    )  # fmt: skip
    first_rank = process._replace(rank=0)

    def following() -> Batch:
        try:
            batch = source.next()
        except StopIteration:
            source.reset()
            batch = source.next()
        return split_batch(config, first_rank, batch.data[0], batch.label[0] % config.classes)

    return following
