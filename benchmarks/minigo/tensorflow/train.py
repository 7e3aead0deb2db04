"""Train Minigo in TensorFlow: all ranks in one Horovod job, each with the roles that its number gives it.

    $ python -m benchmarks.minigo.tensorflow.train --config config.json --data DATA --output OUT
    $ horovodrun -np 8 python -m benchmarks.minigo.tensorflow.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/, checkpoint/, and games/, models/ and generations.jsonl of
the generations; a run that finds a checkpoint there resumes from it, with the games that are there. Exit code 0:
ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, List, Optional, Tuple

from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run import Run
from benchmarks.common.stopping import end_process
from benchmarks.minigo import events
from benchmarks.minigo.data_set import GoGames
from benchmarks.minigo.tensorflow import data, model
from benchmarks.minigo.tensorflow.config import Config
from benchmarks.minigo.tensorflow.generations import Generations, open_target
from benchmarks.minigo.tensorflow.training import Training, build, warm_up

import tensorflow as tf  # isort: skip  # after frameworks.tensorflow, which settles what it prints


def forward_backward(
    training: Training, planes: tf.Tensor, policy: tf.Tensor, value: tf.Tensor
) -> Tuple[Tuple[tf.Tensor, ...], List[tf.Tensor]]:
    """Policy, value and L2 losses of a batch, and the gradients of loss_scale times their weighted sum."""
    config, network = training.config, training.network
    with tf.GradientTape() as tape:
        found = model.losses(network, planes, policy, value)
        weighted = found[0] + config.value_cost_weight * found[1] + config.l2_strength * found[2]
        scaled = weighted * config.loss_scale
    return found, tape.gradient(scaled, list(network.trained.values()))


def train_step(
    training: Training, planes: tf.Tensor, policy: tf.Tensor, value: tf.Tensor, rate: tf.Tensor
) -> Tuple[tf.Tensor, ...]:
    """Forward, backward, all-reduce over the training ranks and update, traced as one graph; return the losses."""
    found, gradients = training.compiled(forward_backward, planes, policy, value)
    training.update(training.average(gradients), rate)
    return found


def predict(training: Training, planes: tf.Tensor) -> tf.Tensor:
    """The move that the network finds best in each position."""
    return tf.argmax(training.network(planes, training=False)[0], axis=1)


def evaluate(training: Training, games: GoGames, run: Run) -> Optional[Dict[str, float]]:
    """Share of the held-out professional moves that the network finds best (v0.5); None if the run is to stop."""
    batches, total = data.held_out(run.config, games, run.ranks)
    hits = counted = 0
    for planes, moves, valid in run.watch(batches):
        hits += int((training.compiled(predict, planes).numpy() == moves)[:valid].sum())
        counted += valid
    return None if run.interrupted else {"win_rate": run.total([float(hits), float(counted)], total)[0] / total}


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, tensorflow, __doc__, argv, events.WORDING)
    config, ranks, within = run.config, run.ranks, run.config.round == "v0.5"
    with run.initialization():
        training = run.open(lambda: build(config, ranks, run.saved, run.data))
        games: Any = run.open(lambda: GoGames(run.data, config.board_size))
        target: Any = None if within else run.open(lambda: open_target(run.data, config))
        step_graph = tf.function(partial(train_step, training))
        warm_up(training, step_graph)
    run.log(events.hyperparameters(config, ranks.size))
    with run.timed(events.timeline(config, ranks.size)):
        generations = Generations(training, step_graph, run)
        run.keep(generations.content)
        generations.begin()
        for _ in run.blocks():
            for done in run.steps():
                found = generations.generation(done + 1)
                if found is None:
                    break
                run.report(*found)
            if run.evaluates():
                run.evaluated(evaluate(training, games, run))
        for number, result in () if within else generations.evaluate_saved(target):
            if run.evaluated_after_clock(number, result):
                break
    return run.finish()


if __name__ == "__main__":
    end_process(main)
