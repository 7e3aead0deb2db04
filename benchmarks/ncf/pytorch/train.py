"""Train NCF in PyTorch: everything on the device, torch.distributed across, v0.5 MLPerf events out.

    $ python -m benchmarks.ncf.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --standalone --nproc-per-node 8 -m benchmarks.ncf.pytorch.train --config config.json ...

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/; a run that finds a checkpoint there
resumes from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

from functools import partial
from typing import Dict, List, Optional

import torch

from benchmarks.common.data import passport
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import Run
from benchmarks.common.stopping import end_process
from benchmarks.ncf import events
from benchmarks.ncf.pytorch import data, evaluation, model
from benchmarks.ncf.pytorch.config import Config
from benchmarks.ncf.pytorch.evaluation import Candidates
from benchmarks.ncf.pytorch.training import Training, build, content


def train_step(training: Training, step_in_epoch: int) -> None:
    """Forward, backward and update of one step of the epoch that the sampler drew; never waits for the device."""
    config, gradients, losses = training.config, training.gradients, training.losses
    scale = config.loss_scale if config.precision == "fp16" else 1.0
    users, items, labels, global_size = training.sampler.batch(step_in_epoch)
    with pytorch.autocast(losses.device, config.precision):
        scores = training.network(users, items)
    loss = model.loss_sum(scores, labels) / global_size
    (loss * scale).backward()
    gradients.sum()
    if scale != 1.0:
        gradients.flat.mul_(1.0 / scale)
    training.optimizer.step()
    gradients.zero()
    losses[step_in_epoch] = loss.detach()


def train_steps(training: Training, run: Run, steps: range, seed: int) -> None:
    """Several steps of the epoch of ``seed``, eagerly, or all of them as one graph; report them."""
    sampler, losses = training.sampler, training.losses
    first = steps.start % sampler.steps_per_epoch
    last = first + len(steps)
    if training.graph is None:
        run.wait_for(partial(sampler.draw_epoch, seed))
        for step_in_epoch in range(first, last):
            train_step(training, step_in_epoch)
    else:
        torch.manual_seed(seed)
        training.graph()
    loss = losses[first:last].mean() * run.ranks.size
    run.report(loss, training.config.learning_rate, sampler.seen(last) - sampler.seen(first))


@torch.no_grad()
def evaluate(training: Training, candidates: Candidates, users: int, run: Run) -> Optional[Dict[str, float]]:
    """HR@10 and NDCG@10 over all users of all ranks, or None if the run is to stop."""
    config, network, device = training.config, training.network, run.ranks.context
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    # All ranks take part in as many votes as the rank with the most users needs.
    parts = evaluation.part_count(candidates, config, -(-users // run.ranks.size))
    with pytorch.autocast(device, config.precision):
        tables = network.first_layer_tables()
    for number in run.watch(range(parts)):
        with pytorch.autocast(device, config.precision):
            sums += evaluation.score_part(network, candidates, config, number, tables)
    if run.interrupted:
        return None
    hits, gain = run.total(sums, users)
    return {"hit_rate": hits / users, "ndcg": gain / users}


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, events.WORDING)
    config, ranks = run.config, run.ranks
    with run.initialization():
        data_set = data.synthetic(passport.read(run.data), ranks.context)
        sampler = data.Sampler(data_set, config.batch_size, config.negatives, ranks)
        training = build(config, data_set.users, data_set.items, sampler, ranks, run.saved, train_step)
    run.log(events.data(data_set.facts, len(data_set.train_users), sampler.global_batch_size))
    run.log(events.hyperparameters(config, data_set.facts))
    with run.timed(events.timeline(config, sampler.steps_per_epoch)):
        data_set = data.load(run.data, data_set)
        sampler.index()
        candidates = Candidates(data_set, ranks)
        run.keep(partial(content, training))
        stride = sampler.steps_per_epoch if training.graph else config.log_interval
        for epoch in run.blocks():
            if run.starts_epoch:
                run.log(events.epoch(config))
            for steps in run.strides(stride):
                train_steps(training, run, steps, data.epoch_seed(config.seed, epoch))
            if run.evaluates():
                run.log(events.evaluation(epoch, data_set.facts))
                run.evaluated(evaluate(training, candidates, data_set.users, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
