"""What a step works on: built, warmed up, and carried through checkpoints."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple

import mxnet as mx

from benchmarks.common import stopping
from benchmarks.common.frameworks import mxnet
from benchmarks.common.frameworks.mxnet import hvd
from benchmarks.common.ranks import Ranks
from benchmarks.resnet.architecture import input_shape
from benchmarks.resnet.inputs import TrainingInput
from benchmarks.resnet.mxnet import model, optimizer
from benchmarks.resnet.mxnet.config import Config


class Training(NamedTuple):
    """All that a step works on."""

    network: mx.gluon.HybridBlock
    loss: mx.gluon.HybridBlock
    trainer: hvd.DistributedTrainer
    loss_scale: mx.nd.NDArray
    """(batch_size,): head gradient of the losses, which makes them config.loss_scale times their mean."""
    gammas: List[mx.nd.NDArray]
    """Of all batch-norms."""
    config: Config


def build(config: Config, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    """Build with the weights and momenta of ``saved``, or with rank 0's fresh weights on all ranks if it is empty."""
    missing = model.missing_operators(config)
    if missing and ranks.rank == 0:
        print(missing, flush=True)
    network = model.build(config)
    model.initialize(network, config, ranks.context)
    loss = model.SmoothedLoss(config.label_smoothing)
    loss.hybridize(static_alloc=True, static_shape=True)
    parameters = network.collect_params()
    trainer = optimizer.build_trainer(parameters, config)
    loss_scale = mx.nd.full((config.batch_size,), config.loss_scale / config.batch_size, ctx=ranks.context)
    gammas = [parameter.data() for name, parameter in parameters.items() if name.endswith("gamma")]
    training = Training(network, loss, trainer, loss_scale, gammas, config)
    if saved:
        _restore(training, saved)
    else:
        mxnet.broadcast(parameters)
    return training


def reported(training: Training, losses: mx.nd.NDArray) -> mx.nd.NDArray:
    """Return the mean of ``losses``, or NaN where the step has left a gamma that is not finite.

    MXNet's ReLU makes 0 of NaN: once a convolution's gradient overflows, the loss stays at the logarithm of the number
    of classes. But the batch-norm behind that convolution has a NaN as gradient of gamma.
    """
    squares = mx.nd.multi_sum_sq(*training.gammas, num_arrays=len(training.gammas))
    return losses.mean() + 0.0 * squares.sum()


def warm_up(training: Training, step: Callable[..., Any]) -> None:
    """Run config.warm_up_steps steps on zeros, and put back weights, statistics and momenta."""
    config, context = training.config, training.loss_scale.context
    if config.warm_up_steps == 0:
        return
    kept = content(training)
    images = mx.nd.zeros(input_shape(config), ctx=context, dtype="float16" if config.precision == "fp16" else "float32")
    labels = mx.nd.zeros((config.batch_size,), ctx=context)
    for _ in range(config.warm_up_steps):
        step(training, images, labels, config.learning_rate)
        stopping.progress()
    mx.nd.waitall()  # for own_content's reason
    _restore(training, kept)


def content(training: Training) -> Dict[str, Any]:
    """Weights and momenta for a checkpoint."""
    parameters = training.network.collect_params()
    with tempfile.NamedTemporaryFile() as file:
        training.trainer.save_states(file.name)
        states = Path(file.name).read_bytes()
    return {**{f"weights/{name}": p.data().asnumpy() for name, p in parameters.items()}, "trainer": states}


def _restore(training: Training, saved: Mapping[str, Any]) -> None:
    """Set what ``content`` and ``own_content`` returned."""
    for name, parameter in training.network.collect_params().items():
        value = saved.get(f"statistics/{name}", saved[f"weights/{name}"])
        parameter.set_data(mx.nd.array(value, dtype=parameter.dtype))
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(saved["trainer"])
        training.trainer.load_states(file.name)


def own_content(training: Training, batches: TrainingInput) -> Dict[str, Any]:
    """What a rank has for itself: the state of its input, and its own running statistics, with which it evaluates."""
    # MXNet does not know that a step still writes to them: reading waits for nothing.
    mx.nd.waitall()
    parameters = training.network.collect_params().items()
    statistics = {f"statistics/{name}": p.data().asnumpy() for name, p in parameters if p.grad_req == "null"}
    return {"input": batches.checkpoint(), **statistics}
