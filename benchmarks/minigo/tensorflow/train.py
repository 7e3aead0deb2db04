"""Train Minigo with TensorFlow: all ranks are in one Horovod job, with roles by rank number.

    $ python -m benchmarks.minigo.tensorflow.train --config config.json --data DATA --output OUT
    $ horovodrun -np 8 python -m benchmarks.minigo.tensorflow.train --config config.json --data DATA --output OUT

Writes result.txt (MLPerf log), metrics.jsonl, heartbeat/, checkpoint/, and games/, models/ and generations.jsonl to
OUT, and resumes from a checkpoint and existing games there. Exit code 0: finished as configured, see the last record
of metrics.jsonl; otherwise: failed.
"""

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run import stopping
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.minigo import mlperf, models, schedule
from benchmarks.minigo.examples import GoGames
from benchmarks.minigo.tensorflow import data, model
from benchmarks.minigo.tensorflow.config import Config
from benchmarks.minigo.tensorflow.generations import Generations, open_target
from benchmarks.minigo.tensorflow.networks import check_planes, read_start
from benchmarks.minigo.tensorflow.training import Training

import tensorflow as tf  # isort: skip  # after frameworks.tensorflow, which settles what it prints and takes

Array = Any


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


def evaluate(training: Training, games: GoGames, run: Run) -> Optional[Dict[str, float]]:
    """Return the fraction of held-out professional moves that are predicted (v0.5); None if the run is to stop."""
    batches, total = data.held_out(run.config, games, run.ranks)
    hits = total_counted = 0
    for planes, moves, valid in run.interruptible(batches):
        hits += int((training.predict(planes).numpy() == moves)[:valid].sum())
        total_counted += valid
    return None if run.interrupted else {"win_rate": run.total([float(hits), float(total_counted)], total)[0] / total}


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
    config, ranks, is_timed = run.config, run.ranks, run.config.round == "v0.5"
    with run.initialization():
        training = run.open(lambda: build(config, ranks, run.saved, run.data))
        games: Any = run.open(lambda: GoGames(run.data, config.board_size))
        target: Any = None if is_timed else run.open(lambda: open_target(run.data, config))
        step_graph = tf.function(partial(train_step, training), autograph=False)
        warm_up(training, step_graph)
    run.log(mlperf.hyperparameters(config, ranks.size))
    with run.timed(schedule.timeline(config, ranks.size)):
        generations = Generations(training, step_graph, run)
        run.register_state(lambda: generations.state)
        generations.begin()
        for _ in run.blocks():
            for done in run.steps():
                report = generations.generation(done + 1)
                if report is None:
                    break
                run.report(*report)
            if run.evaluates():
                run.evaluated(evaluate(training, games, run))
        for number, result in () if is_timed else generations.evaluate_saved(target):
            if run.evaluated_after_clock(number, result):
                break
    return run.finish()


if __name__ == "__main__":
    end_process(main)
