"""What a step works on: built, compiled, and carried through checkpoints and model files."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Sequence, Tuple, Union

import numpy as np
import tensorflow as tf

from benchmarks.common import stopping
from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import tensorflow
from benchmarks.common.ranks import Ranks
from benchmarks.minigo import frozen, models
from benchmarks.minigo.schedule import Roles
from benchmarks.minigo.tensorflow import model
from benchmarks.minigo.tensorflow.checkpoint import read_start
from benchmarks.minigo.tensorflow.config import Config
from benchmarks.minigo.tensorflow.frozen import FrozenNetwork
from benchmarks.minigo.tensorflow.frozen import build as build_frozen

import horovod.tensorflow as hvd  # isort: skip  # after frameworks.tensorflow, which settles the order of imports

Array = Any
# Read as Horovod starts: the ranks that train average among themselves.
os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")


class Training:
    """All that a step works on; ``update`` is a function of TensorFlow, compiled by XLA if so configured."""

    def __init__(self, network: model.Network, config: Config, ranks: Ranks) -> None:
        self.network, self.config = network, config
        self.roles = Roles.of(config, ranks.size)
        self.trains = ranks.rank in self.roles.training
        self.plays = ranks.rank in self.roles.selfplay
        self.momenta = {name: tf.Variable(tf.zeros_like(each)) for name, each in network.trained.items()}
        self.steps = 0
        """Steps that are done, over all generations."""
        every = len(self.roles.training) == ranks.size
        self._group = None if every else tensorflow.process_set(list(self.roles.training))
        self._functions: Dict[Callable[..., Any], Any] = {}
        self.update = tf.function(self._update, jit_compile=config.compiles)

    def compiled(self, function: Callable[..., Any], *tensors: tf.Tensor) -> Any:
        """``function(self, *tensors)`` as a graph, traced at the first call."""
        if function not in self._functions:
            self._functions[function] = tf.function(partial(function, self), jit_compile=self.config.compiles)
        return self._functions[function](*tensors)

    def average(self, gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Return the mean of each gradient over the ranks that train."""
        if self._group is None:
            return tensorflow.average(gradients, self.config.gradient_compression, 0)
        compression = getattr(hvd.Compression, self.config.gradient_compression)
        options = {"op": hvd.Average, "compression": compression, "process_set": self._group}
        return [hvd.allreduce(g, name=f"gradient.{n}", **options) for n, g in enumerate(gradients)]

    def _update(self, gradients: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        """v <- momentum v + g, w <- w - rate v: tf.train.MomentumOptimizer of the submissions."""
        for (name, variable), gradient in zip(self.network.trained.items(), gradients):
            tf.raw_ops.ResourceApplyMomentum(
                var=variable.handle,
                accum=self.momenta[name].handle,
                lr=rate,
                grad=gradient / self.config.loss_scale,
                momentum=self.config.momentum,
            )

    def share(self) -> None:
        """Give all ranks the network that the training ranks have; batch-norm's statistics are those of rank 0."""
        tensorflow.broadcast(list(self.network.variables.values()))

    def content(self) -> Dict[str, Array]:
        """Return weights, momenta and the count of steps."""
        weights = {f"weights/{name}": each.numpy() for name, each in self.network.variables.items()}
        momenta = {f"momenta/{name}": each.numpy() for name, each in self.momenta.items()}
        return {**weights, **momenta, "steps": np.array(float(self.steps))}

    def begin(self, start: models.Start) -> None:
        """Take over momenta and count of steps, as tf.train.Saver restores a checkpoint whole in the submissions."""
        for name, value in start.momenta.items():
            self.momenta[name].assign(value)
        self.steps = start.steps

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Take over what ``content`` returned."""
        for name, variable in self.network.variables.items():
            variable.assign(saved[f"weights/{name}"])
        for name, variable in self.momenta.items():
            variable.assign(saved[f"momenta/{name}"])
        self.steps = int(saved["steps"])

    def save_model(self, path: Path) -> None:
        """Write the network as a model file."""
        arrays = {name: variable.numpy() for name, variable in self.network.variables.items()}
        momenta = {f"{models.MOMENTA}{name}": variable.numpy() for name, variable in self.momenta.items()}
        models.save(path, self.network.shape, {**arrays, **momenta, models.STEPS: np.array(self.steps)})


def build(config: Config, ranks: Ranks, saved: Mapping[str, Array], data: Path = Path()) -> Training:
    """Build with what a checkpoint ``saved``, else with the initial weights, else with drawn ones, as on every rank.

    Initial weights without a folder are in the one of the ``data``.
    """
    shape = models.Shape.of(config)
    start = models.Start(shape, models.initial_weights(shape, config.seed), {}, 0)
    if config.initial_weights:
        path = data / config.initial_weights
        start = read_start(config, path)
        _check_planes(path, start.shape, config)
    training = Training(model.build(config, start.shape, start.arrays), config, ranks)
    training.begin(start)
    if saved:
        training.restore(saved)
    return training


class Evaluator:
    """A network as the engine asks it, in passes of one size: XLA compiles, and cuDNN chooses, for one only."""

    def __init__(self, network: Union[model.Network, FrozenNetwork], batch: int) -> None:
        size, planes = network.shape.board_size, models.PLANES[network.shape.features]
        self._filled = np.zeros((batch, size, size, planes), np.uint8)
        self._pass = tf.function(partial(_evaluate, network), jit_compile=network.config.compiles)

    def __call__(self, planes: Array) -> Tuple[Array, Array]:
        """Return policies (batch, moves) and values (batch,) of planes (batch, N, N, planes), at most one pass."""
        count = len(planes)
        if count == 0:
            return np.zeros((0, self._filled.shape[1] ** 2 + 1), np.float32), np.zeros(0, np.float32)
        if count < len(self._filled):
            self._filled[:count] = planes
            planes = self._filled
        policy, value = self._pass(tf.constant(planes))
        return policy.numpy()[:count], value.numpy()[:count]


def _evaluate(network: Union[model.Network, FrozenNetwork], planes: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
    logits, value = network(planes, training=False)
    return tf.nn.softmax(logits), value


def load_evaluator(path: Path, config: Config) -> Evaluator:
    """Return the evaluator of a model file, or of a frozen graph that a data set keeps.

    Raises:
        Problem: it is none, is for another board, or sees other planes than the games here fill.
    """
    network: Union[model.Network, FrozenNetwork]
    if frozen.holds_graph(path):
        network = build_frozen(config, *frozen.load(path, config.board_size))
    else:
        network = model.build(config, *models.load(path, config.board_size))
    _check_planes(path, network.shape, config)
    return Evaluator(network, config.inference_batch)


def _check_planes(path: Path, shape: Union[models.Shape, frozen.About], config: Config) -> None:
    if shape.features != config.features:
        found, remedy = f"{path} sees the planes of {shape.features}", "name another model, or set features"
        raise Problem(found, f"those of {config.features}", remedy)


def warm_up(training: Training, step: Callable[..., Any]) -> None:
    """Trace, compile, choose kernels and connect the ranks, on noise and before the clock (MLPerf since v0.6).

    All variables are put back to what they were.
    """
    config = training.config
    if config.warm_up_steps == 0 or not training.trains:
        return
    variables = [*training.network.variables.values(), *training.momenta.values()]
    kept = [tf.identity(variable) for variable in variables]
    batch = synthetic_batch(config)
    for _ in range(config.warm_up_steps):
        step(*batch, tf.constant(0.0))
        stopping.progress()
    for variable, value in zip(variables, kept):
        variable.assign(value)


def synthetic_batch(config: Config) -> Tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return one batch of noise, of the types of the real one."""
    generator, size = np.random.RandomState(config.seed % 2**32), config.board_size
    planes = generator.randint(0, 2, (config.batch_size, size, size, models.PLANES[config.features]))
    policy = generator.dirichlet(np.ones(size**2 + 1), config.batch_size)
    value = generator.choice([-1.0, 1.0], config.batch_size)
    return tf.constant(planes, tf.uint8), tf.constant(policy, tf.float32), tf.constant(value, tf.float32)
