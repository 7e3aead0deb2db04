"""Train ResNet in MXNet: DALI in, Horovod across, MLPerf events out.

    $ python -m benchmarks.resnet.mxnet.train --config config.json --data DATA --output OUT
    $ horovodrun -np 8 python -m benchmarks.resnet.mxnet.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/; a run that finds a checkpoint
there goes on from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import List, Optional

import mxnet as mx
from mlperf_logging.mllog import constants
from mxnet import autograd

from benchmarks.common import configuration, horovod_mxnet
from benchmarks.common.checkpoints import Position
from benchmarks.common.horovod_mxnet import LaggedSums
from benchmarks.common.metrics import MetricsStream
from benchmarks.common.mllog import ResultLog
from benchmarks.common.progress import Progress, StepReports
from benchmarks.common.stopping import Heartbeat, StopRequest
from benchmarks.resnet import events
from benchmarks.resnet.inputs import EvaluationInput, count_records
from benchmarks.resnet.mxnet import model, optimizer, progress
from benchmarks.resnet.mxnet.config import Config
from benchmarks.resnet.mxnet.data import evaluation_input, training_input
from benchmarks.resnet.schedule import learning_rate


def evaluate(
    network: mx.gluon.HybridBlock,
    evaluation: EvaluationInput,
    stop: StopRequest,
    heartbeat: Heartbeat,
    step: int,
) -> Optional[float]:
    """Top-1 accuracy over all validation images of all ranks, or None if the run is to stop."""
    correct = mx.nd.zeros((1,))
    counted = 0
    votes = LaggedSums("stop_evaluation")
    for images, labels, valid in evaluation.one_pass():
        if valid:
            hits = mx.nd.argmax(network(images), axis=1).astype("float32") == labels
            correct += hits[:valid].sum().as_in_context(correct.context)
        counted += valid
        heartbeat.beat(step)
        votes_cast = votes.send(mx.nd.array([float(stop.requested)]))
        if votes_cast is not None and votes_cast[0] > 0:
            votes.drain()
            return None
    votes.drain()
    hits_of_all, counted_by_all = horovod_mxnet.total(
        mx.nd.array([correct.asscalar(), counted]), "evaluation"
    )
    if counted_by_all != evaluation.total:
        raise RuntimeError(f"evaluated {counted_by_all:.0f} images, the data set has {evaluation.total}")
    return hits_of_all / evaluation.total


def main(argv: Optional[List[str]] = None) -> int:
    arguments = parse_arguments(argv)
    config = configuration.load(Config, arguments.config)
    stop = StopRequest()
    ranks = horovod_mxnet.start(config.device)
    heartbeat = Heartbeat(arguments.output / "heartbeat", ranks.rank)
    run = Progress(arguments.output, ranks, horovod_mxnet.barrier)
    resumed = run.find_checkpoint()
    log = ResultLog(arguments.output / "result.txt", ranks.rank)
    metrics = MetricsStream(arguments.output / "metrics.jsonl", ranks.rank)
    if not resumed:
        log.start(constants.INIT_START)
        log.event(constants.SEED, config.seed)
        log.event(constants.MODEL_BN_SPAN, config.batch_size)

    network = model.build(config)
    model.initialize(network, config, ranks.context)
    loss_function = model.SmoothedLoss(config.label_smoothing)
    loss_function.hybridize(static_alloc=True, static_shape=True)
    parameters = network.collect_params()
    trainer = optimizer.build_trainer(parameters, config)
    progress.restore_or_broadcast(run.checkpoint, parameters, trainer)
    write = partial(progress.save, parameters=parameters, trainer=trainer)
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
    loss_scale = mx.nd.full((config.batch_size,), config.loss_scale, ctx=ranks.context)
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
            trainer.set_learning_rate(learning_rate(config, step, steps_per_epoch))
            images, labels = reports.timed(training.next)
            with autograd.record():
                loss = loss_function(network(images), labels)
            loss.backward(loss_scale)
            trainer.step(config.batch_size * config.loss_scale)
            heartbeat.beat(step)
            run.position = Position(epoch, step_in_epoch + 1)
            if reports.add(step, loss.mean(), stop.requested, trainer.learning_rate):
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
            accuracy = evaluate(network, evaluation, stop, heartbeat, (epoch + 1) * steps_per_epoch)
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
            run.save(write, training.checkpoint())

    if outcome == "interrupted":
        run.save(write, training.checkpoint())
    else:
        log.end(constants.RUN_STOP, status="success" if outcome == "reached" else "aborted")
    metrics.write("end", outcome=outcome)
    horovod_mxnet.finish()
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
