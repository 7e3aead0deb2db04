"""What a step works on: built, compiled, and carried through checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, Mapping

import tensorflow as tf

from benchmarks.common.frameworks import tensorflow
from benchmarks.resnet.inputs import TrainingInput
from benchmarks.resnet.tensorflow import model, optimizer
from benchmarks.resnet.tensorflow.config import Config


class Training:
    """All that a step works on, and its parts as functions of TensorFlow, compiled by XLA if so configured."""

    def __init__(self, network: model.Network, optimizer: optimizer.Optimizer, config: Config) -> None:
        self.network, self.optimizer, self.config = network, optimizer, config
        self._functions: Dict[Callable[..., Any], Any] = {}
        self.update = tf.function(optimizer.step, jit_compile=config.xla)
        """One step of the optimizer, from gradients and the learning rate."""

    def compiled(self, function: Callable[..., Any], *tensors: tf.Tensor) -> Any:
        """``function(self, *tensors)`` as a graph, traced at the first call."""
        if function not in self._functions:
            self._functions[function] = tf.function(partial(function, self), jit_compile=self.config.xla)
        return self._functions[function](*tensors)


def build(config: Config, saved: Mapping[str, Any]) -> Training:
    """Build with the weights and momenta of ``saved``, or with rank 0's fresh weights on all ranks if it is empty."""
    network = model.build(config)
    training = Training(network, optimizer.build(network.trained, config), config)
    if saved:
        for name, variable in _variables(training).items():
            variable.assign(saved[name])
    else:
        tensorflow.broadcast(list(network.variables.values()))
    return training


def _variables(training: Training) -> Dict[str, tf.Variable]:
    kinds = {"weights": training.network.variables, "momenta": training.optimizer.momenta}
    return {f"{kind}/{name}": variable for kind, named in kinds.items() for name, variable in named.items()}


def content(training: Training) -> Dict[str, Any]:
    """Weights and momenta for a checkpoint."""
    return {name: variable.numpy() for name, variable in _variables(training).items()}


def own_content(training: Training, batches: TrainingInput) -> Dict[str, Any]:
    """State of this rank's input. Each rank has statistics of its own; only their mean is ever used: take that."""
    tensorflow.average_variables(training.network.statistics, "statistics")
    return {"input": batches.checkpoint()}
