"""What a step works on: built, compiled, and carried through checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

import numpy as np
import tensorflow as tf

from benchmarks.common import stopping
from benchmarks.common.frameworks import tensorflow
from benchmarks.resnet.architecture import input_shape
from benchmarks.resnet.inputs import TrainingInput
from benchmarks.resnet.tensorflow import model, optimizer
from benchmarks.resnet.tensorflow.config import Config
from benchmarks.resnet.tensorflow.data import Batch

OnePass = Callable[[tf.Tensor, tf.Tensor], Tuple[tf.Tensor, List[tf.Tensor]]]
"""Loss and gradients of images and labels."""


class Training:
    """All that a step works on, and its parts as functions of TensorFlow, compiled by XLA if so configured."""

    def __init__(self, network: model.Network, optimizer: optimizer.Optimizer, config: Config) -> None:
        self.network, self.optimizer, self.config = network, optimizer, config
        self._functions: Dict[Callable[..., Any], Any] = {}
        self.update = tf.function(optimizer.step, jit_compile=config.compiles)
        """One step of the optimizer, from gradients and the learning rate."""

    def compiled(self, function: Callable[..., Any], *tensors: tf.Tensor) -> Any:
        """``function(self, *tensors)`` as a graph, traced at the first call."""
        if function not in self._functions:
            self._functions[function] = tf.function(partial(function, self), jit_compile=self.config.compiles)
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


def accumulated(
    one_pass: OnePass, passes: int, images: tf.Tensor, labels: tf.Tensor, variables: Sequence[tf.Variable]
) -> Tuple[tf.Tensor, List[tf.Tensor]]:
    """Sums of what ``one_pass`` finds in each part of a batch, loss and gradients, one part after the other."""
    parts = [tf.reshape(tensor, (passes, -1, *tensor.shape[1:])) for tensor in (images, labels)]

    def add_pass(number: tf.Tensor, losses: tf.Tensor, sums: List[tf.Tensor]) -> Tuple[Any, ...]:
        loss, gradients = one_pass(parts[0][number], parts[1][number])
        return number + 1, losses + loss, [total + gradient for total, gradient in zip(sums, gradients)]

    # A loop of the graph: of passes without an order all activations may be in memory at once.
    start = (0, 0.0, [tf.zeros_like(variable) for variable in variables])
    _, losses, sums = tf.while_loop(lambda number, *_: number < passes, add_pass, start, parallel_iterations=1)
    return losses, sums


def synthetic_batch(config: Config, batch_size: int = 0) -> Batch:
    """One batch of noise on the device, of the types of the real one; default: of a training step."""
    generator, count = np.random.RandomState(config.seed % 2**32), batch_size or config.batch_size
    images = generator.random_sample((count, *input_shape(config)[1:]))
    labels = generator.randint(0, config.num_classes, count)
    return tf.constant(images, tf.float16 if config.precision == "fp16" else tf.float32), tf.constant(labels, tf.int32)


def warm_up(training: Training, step: Callable[..., Any], count_hits: Callable[..., Any]) -> None:
    """Trace, compile, choose kernels and connect the ranks, all on noise and before the clock (MLPerf since v0.6).

    All variables are put back to what they were.
    """
    config = training.config
    if config.warm_up_steps == 0:
        return
    variables = _variables(training).values()
    kept = [tf.identity(variable) for variable in variables]
    batch = synthetic_batch(config)
    for _ in range(config.warm_up_steps):
        step(*batch, tf.constant(0.0))
        stopping.progress()
    training.compiled(count_hits, *synthetic_batch(config, config.eval_batch_size), tf.constant(0))
    for variable, value in zip(variables, kept):
        variable.assign(value)


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
