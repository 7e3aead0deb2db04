"""Train BERT in PyTorch: rows of tokens without padding in, masked words judged, MLPerf events out.

    $ python -m benchmarks.bert.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.bert.pytorch.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/; a run that finds a checkpoint there
resumes from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Callable, Dict, Iterable, List, Optional

import torch

from benchmarks.bert import events
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import Batch, EvaluationInput, Part, TrainingInput
from benchmarks.bert.pytorch.training import Training, build, weights_file
from benchmarks.bert.schedule import learning_rate
from benchmarks.common.frameworks import pytorch
from benchmarks.common.mllog import samples
from benchmarks.common.run import Run
from benchmarks.common.stopping import end_process
from benchmarks.common.torch_updates import Rate, Rates
from benchmarks.language.arrays import open_data

MANY_PARTS = 8
"""In which a batch may take long enough to be stopped within it; the ranks then agree once a part."""


def train_part(training: Training, part: Part) -> torch.Tensor:
    """Forward and backward on one part of a batch; return its share of the mean loss over all ranks."""
    loss = training.loss(part)
    training.updates.scaled(loss).backward()
    return loss.detach()


def train_step(
    training: Training, batch: Batch, rate: Rate, watch: Callable[[List[Part]], Iterable[Part]] = iter
) -> Optional[torch.Tensor]:
    """Forward and backward on each part of a batch that is not done yet, and one update.

    Returns this rank's part of the mean loss over all ranks, times the number of ranks, on the device; None where
    ``watch`` ended in the middle, from where a checkpoint of ``training`` continues.
    """
    done = training.done
    for part in watch(batch[done.parts :]):
        done.add(training.run_part(part))
    if done.parts < len(batch):
        return None
    training.updates.step(rate, 1.0)
    return done.take() * training.ranks.size


def evaluate(training: Training, evaluation: EvaluationInput, run: Run) -> Optional[Dict[str, float]]:
    """Share of the masked words of all ranks that are predicted, and further figures; None if the run is to stop."""
    sums = torch.zeros(5, dtype=torch.float64, device=run.ranks.context)
    training.network.eval()
    with closing(evaluation.one_pass()) as parts:
        for part in run.watch(parts):
            if part is not None:
                sums += training.judge(part)
    training.network.train()
    if run.interrupted:
        return None
    right, loss, follows, count = run.total(sums, evaluation.masked)
    return {
        "masked_accuracy": right / evaluation.masked,
        "masked_loss": loss / evaluation.masked,
        "next_accuracy": follows / count,
    }


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, events.WORDING)
    config, ranks, saved = run.config, run.ranks, run.saved
    data = run.open(lambda: open_data(run.data))
    with run.initialization():
        training = run.open(
            lambda: build(config, data, ranks, saved, train_part, train_step, weights_file(config, run.data))
        )
    run.log(events.hyperparameters(config, ranks.size, data.max_predictions))
    # No sample is read before run_start.
    with run.timed(events.timeline(config, ranks.size)) as timeline:
        updates = training.updates
        batches = TrainingInput(config, data.train, ranks, run.position + updates.uncounted)
        evaluation = EvaluationInput(config, data.test, ranks)
        run.keep(training.content, training.own_content)
        # As submitted: neither the rate nor the samples trained on advance with a step that is skipped.
        rates = Rates(updates, partial(learning_rate, config), timeline.steps)
        run.leave_out(updates.skipped_since)
        watch = run.watch if config.accumulation >= MANY_PARTS else iter
        with closing(batches):
            for _ in run.blocks():
                for number in run.steps():
                    rate = rates.of(number)
                    run.report(train_step(training, run.wait_for(batches.next), rate, watch), rate)
                if run.evaluates():
                    run.evaluated(evaluate(training, evaluation, run))
        if not run.interrupted:
            # As submitted: of the samples that the run trained on.
            run.log(samples(run.position * config.batch_size * ranks.size, len(data.test)))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
