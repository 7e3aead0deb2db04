"""What a step works on: built, and carried through checkpoints."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple

import mxnet as mx

from benchmarks.common.frameworks import mxnet
from benchmarks.common.frameworks.mxnet import hvd
from benchmarks.common.ranks import Ranks
from benchmarks.resnet.mxnet import model, optimizer
from benchmarks.resnet.mxnet.config import Config


class Training(NamedTuple):
    """All that a step works on."""

    network: mx.gluon.HybridBlock
    loss: mx.gluon.HybridBlock
    trainer: hvd.DistributedTrainer
    loss_scale: mx.nd.NDArray
    """(batch_size,): head gradient of the losses."""
    config: Config


def build(config: Config, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    """Build with the weights and momenta of ``saved``, or with rank 0's fresh weights on all ranks if it is empty."""
    network = model.build(config)
    model.initialize(network, config, ranks.context)
    loss = model.SmoothedLoss(config.label_smoothing)
    loss.hybridize(static_alloc=True, static_shape=True)
    parameters = network.collect_params()
    trainer = optimizer.build_trainer(parameters, config)
    if saved:
        for name, parameter in parameters.items():
            parameter.set_data(mx.nd.array(saved[f"weights/{name}"], dtype=parameter.dtype))
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(saved["trainer"])
            trainer.load_states(file.name)
    else:
        mxnet.broadcast(parameters)
    loss_scale = mx.nd.full((config.batch_size,), config.loss_scale, ctx=ranks.context)
    return Training(network, loss, trainer, loss_scale, config)


def content(training: Training) -> Dict[str, Any]:
    """Weights and momenta for a checkpoint."""
    parameters = training.network.collect_params()
    with tempfile.NamedTemporaryFile() as file:
        training.trainer.save_states(file.name)
        states = Path(file.name).read_bytes()
    return {**{f"weights/{name}": p.data().asnumpy() for name, p in parameters.items()}, "trainer": states}
