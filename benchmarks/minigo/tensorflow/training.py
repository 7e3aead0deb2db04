"""State of Minigo's training in TensorFlow: the network on this rank, optimizer and rank roles."""

import os
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import numpy as np

from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run.ranks import Ranks
from benchmarks.minigo import models
from benchmarks.minigo.schedule import Roles
from benchmarks.minigo.tensorflow import model
from benchmarks.minigo.tensorflow.config import Config

import horovod.tensorflow as hvd  # isort: skip
import tensorflow as tf  # isort: skip  # after frameworks.tensorflow, which settles what it prints and takes

Array = Any
# Read when Horovod starts: the training ranks have a separate process set
os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")


class Training:
    """All that a step works on; ``update`` is a function of TensorFlow, compiled by XLA if so configured."""

    def __init__(self, network: model.Network, config: Config, ranks: Ranks) -> None:
        self.network, self.config = network, config
        self.roles = Roles.of(config, ranks.size)
        self.trains = ranks.rank in self.roles.training
        self.plays = ranks.rank in self.roles.selfplay
        self.momenta = {name: tf.Variable(tf.zeros_like(variable)) for name, variable in network.trained.items()}
        self.steps = 0  # Steps that are done, over all generations
        all_train = len(self.roles.training) == ranks.size
        self._group = None if all_train else tensorflow.process_set(list(self.roles.training))
        self.update, self.gradients, self.predict = (
            tf.function(partial(function, self), autograph=False, jit_compile=config.compiles)
            for function in (update, forward_backward, predict)
        )

    def average(self, gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Return the gradients averaged over the training ranks."""
        if self._group is None:
            return tensorflow.average(gradients, 0)
        options = {"op": hvd.Average, "process_set": self._group}
        return [hvd.allreduce(g, name=f"gradient.{n}", **options) for n, g in enumerate(gradients)]

    def share(self) -> None:
        """Broadcast the network of the training ranks to all ranks, with batch-norm statistics of rank 0."""
        tensorflow.broadcast(list(self.network.variables.values()))

    def state_dict(self) -> Dict[str, Array]:
        weights = {f"weights/{name}": value for name, value in self.network.values().items()}
        momenta = {f"momenta/{name}": value.numpy() for name, value in self.momenta.items()}
        return {**weights, **momenta, "steps": np.array(float(self.steps))}

    def restore(self, saved: Mapping[str, Array]) -> None:
        self.network.assign({name: saved[f"weights/{name}"] for name in self.network.variables})
        for name, variable in self.momenta.items():
            variable.assign(saved[f"momenta/{name}"])
        self.steps = int(saved["steps"])

    def save_model(self, path: Path) -> None:
        momenta = {f"{models.MOMENTA}{name}": variable.numpy() for name, variable in self.momenta.items()}
        models.save(path, self.network.shape, {**self.network.values(), **momenta, models.STEPS: np.array(self.steps)})


def forward_backward(
    training: Training, planes: tf.Tensor, policy: tf.Tensor, value: tf.Tensor
) -> Tuple[Tuple[tf.Tensor, ...], List[tf.Tensor]]:
    """Return policy, value and L2 losses for a batch, and the gradients of the weighted sum times loss_scale."""
    config, network = training.config, training.network
    with tf.GradientTape() as tape:
        losses = model.losses(network, planes, policy, value)
        weighted = losses[0] + config.value_cost_weight * losses[1] + config.l2_strength * losses[2]
        scaled = weighted * config.loss_scale
    return losses, tape.gradient(scaled, list(network.trained.values()))


def update(training: Training, gradients: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
    """v <- momentum v + g, w <- w - rate v: tf.train.MomentumOptimizer of the submissions."""
    for (name, variable), gradient in zip(training.network.trained.items(), gradients):
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=training.momenta[name].handle,
            lr=rate,
            grad=gradient / training.config.loss_scale,
            momentum=training.config.momentum,
        )


def predict(training: Training, planes: tf.Tensor) -> tf.Tensor:
    return tf.argmax(training.network(planes, training=False)[0], axis=1)
