"""Train NCF in PyTorch: everything on the device, torch.distributed across, v0.5 MLPerf events out.

    $ python -m benchmarks.ncf.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --standalone --nproc-per-node 8 -m benchmarks.ncf.pytorch.train --config config.json ...

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/; a run that finds a checkpoint
there goes on from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import List, Optional

import torch

from benchmarks.common import configuration, torch_precision, torch_ranks
from benchmarks.common.checkpoints import Position
from benchmarks.common.metrics import MetricsStream
from benchmarks.common.mllog_v05 import ResultLogV05
from benchmarks.common.stopping import Heartbeat, StopRequest
from benchmarks.common.torch_progress import Progress, StepReports
from benchmarks.ncf import events
from benchmarks.ncf.pytorch import data, evaluation, model, steps
from benchmarks.ncf.pytorch.config import Config
from benchmarks.ncf.pytorch.evaluation import Candidates


def train_step(training: steps.Training, step_in_epoch: int) -> None:
    """Forward, backward and update of one step of the epoch that the sampler drew; never waits for the device."""
    network, optimizer, _, gradients, sampler, losses, config = training
    scale = config.loss_scale if config.precision == "fp16" else 1.0
    users, items, labels, global_size = sampler.batch(step_in_epoch)
    with torch_precision.autocast(losses.device, config.precision):
        scores = network(users, items)
    loss = model.loss_sum(scores, labels) / global_size
    (loss * scale).backward()
    gradients.sum()
    if scale != 1.0:
        gradients.flat.mul_(1.0 / scale)
    optimizer.step()
    gradients.zero()
    losses[step_in_epoch] = loss.detach()


@torch.no_grad()
def evaluate(
    network: model.NeuMF, candidates: Candidates, config: Config, users: int, stop: StopRequest
) -> Optional[List[float]]:
    """HR@10 and NDCG@10 over all users of all ranks, or None if the run is to stop."""
    device = candidates.items.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    votes = torch_ranks.LaggedSums()
    # All ranks take part in as many votes as the rank with the most users needs.
    most = -(-users // torch_ranks.size())
    with torch_precision.autocast(device, config.precision):
        tables = network.first_layer_tables()
    for number in range(evaluation.part_count(candidates, config, most)):
        with torch_precision.autocast(device, config.precision):
            sums += evaluation.score_part(network, candidates, config, number, tables)
        vote = votes.send(torch.tensor([float(stop.requested)]).to(device))
        if vote is not None and vote[0] > 0:
            votes.drain()
            return None
    votes.drain()
    hits, gain, counted = torch_ranks.total(sums)
    if counted != users:
        raise RuntimeError(f"evaluated {counted:.0f} users, the data set has {users}")
    return [hits / users, gain / users]


def main(argv: Optional[List[str]] = None) -> int:
    arguments = parse_arguments(argv)
    config = configuration.load(Config, arguments.config)
    stop = StopRequest()
    ranks = torch_ranks.start(config.device)
    heartbeat = Heartbeat(arguments.output / "heartbeat", ranks.rank)
    progress = Progress(arguments.output, ranks)
    resumed = progress.find_checkpoint()
    log = ResultLogV05(arguments.output / "result.txt", ranks.rank, "ncf")
    metrics = MetricsStream(arguments.output / "metrics.jsonl", ranks.rank)
    if not resumed:
        # v0.5 has no untimed start: building the model belongs to the run.
        log.event("run_start")
        log.event("run_set_random_seed", config.seed)

    torch_precision.set_matmul(config.precision)
    data_set = data.load(arguments.data, ranks.context)
    candidates = Candidates(data_set, ranks, config.tie_rule)
    sampler = data.Sampler(data_set, config.batch_size, config.negatives, ranks)
    torch.manual_seed(config.seed)
    network = model.build(config, data_set.users, data_set.items).to(ranks.context)
    shared = progress.load()[0] if resumed else {}
    training = steps.build(config, network, sampler, ranks, shared.get("kernel"))
    if resumed:
        network.load_state_dict(shared["network"])
    else:
        torch_ranks.broadcast(network.parameters())
        for values in (
            events.data(data_set.facts, len(data_set.train_users), sampler.global_batch_size),
            events.hyperparameters(config, data_set.facts),
        ):
            for key, value in values.items():
                log.event(key, value)
        log.event("train_loop")
    graph = (
        steps.capture_epoch(training, train_step) if config.cuda_graph and config.device == "gpu" else None
    )
    if resumed:
        training.optimizer.load_state_dict(shared["optimizer"])
    steps_per_epoch = progress.steps_per_epoch = sampler.steps_per_epoch
    metrics.write(
        "start",
        ranks=ranks.size,
        global_batch_size=sampler.global_batch_size,
        epochs=config.epochs,
        steps_per_epoch=steps_per_epoch,
        quality_target=config.quality_target,
        resumed_step=progress.position.step(steps_per_epoch),
    )
    stop.arm()
    reports = StepReports(metrics, ranks, sampler.global_batch_size, steps_per_epoch, log_interval=1)
    stride = steps_per_epoch if graph else config.log_interval
    best, outcome = shared.get("best", 0.0), "not_reached"

    for epoch in range(progress.position.epoch, config.epochs):
        first_step = progress.position.step_in_epoch
        if first_step == 0:
            log.event("train_epoch", epoch)
            log.event("input_hp_num_neg", config.negatives)
            log.event("input_step_train_neg_gen")
        reports.start_epoch()
        sampler.start_epoch(data.epoch_seed(config.seed, epoch))
        if graph is None and first_step < steps_per_epoch:
            reports.timed(sampler.draw)
        for first in range(first_step, steps_per_epoch, stride):
            last = min(first + stride, steps_per_epoch)
            if graph is None:
                for step_in_epoch in range(first, last):
                    train_step(training, step_in_epoch)
            else:
                graph.replay()
            step = epoch * steps_per_epoch + last - 1
            heartbeat.beat(step)
            progress.position = Position(epoch, last)
            loss = training.losses[first:last].mean() * ranks.size
            seen = sampler.seen(last) - sampler.seen(first)
            if reports.add(step, loss, stop.requested, config.learning_rate, seen):
                outcome = "interrupted"
                break
        reports.end_epoch(epoch)
        if not torch.isfinite(training.losses).all():
            raise SystemExit(
                f"the loss is not finite in epoch {epoch + 1}: lower loss_scale or learning_rate"
            )
        progress.mark_log()
        if outcome == "interrupted":
            break

        log.event("eval_start", epoch)
        started = time.time()
        quality = evaluate(network, candidates, config, data_set.users, stop)
        if quality is None:
            outcome = "interrupted"
            break
        log.event("eval_size", {"epoch": epoch, "value": data_set.users * data_set.facts["negatives"]})
        log.event("eval_accuracy", {"epoch": epoch, "value": quality[0]})
        log.event("eval_target", config.quality_target)
        log.event("eval_stop", epoch)
        seconds = round(time.time() - started, 3)
        metrics.write("eval", epoch=epoch + 1, quality=quality[0], ndcg=quality[1], seconds=seconds)
        best = max(best, quality[0])
        if best >= config.quality_target:
            outcome = "reached"
            if config.stop_at_target:
                break
        progress.position = Position(epoch + 1, 0)
        progress.mark_log()
        if config.checkpoint_interval and (epoch + 1) % config.checkpoint_interval == 0:
            progress.save(steps.checkpoint_content(training, best), {})

    if outcome == "interrupted":
        progress.save(steps.checkpoint_content(training, best), {})
    else:
        log.event("run_stop", {"success": outcome == "reached"})
        log.event("run_final")
    metrics.write("end", outcome=outcome)
    torch_ranks.finish()
    return 0


def parse_arguments(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (JSON)")
    parser.add_argument("--data", type=Path, required=True, help="folder of the arrays and dataset.json")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for results, may be shared by nodes"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
