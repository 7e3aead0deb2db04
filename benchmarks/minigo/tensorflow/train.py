"""Train Minigo with TensorFlow: all ranks are in one Horovod job, with roles by rank number.

    $ python -m benchmarks.minigo.tensorflow.train --config config.json --data DATA --output OUT
    $ horovodrun -np 8 python -m benchmarks.minigo.tensorflow.train --config config.json --data DATA --output OUT

Writes result.txt (MLPerf log), metrics.jsonl, heartbeat/, checkpoint/, and games/, models/ and generations.jsonl to
OUT, and resumes from a checkpoint and existing games there. Exit code 0: finished as configured, see the last record
of metrics.jsonl; otherwise: failed.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run import stopping
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.minigo import mlperf, models, schedule
from benchmarks.minigo.examples import GoGames
from benchmarks.minigo.schedule import Roles
from benchmarks.minigo.tensorflow import data, model
from benchmarks.minigo.tensorflow.config import Config
from benchmarks.minigo.tensorflow.generations import Generations, open_target
from benchmarks.minigo.tensorflow.networks import check_planes, read_start

import horovod.tensorflow as hvd  # isort: skip
import tensorflow as tf  # isort: skip  # after frameworks.tensorflow, which settles what it prints and takes

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
        self.momenta = {name: tf.Variable(tf.zeros_like(variable)) for name, variable in network.trained.items()}
        self.steps = 0  # Steps that are done, over all generations
        all_train = len(self.roles.training) == ranks.size
        self._group = None if all_train else tensorflow.process_set(list(self.roles.training))
        self.update, self.gradients, self.predict = (
            tf.function(partial(function, self), jit_compile=config.compiles)
            for function in (update, forward_backward, predict)
        )

    def average(self, gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Return the gradients averaged over the training ranks."""
        if self._group is None:
            return tensorflow.average(gradients, self.config.gradient_compression, 0)
        compression = getattr(hvd.Compression, self.config.gradient_compression)
        options = {"op": hvd.Average, "compression": compression, "process_set": self._group}
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


def build(config: Config, ranks: Ranks, saved: Mapping[str, Array], folder: Path = Path()) -> Training:
    """Build with the checkpoint ``saved``, or with the configured or random initial weights, equal on all ranks.

    Initial weights without a directory are in ``folder``, the data set.
    """
    shape = models.Shape.of(config)
    start = models.Start(shape, models.initial_weights(shape, config.seed), {}, 0)
    if config.initial_weights:
        path = folder / config.initial_weights
        start = read_start(config, path)
        check_planes(path, start.shape, config)
    training = Training(model.build(config, start.shape, start.arrays), config, ranks)
    # Restore momenta and steps, too, as tf.train.Saver in the submissions.
    for name, value in start.momenta.items():
        training.momenta[name].assign(value)
    training.steps = start.steps
    if saved:
        training.restore(saved)
    return training


def train_step(
    training: Training, planes: tf.Tensor, policy: tf.Tensor, value: tf.Tensor, rate: tf.Tensor
) -> Tuple[tf.Tensor, ...]:
    """Forward, backward, all-reduce over the training ranks and update, traced as one graph; return the losses."""
    losses, gradients = training.gradients(planes, policy, value)
    training.update(training.average(gradients), rate)
    return losses


def forward_backward(
    training: Training, planes: tf.Tensor, policy: tf.Tensor, value: tf.Tensor
) -> Tuple[Tuple[tf.Tensor, ...], List[tf.Tensor]]:
    """Return policy, value and L2 losses of a batch, and the gradients of the weighted sum times loss_scale."""
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


def evaluate(training: Training, games: GoGames, run: Run) -> Optional[Dict[str, float]]:
    """Return the fraction of held-out professional moves that are predicted (v0.5); None if the run is to stop."""
    batches, total = data.held_out(run.config, games, run.ranks)
    hits = total_counted = 0
    for planes, moves, valid in run.interruptible(batches):
        hits += int((training.predict(planes).numpy() == moves)[:valid].sum())
        total_counted += valid
    return None if run.interrupted else {"win_rate": run.total([float(hits), float(total_counted)], total)[0] / total}


def predict(training: Training, planes: tf.Tensor) -> tf.Tensor:
    return tf.argmax(training.network(planes, training=False)[0], axis=1)


def warm_up(training: Training, step: Callable[..., Any]) -> None:
    """Trace, compile, select kernels and connect the ranks, on synthetic data and before the clock (MLPerf since v0.6).

    All variables are restored.
    """
    config = training.config
    if config.warm_up_steps == 0 or not training.trains:
        return
    variables = [*training.network.variables.values(), *training.momenta.values()]
    saved = [tf.identity(variable) for variable in variables]
    batch = data.synthetic_batch(config)
    for _ in range(config.warm_up_steps):
        step(*batch, tf.constant(0.0))
        stopping.progress()
    for variable, value in zip(variables, saved):
        variable.assign(value)


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, tensorflow, __doc__, argv, mlperf.WORDING)
    config, ranks, within = run.config, run.ranks, run.config.round == "v0.5"
    with run.initialization():
        training = run.open(lambda: build(config, ranks, run.saved, run.data))
        games: Any = run.open(lambda: GoGames(run.data, config.board_size))
        target: Any = None if within else run.open(lambda: open_target(run.data, config))
        step_graph = tf.function(partial(train_step, training))
        warm_up(training, step_graph)
    run.log(mlperf.hyperparameters(config, ranks.size))
    with run.timed(schedule.timeline(config, ranks.size)):
        generations = Generations(training, step_graph, run)
        run.register_state(lambda: generations.state)
        generations.begin()
        for _ in run.blocks():
            for done in run.steps():
                result_of_generation = generations.generation(done + 1)
                if result_of_generation is None:
                    break
                run.report(*result_of_generation)
            if run.evaluates():
                run.evaluated(evaluate(training, games, run))
        for number, result in () if within else generations.evaluate_saved(target):
            if run.evaluated_after_clock(number, result):
                break
    return run.finish()


if __name__ == "__main__":
    end_process(main)
