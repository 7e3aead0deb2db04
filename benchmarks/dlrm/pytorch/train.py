"""Train DLRM in PyTorch: blocks of clicks in, tables split over the ranks, MLPerf events out.

    $ python -m benchmarks.dlrm.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.dlrm.pytorch.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/; a run that finds a checkpoint there
resumes from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from typing import Dict, List, Optional

import torch
from torch.nn import functional

from benchmarks.common.frameworks import pytorch
from benchmarks.common.mllog import samples
from benchmarks.common.run import Run
from benchmarks.common.stopping import end_process
from benchmarks.dlrm import events
from benchmarks.dlrm.pytorch.auc import area_under_curve
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import Batch, EvaluationInput, TrainingInput, free_memory, open_data
from benchmarks.dlrm.pytorch.model import Training
from benchmarks.dlrm.pytorch.training import build, ready
from benchmarks.dlrm.schedule import learning_rate


def train_step(training: Training, batch: Batch, rate: torch.Tensor) -> torch.Tensor:
    """Forward, backward and update on one batch; returns the mean loss of this rank's rows, still on the device."""
    loss = training.forward(batch)
    (loss * training.loss_scale).backward()
    training.update(rate)
    return loss.detach()


def evaluate(training: Training, evaluation: EvaluationInput, run: Run) -> Optional[Dict[str, float]]:
    """Exact AUC and mean log loss over all evaluation rows of all ranks, or None if the run is to stop."""
    scores, labels = [], []
    with closing(evaluation.one_pass()) as batches:
        for batch, counted in run.watch(batches):
            scores.append(training.scores(batch)[:counted])
            labels.append(batch.labels[:counted])
    if run.interrupted:
        return None
    logits, clicks = torch.cat(scores), torch.cat(labels)
    loss = functional.binary_cross_entropy_with_logits(logits.double(), clicks.double(), reduction="sum")
    counted_here = torch.tensor(float(len(logits)), dtype=torch.float64, device=loss.device)
    (total_loss,) = run.total(torch.stack((loss, counted_here)), evaluation.total)
    # By the logits and not by the probabilities, which are alike where the logits are large.
    try:
        return {"auc": area_under_curve(logits, clicks), "log_loss": total_loss / evaluation.total}
    except ValueError as problem:
        raise SystemExit(f"{problem}\n  do this: lower learning_rate, or look at the data") from None


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, events.WORDING)
    config, ranks = run.config, run.ranks
    data = run.open(lambda: open_data(run.data, config, ranks.size, free_memory(ranks)))
    with run.initialization():
        training = build(config, data.table_sizes, ranks, run.saved, data.placement)
        step = ready(partial(train_step, training), training, data.table_sizes)
    run.log(events.hyperparameters(config, ranks.size))
    steps_per_epoch = -(-data.train_rows // (config.batch_size * ranks.size))
    # No row is read before run_start: the clock starts before any part of the system touches the data set.
    with ExitStack() as owned, run.timed(events.timeline(config, steps_per_epoch)):
        batches = owned.enter_context(closing(TrainingInput(config, data, training.tables.mine, ranks, run.position)))
        evaluation = EvaluationInput(config, data, training.tables.mine, ranks)
        run.log(samples(data.train_rows, data.val_rows))
        # All ranks have the same MLPs, and tables of their own.
        run.keep(training.content, lambda: {"tables": training.tables.weight})
        rate = torch.zeros((), device=ranks.context)
        for _ in run.blocks():
            for number in run.steps():
                rate.fill_(learning_rate(config, number))
                run.report(step(run.wait_for(batches.next), rate), learning_rate(config, number))
            if run.evaluates():
                run.evaluated(evaluate(training, evaluation, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
