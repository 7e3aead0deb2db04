"""Fine-tune BERT on SQuAD in PyTorch: windows in, answers judged by F1, MLPerf's events out.

    $ python -m benchmarks.bert_squad.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.bert_squad.pytorch.train --config config.json --data DATA --output OUT

OUT gets result.txt (the log), metrics.jsonl, heartbeat/, checkpoint/, and of the last evaluation predictions.json,
which SQuAD's evaluate-v1.1.py reads, and nbest_predictions.json; a run that finds a checkpoint there resumes from it.
Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

from contextlib import closing
from typing import Dict, List, Optional

import torch

from benchmarks.bert_squad import events
from benchmarks.bert_squad.arrays import DataSet, open_data
from benchmarks.bert_squad.pytorch.config import Config
from benchmarks.bert_squad.pytorch.data import Batch, TrainingInput, evaluation_batches, steps_per_epoch
from benchmarks.bert_squad.pytorch.evaluation import answer, quality
from benchmarks.bert_squad.pytorch.training import Training, build
from benchmarks.bert_squad.schedule import learning_rate
from benchmarks.common.frameworks import pytorch
from benchmarks.common.mllog import samples
from benchmarks.common.run import Run
from benchmarks.common.stopping import end_process


def train_batch(training: Training, batch: Batch) -> torch.Tensor:
    """Forward and backward on one batch; return the sum of the losses of this rank's windows, on the device."""
    loss = training.loss_sum(batch)
    training.updates.scaled(loss).backward()
    return loss.detach()


def train_step(training: Training, batch: Batch, rate: float) -> torch.Tensor:
    """Forward, backward and update on one batch; return the mean loss of this rank's windows, on the device."""
    loss = training.by_graph(batch) if training.by_graph else train_batch(training, batch)
    training.updates.step(rate, len(batch) * training.ranks.size)
    return loss / len(batch)


def evaluate(training: Training, data: DataSet, run: Run) -> Optional[Dict[str, float]]:
    """F1 and exact match over all questions of the test part, 0 to 100; None if the run is to stop."""
    batches = evaluation_batches(training.config, data.test, run.ranks)
    found = answer(training.config, batches, data, training.logits, run)
    return None if found is None else quality(found, data, run.ranks, run.output)


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, events.WORDING)
    config, ranks = run.config, run.ranks
    data = run.open(lambda: open_data(run.data))
    steps, saved = steps_per_epoch(config, data, ranks), run.saved
    with run.initialization():
        training = run.open(lambda: build(config, data, ranks, saved, train_batch, train_step))
    run.log(events.hyperparameters(config, ranks.size))
    timeline = events.timeline(config, steps)
    # No window is read before run_start.
    with run.timed(timeline):
        batches = TrainingInput(config, data, steps, ranks, run.position)
        questions = data.passport["facts"]["questions"]
        run.log(samples(questions["train"], questions["test"]))
        run.keep(training.content, training.updates.own_content)
        with closing(batches):
            for _ in run.blocks():
                for number in run.steps():
                    batch, rate = run.wait_for(batches.next), learning_rate(config, number, timeline.steps)
                    run.report(train_step(training, batch, rate), rate)
                if run.evaluates():
                    run.evaluated(evaluate(training, data, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
