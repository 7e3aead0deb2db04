"""Train ResNet in TensorFlow: DALI in, Horovod across, MLPerf events out.

    $ python -m benchmarks.resnet.tensorflow.train --config config.json --data DATA --output OUT
    $ horovodrun -np 8 python -m benchmarks.resnet.tensorflow.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/; a run that finds a checkpoint
there goes on from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Callable, List, Optional, Tuple

from mlperf_logging.mllog import constants

from benchmarks.common import configuration, horovod_tensorflow
from benchmarks.common.checkpoints import Position
from benchmarks.common.horovod_tensorflow import LaggedSums
from benchmarks.common.metrics import MetricsStream
from benchmarks.common.mllog import ResultLog
from benchmarks.common.progress import Progress, StepReports
from benchmarks.common.stopping import Heartbeat, StopRequest
from benchmarks.resnet import events
from benchmarks.resnet.inputs import EvaluationInput, TrainingInput, count_records
from benchmarks.resnet.schedule import learning_rate
from benchmarks.resnet.tensorflow import model, optimizer, progress
from benchmarks.resnet.tensorflow.config import Config
from benchmarks.resnet.tensorflow.data import evaluation_input, training_input

import tensorflow as tf  # isort: skip  # after horovod_tensorflow, which settles what it prints


def compile_backward(
    network: model.Network, config: Config
) -> Callable[[tf.Tensor, tf.Tensor], Tuple[tf.Tensor, List[tf.Tensor]]]:
    """Forward and backward pass of one batch: the mean loss, and the gradients of loss_scale times it."""

    @tf.function(jit_compile=config.xla)
    def backward(images: tf.Tensor, labels: tf.Tensor) -> Tuple[tf.Tensor, List[tf.Tensor]]:
        with tf.GradientTape() as tape:
            logits = network(images, training=True)
            loss = tf.reduce_mean(model.smoothed_loss(logits, labels, config.label_smoothing))
            scaled = loss * config.loss_scale
        return loss, tape.gradient(scaled, list(network.trained.values()))

    return backward


def compile_step(
    network: model.Network, updates: optimizer.Optimizer, config: Config
) -> Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]:
    """One step as one graph: forward, backward, all-reduce, update; returns this rank's mean loss."""
    backward = compile_backward(network, config)
    update = tf.function(updates.step, jit_compile=config.xla)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        loss, gradients = backward(images, labels)
        gradients = horovod_tensorflow.average(gradients, config.gradient_compression, config.gradient_groups)
        update(gradients, rate)
        return loss

    return step


def compile_hits(
    network: model.Network, config: Config
) -> Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]:
    """How many of the first ``valid`` images of a batch are classified correctly."""

    @tf.function(jit_compile=config.xla)
    def hits(images: tf.Tensor, labels: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
        found = tf.argmax(network(images, training=False), axis=1, output_type=tf.int32)
        counts = tf.range(tf.shape(labels)[0]) < valid
        return tf.reduce_sum(tf.cast((found == labels) & counts, tf.float32))

    return hits


def save(
    run: Progress, network: model.Network, updates: optimizer.Optimizer, training: TrainingInput
) -> None:
    """Write a checkpoint. Each rank has statistics of its own, and only their mean is ever used: save that."""
    horovod_tensorflow.average_variables(network.statistics, "statistics")
    write = partial(progress.save, variables=network.variables, momenta=updates.momenta)
    run.save(write, training.checkpoint())


def evaluate(
    network: model.Network,
    hits: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor],
    evaluation: EvaluationInput,
    stop: StopRequest,
    heartbeat: Heartbeat,
    step: int,
) -> Optional[float]:
    """Top-1 accuracy over all validation images of all ranks, or None if the run is to stop."""
    horovod_tensorflow.average_variables(network.statistics, "statistics")
    correct = tf.zeros(())
    counted = 0
    votes = LaggedSums("stop_evaluation")
    for images, labels, valid in evaluation.one_pass():
        correct += hits(images, labels, tf.constant(valid))
        counted += valid
        heartbeat.beat(step)
        votes_cast = votes.send(tf.constant([float(stop.requested)]))
        if votes_cast is not None and votes_cast[0] > 0:
            votes.drain()
            return None
    votes.drain()
    hits_of_all, counted_by_all = horovod_tensorflow.total([float(correct), counted], "evaluation")
    if counted_by_all != evaluation.total:
        raise RuntimeError(f"evaluated {counted_by_all:.0f} images, the data set has {evaluation.total}")
    return hits_of_all / evaluation.total


def main(argv: Optional[List[str]] = None) -> int:
    arguments = parse_arguments(argv)
    config = configuration.load(Config, arguments.config)
    stop = StopRequest()
    ranks = horovod_tensorflow.start(config.device)
    tf.config.experimental.enable_tensor_float_32_execution(config.precision == "tf32")
    heartbeat = Heartbeat(arguments.output / "heartbeat", ranks.rank)
    run = Progress(arguments.output, ranks, horovod_tensorflow.barrier)
    resumed = run.find_checkpoint()
    log = ResultLog(arguments.output / "result.txt", ranks.rank)
    metrics = MetricsStream(arguments.output / "metrics.jsonl", ranks.rank)
    if not resumed:
        log.start(constants.INIT_START)
        log.event(constants.SEED, config.seed)
        log.event(constants.MODEL_BN_SPAN, config.batch_size)

    network = model.build(config)
    updates = optimizer.build(network.trained, config)
    train_step = compile_step(network, updates, config)
    hits = compile_hits(network, config)
    progress.restore_or_broadcast(run.checkpoint, network.variables, updates.momenta)
    train_images = count_records(arguments.data / "train.idx")
    steps_per_epoch = math.ceil(train_images / (config.batch_size * ranks.size))
    run.steps_per_epoch = steps_per_epoch

    if not resumed:
        log.end(constants.INIT_STOP)
        log.events(events.hyperparameters(config, ranks.size, steps_per_epoch))
        log.start(constants.RUN_START)
    # The clock runs from here: reading the data set belongs to the run (MLPerf training rules, "timing").
    training = training_input(config, arguments.data, ranks, run.input_checkpoint())
    evaluation = evaluation_input(config, arguments.data, ranks)
    if not resumed:
        log.event(constants.TRAIN_SAMPLES, train_images)
        log.event(constants.EVAL_SAMPLES, evaluation.total)
    metrics.write(
        "start",
        ranks=ranks.size,
        global_batch_size=config.batch_size * ranks.size,
        epochs=config.epochs,
        steps_per_epoch=steps_per_epoch,
        quality_target=config.quality_target,
        resumed_step=run.position.step(steps_per_epoch),
    )
    stop.arm()
    reports = StepReports(metrics, config, ranks.size, steps_per_epoch, progress.LossSums())
    outcome = "not_reached"

    for epoch in range(run.position.epoch, config.epochs):
        first_step = run.position.step_in_epoch
        if first_step == 0:
            if events.starts_block(epoch, config):
                count = events.block_length(epoch, config)
                log.start(constants.BLOCK_START, first_epoch_num=epoch + 1, epoch_count=count)
            log.start(constants.EPOCH_START, epoch_num=epoch + 1)
        reports.start_epoch()
        for step_in_epoch in range(first_step, steps_per_epoch):
            step = epoch * steps_per_epoch + step_in_epoch
            rate = learning_rate(config, step, steps_per_epoch)
            images, labels = reports.timed(training.next)
            loss = train_step(images, labels, tf.constant(rate, tf.float32))
            heartbeat.beat(step)
            run.position = Position(epoch, step_in_epoch + 1)
            if reports.add(step, loss, stop.requested, rate):
                outcome = "interrupted"
                break
        reports.end_epoch(epoch)
        run.mark_log()
        if outcome == "interrupted":
            break

        log.end(constants.EPOCH_STOP, epoch_num=epoch + 1)
        if events.evaluates_after(epoch, config):
            log.start(constants.EVAL_START, epoch_num=epoch + 1)
            started = time.time()
            accuracy = evaluate(network, hits, evaluation, stop, heartbeat, (epoch + 1) * steps_per_epoch)
            if accuracy is None:
                outcome = "interrupted"
                break
            log.end(constants.EVAL_STOP, epoch_num=epoch + 1)
            log.event(constants.EVAL_ACCURACY, accuracy, epoch_num=epoch + 1)
            first_of_block = max(e for e in range(epoch + 1) if events.starts_block(e, config))
            log.end(constants.BLOCK_STOP, first_epoch_num=first_of_block + 1)
            metrics.write("eval", epoch=epoch + 1, quality=accuracy, seconds=round(time.time() - started, 3))
            if accuracy >= config.quality_target:
                outcome = "reached"
                break
        run.position = Position(epoch + 1, 0)
        run.mark_log()
        if config.checkpoint_interval and (epoch + 1) % config.checkpoint_interval == 0:
            save(run, network, updates, training)

    if outcome == "interrupted":
        save(run, network, updates, training)
    else:
        log.end(constants.RUN_STOP, status="success" if outcome == "reached" else "aborted")
    metrics.write("end", outcome=outcome)
    horovod_tensorflow.finish()
    return 0


def parse_arguments(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (JSON)")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of train.rec, val.rec and dataset.json"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for results, may be shared by nodes"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
