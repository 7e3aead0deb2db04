"""Train ResNet in TensorFlow: DALI in, Horovod across, MLPerf events out.

    $ python -m benchmarks.resnet.tensorflow.train --config config.json --data DATA --output OUT
    $ horovodrun -np 8 python -m benchmarks.resnet.tensorflow.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/; a run that finds a checkpoint there
resumes from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Dict, List, Optional, Tuple

from benchmarks.common.frameworks import tensorflow
from benchmarks.common.mllog import samples
from benchmarks.common.run import Run
from benchmarks.common.stopping import end_process
from benchmarks.resnet import events
from benchmarks.resnet.inputs import EvaluationInput, TrainingInput, count_records, steps_per_epoch
from benchmarks.resnet.schedule import learning_rate
from benchmarks.resnet.tensorflow import data, model
from benchmarks.resnet.tensorflow.config import Config
from benchmarks.resnet.tensorflow.training import Training, accumulated, build, content, own_content, warm_up

import tensorflow as tf  # isort: skip  # after frameworks.tensorflow, which settles what it prints


def forward_backward(training: Training, images: tf.Tensor, labels: tf.Tensor) -> Tuple[tf.Tensor, List[tf.Tensor]]:
    """Mean loss of a batch, and the gradients of loss_scale times it, in config.accumulation_steps passes."""
    network, config = training.network, training.config
    passes, variables = config.accumulation_steps, list(network.trained.values())

    def one_pass(part: tf.Tensor, targets: tf.Tensor) -> Tuple[tf.Tensor, List[tf.Tensor]]:
        with tf.GradientTape() as tape:
            logits = network(part, training=True)
            loss = tf.reduce_mean(model.smoothed_loss(logits, targets, config.label_smoothing)) / passes
            scaled = loss * config.loss_scale
        return loss, tape.gradient(scaled, variables)

    return one_pass(images, labels) if passes == 1 else accumulated(one_pass, passes, images, labels, variables)


def train_step(training: Training, images: tf.Tensor, labels: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
    """Forward, backward, all-reduce and update, traced as one graph; return this rank's mean loss."""
    config = training.config
    loss, gradients = training.compiled(forward_backward, images, labels)
    gradients = tensorflow.average(gradients, config.gradient_compression, config.gradient_groups)
    training.update(gradients, rate)
    return training.optimizer.reported(loss)


def count_hits(training: Training, images: tf.Tensor, labels: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """How many of the first ``valid`` images of a batch are classified correctly."""
    found = tf.argmax(training.network(images, training=False), axis=1, output_type=tf.int32)
    counts = tf.range(tf.shape(labels)[0]) < valid
    return tf.reduce_sum(tf.cast((found == labels) & counts, tf.float32))


def evaluate(training: Training, evaluation: EvaluationInput, run: Run) -> Optional[Dict[str, float]]:
    """Top-1 accuracy over all validation images of all ranks, or None if the run is to stop."""
    tensorflow.average_variables(training.network.statistics, "statistics")
    correct = tf.zeros(())
    counted = 0
    for images, labels, valid in run.watch(evaluation.one_pass()):
        correct += training.compiled(count_hits, images, labels, tf.constant(valid))
        counted += valid
    if run.interrupted:
        return None
    (hits,) = run.total([float(correct), counted], evaluation.total)
    return {"accuracy": hits / evaluation.total}


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, tensorflow, __doc__, argv, events.WORDING)
    config, ranks, saved = run.config, run.ranks, run.saved
    with run.initialization():
        run.log(events.initialization(config))
        training = build(config, saved)
        step_graph = tf.function(partial(train_step, training))
        warm_up(training, step_graph, count_hits)
    train_images = lru_cache(None)(partial(count_records, run.data / "train.idx"))
    # The index is read behind run_start, like all of the data set.
    with run.timed(lambda: events.timeline(config, steps_per_epoch(train_images(), config, ranks))) as timeline:
        steps = timeline.steps_per_epoch
        run.log(events.hyperparameters(config, ranks.size, steps))
        batches = TrainingInput(data, config, run.data, ranks, saved.get("input"))
        evaluation = EvaluationInput(data, config, run.data, ranks)
        run.log(samples(train_images(), evaluation.total))
        run.keep(partial(content, training), partial(own_content, training, batches))
        for _ in run.blocks():
            for step in run.steps():
                rate = learning_rate(config, step, steps)
                run.report(step_graph(*run.wait_for(batches.next), tf.constant(rate, tf.float32)), rate)
            if run.evaluates():
                run.evaluated(evaluate(training, evaluation, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
