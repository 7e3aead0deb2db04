"""Train ResNet with TensorFlow: DALI input, Horovod, MLPerf log.

    $ python -m benchmarks.resnet.tensorflow.train --config config.json --data DATA --output OUT
    $ horovodrun -np 8 python -m benchmarks.resnet.tensorflow.train --config config.json --data DATA --output OUT

Writes result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/ to OUT, and resumes from a checkpoint
there. Exit code 0: finished as configured, see the last record of metrics.jsonl; otherwise: failed.
"""

from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run import stopping
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.resnet import mlperf, schedule
from benchmarks.resnet.inputs import Batches, EvaluationInput, opened
from benchmarks.resnet.tensorflow import data, model, optimizer
from benchmarks.resnet.tensorflow.config import Config

import tensorflow as tf  # isort: skip  # after frameworks.tensorflow, which settles what it prints and takes

OnePass = Callable[[tf.Tensor, tf.Tensor], Tuple[tf.Tensor, List[tf.Tensor]]]  # loss and gradients of images and labels


class Training:
    """Training state, with the training functions as TensorFlow functions, compiled by XLA if configured."""

    def __init__(self, network: model.Network, optimizer: optimizer.Optimizer, config: Config) -> None:
        self.network, self.optimizer, self.config = network, optimizer, config
        self._functions: Dict[Callable[..., Any], Any] = {}
        # One step of the optimizer, from gradients and the learning rate.
        self.update = tf.function(optimizer.step, autograph=False, jit_compile=config.compiles)

    def compiled(self, function: Callable[..., Any], *tensors: tf.Tensor) -> Any:
        """``function(self, *tensors)`` as a graph, traced at the first call."""
        if function not in self._functions:
            # Without AutoGraph, which has nothing to convert and doubled the time of tracing
            self._functions[function] = tf.function(
                partial(function, self), autograph=False, jit_compile=self.config.compiles
            )
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


def train_step(training: Training, images: tf.Tensor, labels: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
    """Forward, backward, all-reduce and update, traced as one graph; return this rank's mean loss."""
    config = training.config
    loss, gradients = training.compiled(forward_backward, images, labels)
    gradients = tensorflow.average(gradients, config.gradient_groups)
    training.update(gradients, rate)
    return training.optimizer.reported(loss)


def forward_backward(training: Training, images: tf.Tensor, labels: tf.Tensor) -> Tuple[tf.Tensor, List[tf.Tensor]]:
    """Return a batch's mean loss and the gradients of loss_scale * loss, over config.accumulation_steps passes."""
    network, config = training.network, training.config
    passes, variables = config.accumulation_steps, list(network.trained.values())

    def one_pass(part: tf.Tensor, targets: tf.Tensor) -> Tuple[tf.Tensor, List[tf.Tensor]]:
        with tf.GradientTape() as tape:
            logits = network(part, training=True)
            loss = tf.reduce_mean(model.smoothed_loss(logits, targets, config.label_smoothing)) / passes
            scaled = loss * config.loss_scale
        return loss, tape.gradient(scaled, variables)

    return one_pass(images, labels) if passes == 1 else accumulated(one_pass, passes, images, labels, variables)


def accumulated(
    one_pass: OnePass, passes: int, images: tf.Tensor, labels: tf.Tensor, variables: Sequence[tf.Variable]
) -> Tuple[tf.Tensor, List[tf.Tensor]]:
    """Return the sums of loss and gradients of ``one_pass`` over micro-batches, in sequence."""
    parts = [tf.reshape(tensor, (passes, -1, *tensor.shape[1:])) for tensor in (images, labels)]

    def add_pass(number: tf.Tensor, losses: tf.Tensor, sums: List[tf.Tensor]) -> Tuple[Any, ...]:
        loss, gradients = one_pass(parts[0][number], parts[1][number])
        return number + 1, losses + loss, [total + gradient for total, gradient in zip(sums, gradients)]

    # A loop in the graph: without an order, the activations of all passes may be in memory at the same time.
    start = (0, 0.0, [tf.zeros_like(variable) for variable in variables])
    _, losses, sums = tf.while_loop(lambda number, *_: number < passes, add_pass, start, parallel_iterations=1)
    return losses, sums


def evaluate(training: Training, evaluation: EvaluationInput, run: Run) -> Optional[Dict[str, float]]:
    """Top-1 accuracy over all validation images of all ranks, or None if the run is to stop."""
    tensorflow.average_variables(training.network.statistics, "statistics")
    correct = tf.zeros(())
    total = 0
    for images, labels, valid in run.interruptible(evaluation.one_pass()):
        correct += training.compiled(count_hits, images, labels, tf.constant(valid))
        total += valid
    if run.interrupted:
        return None
    (hits,) = run.total([float(correct), total], evaluation.total)
    return {"accuracy": hits / evaluation.total}


def count_hits(training: Training, images: tf.Tensor, labels: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    predictions = tf.argmax(training.network(images, training=False), axis=1, output_type=tf.int32)
    counts = tf.range(tf.shape(labels)[0]) < valid
    return tf.reduce_sum(tf.cast((predictions == labels) & counts, tf.float32))


def warm_up(training: Training, step: Callable[..., Any]) -> None:
    """Trace, compile, select kernels and connect the ranks, on noise and before the clock (MLPerf since v0.6).

    All variables are restored.
    """
    config = training.config
    if config.warm_up_steps == 0:
        return
    variables = _variables(training).values()
    saved = [tf.identity(variable) for variable in variables]
    batch = data.synthetic_batch(config)
    for _ in range(config.warm_up_steps):
        step(*batch, tf.constant(0.0))
        stopping.progress()
    training.compiled(count_hits, *data.synthetic_batch(config, config.eval_batch_size), tf.constant(0))
    for variable, value in zip(variables, saved):
        variable.assign(value)


def state_dict(training: Training) -> Dict[str, Any]:
    return {name: variable.numpy() for name, variable in _variables(training).items()}


def rank_state_dict(training: Training, batches: Batches) -> Dict[str, Any]:
    """Return the input state of this rank. Statistics differ between ranks, but only their mean is used, which is
    saved.
    """
    tensorflow.average_variables(training.network.statistics, "statistics")
    return {"input": batches.checkpoint()}


def _variables(training: Training) -> Dict[str, tf.Variable]:
    kinds = {"weights": training.network.variables, "momenta": training.optimizer.momenta}
    return {
        f"{kind}/{name}": variable
        for kind, named_variables in kinds.items()
        for name, variable in named_variables.items()
    }


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, tensorflow, __doc__, argv, mlperf.WORDING)
    config, saved = run.config, run.saved
    with run.initialization():
        run.log(mlperf.initialization(config))
        training = build(config, saved)
        step_graph = tf.function(partial(train_step, training), autograph=False)
        warm_up(training, step_graph)
    with opened(run, data, saved) as (batches, evaluation, steps):
        run.register_state(partial(state_dict, training), partial(rank_state_dict, training, batches))
        for _ in run.blocks():
            for step in run.steps():
                rate = schedule.learning_rate(config, step, steps)
                run.report(step_graph(*run.wait_for(batches.next), tf.constant(rate, tf.float32)), rate)
            if run.evaluates():
                run.evaluated(evaluate(training, evaluation, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
