"""Train ResNet in PyTorch: DALI in, DistributedDataParallel across, MLPerf events out.

    $ python -m benchmarks.resnet.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --standalone --nproc-per-node 8 -m benchmarks.resnet.pytorch.train --config config.json ...

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

import torch
from mlperf_logging.mllog import constants

from benchmarks.common import configuration, torch_ranks
from benchmarks.common.checkpoints import Position
from benchmarks.common.metrics import MetricsStream
from benchmarks.common.mllog import ResultLog
from benchmarks.common.progress import Progress, StepReports
from benchmarks.common.stopping import Heartbeat, StopRequest
from benchmarks.common.torch_precision import autocast
from benchmarks.common.torch_ranks import LaggedSums
from benchmarks.resnet import events
from benchmarks.resnet.inputs import EvaluationInput, count_records
from benchmarks.resnet.pytorch import model, optimizer, progress, step
from benchmarks.resnet.pytorch.config import Config
from benchmarks.resnet.pytorch.data import evaluation_input, training_input
from benchmarks.resnet.schedule import learning_rate


@torch.no_grad()
def evaluate(
    network: torch.nn.Module,
    config: Config,
    evaluation: EvaluationInput,
    stop: StopRequest,
    heartbeat: Heartbeat,
    step_number: int,
) -> Optional[float]:
    """Top-1 accuracy over all validation images of all ranks, or None if the run is to stop."""
    step.average_statistics(network)
    network.eval()
    device = next(network.parameters()).device
    correct = torch.zeros(1, device=device)
    counted = 0
    votes = LaggedSums()
    for images, labels, valid in evaluation.one_pass():
        if valid:
            with autocast(device, config.precision):
                logits = network(images)
            correct += (logits.argmax(dim=1) == labels)[:valid].sum()
        counted += valid
        heartbeat.beat(step_number)
        votes_cast = votes.send(torch.tensor([float(stop.requested)], device=device))
        if votes_cast is not None and votes_cast[0] > 0:
            votes.drain()
            return None
    votes.drain()
    network.train()
    hits, total = torch_ranks.total(torch.cat((correct, correct.new_tensor([counted]))))
    if total != evaluation.total:
        raise RuntimeError(f"evaluated {total:.0f} images, the data set has {evaluation.total}")
    return hits / evaluation.total


def main(argv: Optional[List[str]] = None) -> int:
    arguments = parse_arguments(argv)
    config = configuration.load(Config, arguments.config)
    stop = StopRequest()
    step.set_up(config)
    ranks = torch_ranks.start(config.device)
    heartbeat = Heartbeat(arguments.output / "heartbeat", ranks.rank)
    run = Progress(arguments.output, ranks, lambda name: torch_ranks.barrier())
    resumed = run.find_checkpoint()
    log = ResultLog(arguments.output / "result.txt", ranks.rank)
    metrics = MetricsStream(arguments.output / "metrics.jsonl", ranks.rank)
    if not resumed:
        log.start(constants.INIT_START)
        log.event(constants.SEED, config.seed)
        log.event(constants.MODEL_BN_SPAN, config.batch_size)

    network = model.place(model.build(config), config, ranks.context)
    trainer = optimizer.build(network, config)
    progress.restore(run.checkpoint, network, trainer)
    parallel = step.parallel(network, config, ranks)
    graphed = step.warm_up(parallel, network, trainer, config, ranks.context)
    input_state = progress.unpack_own(run.input_checkpoint(), network)
    write = partial(progress.save, network=network, optimizer=trainer)
    train_images = count_records(arguments.data / "train.idx")
    steps_per_epoch = math.ceil(train_images / (config.batch_size * ranks.size))
    run.steps_per_epoch = steps_per_epoch

    if not resumed:
        log.end(constants.INIT_STOP)
        log.events(events.hyperparameters(config, ranks.size, steps_per_epoch))
        log.start(constants.RUN_START)
    # The clock runs from here: reading the data set belongs to the run (MLPerf training rules, "timing").
    training = training_input(config, arguments.data, ranks, input_state)
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
    reports = StepReports(metrics, config, ranks.size, steps_per_epoch, progress.LossSums(ranks))
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
            number = epoch * steps_per_epoch + step_in_epoch
            trainer.set_learning_rate(learning_rate(config, number, steps_per_epoch))
            images, labels = reports.timed(training.next)
            if graphed is None:
                trainer.zero_grad(set_to_none=True)
                with autocast(ranks.context, config.precision):
                    logits = parallel(images)
                loss = model.smoothed_loss(logits, labels, config.label_smoothing)
                (loss * config.loss_scale).backward()
            else:
                loss = graphed.replay(images, labels)
            trainer.step()
            heartbeat.beat(number)
            run.position = Position(epoch, step_in_epoch + 1)
            if reports.add(number, loss, stop.requested, trainer.learning_rate):
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
            accuracy = evaluate(network, config, evaluation, stop, heartbeat, (epoch + 1) * steps_per_epoch)
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
            run.save(write, progress.pack_own(training.checkpoint(), network))

    if outcome == "interrupted":
        run.save(write, progress.pack_own(training.checkpoint(), network))
    else:
        log.end(constants.RUN_STOP, status="success" if outcome == "reached" else "aborted")
    metrics.write("end", outcome=outcome)
    torch_ranks.finish()
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
