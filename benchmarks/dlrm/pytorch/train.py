"""Train DLRM in PyTorch: blocks of clicks in, tables split over the ranks, MLPerf events out.

    $ python -m benchmarks.dlrm.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.dlrm.pytorch.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/; a run that finds a checkpoint
there goes on from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import List, NamedTuple, Optional

import torch
from mlperf_logging.mllog import constants
from torch.nn import functional

from benchmarks.common import configuration, torch_precision, torch_ranks
from benchmarks.common.checkpoints import Position
from benchmarks.common.metrics import MetricsStream
from benchmarks.common.mllog import ResultLog
from benchmarks.common.ranks import Ranks
from benchmarks.common.stopping import Heartbeat, StopRequest
from benchmarks.common.torch_progress import Progress, StepReports
from benchmarks.common.torch_ranks import LaggedSums
from benchmarks.dlrm import events
from benchmarks.dlrm.pytorch import step as steps
from benchmarks.dlrm.pytorch.auc import area_under_curve
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import (
    BadInput,
    DataSet,
    EvaluationInput,
    TrainingInput,
    free_memory,
    open_data,
)
from benchmarks.dlrm.pytorch.step import Model, Step
from benchmarks.dlrm.schedule import learning_rate


class Quality(NamedTuple):
    """What an evaluation found over all evaluation rows of all ranks."""

    auc: float
    log_loss: float


def evaluate(
    model: Model,
    evaluation: EvaluationInput,
    config: Config,
    ranks: Ranks,
    stop: StopRequest,
    beat: Heartbeat,
    at: int,
) -> Optional[Quality]:
    """Exact AUC and mean log loss, or None if the run is to stop."""
    scores, labels = [], []
    votes = LaggedSums()
    for batch, counted in evaluation.one_pass():
        scores.append(steps.scores(model, batch, config, ranks.context)[:counted])
        labels.append(batch.labels[:counted])
        beat.beat(at)
        votes_cast = votes.send(torch.full((1,), float(stop.requested), device=ranks.context))
        if votes_cast is not None and votes_cast[0] > 0:
            votes.drain()
            return None
    votes.drain()
    odds, clicks = torch.cat(scores), torch.cat(labels)
    loss = functional.binary_cross_entropy_with_logits(odds.double(), clicks.double(), reduction="sum")
    counted_by_all = torch.tensor(float(len(odds)), dtype=torch.float64, device=ranks.context)
    total_loss, total = torch_ranks.total(torch.stack((loss, counted_by_all)))
    if total != evaluation.total:
        raise RuntimeError(f"evaluated {total:.0f} rows, the data set has {evaluation.total}")
    # By the odds and not by the probabilities, which are alike where the odds are large.
    try:
        return Quality(area_under_curve(odds, clicks), total_loss / total)
    except ValueError as problem:
        raise SystemExit(f"{problem}\n  do this: lower learning_rate, or look at the data") from None


def open_or_exit(arguments: argparse.Namespace, config: Config, ranks: Ranks) -> DataSet:
    """The data set; what is wrong with it is told once, before the clock starts."""
    try:
        return open_data(arguments.data, config, ranks.size, free_memory(ranks))
    except BadInput as problem:
        if ranks.rank == 0:
            print(problem, file=sys.stderr)
        raise SystemExit(2) from None


def main(argv: Optional[List[str]] = None) -> int:
    arguments = parse_arguments(argv)
    config = configuration.load(Config, arguments.config)
    stop = StopRequest()
    ranks = torch_ranks.start(config.device)
    torch_precision.set_matmul(config.precision)
    heartbeat = Heartbeat(arguments.output / "heartbeat", ranks.rank)
    data = open_or_exit(arguments, config, ranks)
    progress = Progress(arguments.output, ranks)
    resumed = progress.find_checkpoint()
    log = ResultLog(arguments.output / "result.txt", ranks.rank)
    metrics = MetricsStream(arguments.output / "metrics.jsonl", ranks.rank)
    if not resumed:
        log.start(constants.INIT_START)
        log.event(constants.SEED, config.seed)

    model = steps.build(config, data.table_sizes, ranks)
    evaluated = 0  # steps of the run before its last evaluation
    if resumed:
        evaluated = restore(progress, model)
    torch_ranks.broadcast([model.weights.flat])
    global_batch = config.batch_size * ranks.size
    steps_per_epoch = -(-data.train_rows // global_batch)
    progress.steps_per_epoch = steps_per_epoch
    rate = torch.zeros((), device=ranks.context)
    update, graph = steps.Update(model, config, ranks), record(model, config, data, ranks)

    if not resumed:
        log.end(constants.INIT_STOP)
        log.events(events.hyperparameters(config, ranks.size))
        log.start(constants.RUN_START)
    # The clock runs from here: reading the data set belongs to the run (MLPerf training rules, "timing").
    first_step = progress.position.step(steps_per_epoch)
    training = TrainingInput(config, data, model.tables.mine, ranks, first_step)
    evaluation = EvaluationInput(config, data, model.tables.mine, ranks)
    if not resumed:
        log.events({constants.TRAIN_SAMPLES: data.train_rows, constants.EVAL_SAMPLES: data.val_rows})
    metrics.write(
        "start",
        ranks=ranks.size,
        global_batch_size=global_batch,
        epochs=config.epochs,
        steps_per_epoch=steps_per_epoch,
        quality_target=config.quality_target,
        resumed_step=first_step,
    )
    stop.arm()
    reports = StepReports(metrics, ranks, global_batch, steps_per_epoch, config.log_interval)
    outcome = "not_reached"

    for epoch in range(progress.position.epoch, config.epochs):
        first = progress.position.step_in_epoch
        if first == 0:
            log.start(constants.BLOCK_START, first_epoch_num=epoch + 1, epoch_count=1)
            log.start(constants.EPOCH_START, epoch_num=epoch + 1)
        elif evaluated < first_step and events.evaluates_after(first_step, first, steps_per_epoch, config):
            first -= 1  # a signal came before the evaluation of this step
        reports.start_epoch()
        for step_in_epoch in range(first, steps_per_epoch):
            step = epoch * steps_per_epoch + step_in_epoch
            if step >= first_step:
                rate.fill_(learning_rate(config, step))
                batch = reports.timed(training.next)
                if graph is not None:
                    loss = graph(batch, rate)  # the same three lines, recorded
                else:
                    loss = update.forward(batch)
                    (loss * update.loss_scale).backward()
                    update.step(rate)
                heartbeat.beat(step)
                progress.position = Position(epoch, step_in_epoch + 1)
                if reports.add(step, loss, stop.requested, learning_rate(config, step)):
                    outcome = "interrupted"
                    reports.end_epoch(epoch)
                    progress.mark_log()
                    break
            if not events.evaluates_after(step + 1, step_in_epoch + 1, steps_per_epoch, config):
                continue
            reports.end_epoch(epoch)
            progress.mark_log()
            number = events.epoch_number(epoch, step_in_epoch + 1, steps_per_epoch)
            log.start(constants.EVAL_START, epoch_num=number)
            started = time.time()
            quality = evaluate(model, evaluation, config, ranks, stop, heartbeat, step + 1)
            if quality is None:
                outcome = "interrupted"
                break
            log.event(constants.EVAL_ACCURACY, quality.auc, epoch_num=number)
            log.end(constants.EVAL_STOP, epoch_num=number)
            seconds = round(time.time() - started, 3)
            metrics.write(
                "eval", epoch=epoch + 1, quality=quality.auc, seconds=seconds, log_loss=quality.log_loss
            )
            progress.mark_log()
            evaluated = step + 1
            if quality.auc >= config.quality_target:
                outcome = "reached"
                break
            if (
                config.checkpoint_interval
                and evaluated // config.eval_interval % config.checkpoint_interval == 0
            ):
                save(progress, model, evaluated)
            reports.start_epoch()
        if outcome == "interrupted":
            break
        log.end(constants.EPOCH_STOP, epoch_num=epoch + 1)
        log.end(constants.BLOCK_STOP, first_epoch_num=epoch + 1)
        if outcome == "reached":
            break
        progress.position = Position(epoch + 1, 0)

    if outcome == "interrupted":
        save(progress, model, evaluated)
    else:
        log.end(constants.RUN_STOP, status="success" if outcome == "reached" else "aborted")
    metrics.write("end", outcome=outcome)
    torch_ranks.finish()
    return 0


def record(model: Model, config: Config, data: DataSet, ranks: Ranks) -> Optional[Step]:
    """A step as a CUDA graph, recorded on the first batch, or None if the configuration has none."""
    if not config.cuda_graph:
        return None
    example = TrainingInput(config, data, model.tables.mine, ranks, 0).next()
    return steps.recorded(model, config, ranks, example)


def save(progress: Progress, model: Model, evaluated: int) -> None:
    """Write a checkpoint of the position: the MLPs once, and each rank's tables."""
    shared = {"weights": model.weights.flat, "evaluated": evaluated}
    progress.save(lambda: shared, {"tables": model.tables.weight})


def restore(progress: Progress, model: Model) -> int:
    """Go back to what ``save`` wrote; returns its ``evaluated``."""
    shared, own = progress.load()
    model.weights.flat.copy_(shared["weights"])
    model.tables.weight.copy_(own["tables"])
    return int(shared["evaluated"])


def parse_arguments(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (JSON)")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of train.bin, val.bin and dataset.json"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for results, may be shared by nodes"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
