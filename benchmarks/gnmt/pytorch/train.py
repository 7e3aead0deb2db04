"""Train GNMT v2 in PyTorch: sentence pairs in, LSTMs with attention, translations judged by BLEU, MLPerf events out.

    $ python -m benchmarks.gnmt.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.gnmt.pytorch.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, translations.jsonl, heartbeat/ and checkpoint/; a run that finds a
checkpoint there resumes from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else:
failed.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from typing import Dict, List, Optional

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.mllog import samples
from benchmarks.common.run import Run
from benchmarks.common.stopping import end_process
from benchmarks.common.torch_updates import Rate, Rates
from benchmarks.gnmt import events
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.gnmt.pytorch.data import evaluation_input, order_of, training_input
from benchmarks.gnmt.pytorch.training import Training, build, content, warm_up
from benchmarks.gnmt.schedule import learning_rate
from benchmarks.translation.arrays import DataSet, open_data
from benchmarks.translation.bleu import sacrebleu_score
from benchmarks.translation.pytorch.batches import Batch
from benchmarks.translation.pytorch.evaluation import of_text, quality, score_translations, translate


def train_step(training: Training, batch: Batch, rate: Rate) -> torch.Tensor:
    """Forward, backward and update; returns the loss per token, of which the mean over the ranks is that of all."""
    loss = training.loss(batch)
    # As submitted: the sum over a sentence's tokens, averaged over the sentences; over this rank's before the scaling,
    # so that the scale of fp16 means the same for any batch.
    here = len(batch.source)
    training.updates.scaled(loss / here).backward()
    training.updates.step(rate, batch.sentences / here)
    return loss.detach() * (training.ranks.size / batch.all_tokens)


def evaluate(training: Training, data: DataSet, run: Run) -> Optional[Dict[str, float]]:
    """BLEU of the translations of all test sentences by all ranks, or None if the run is to stop."""
    training.network.eval()
    batches = evaluation_input(training.config, data, run.ranks)
    hypotheses = translate(batches, len(data.test), training.decode, run.ranks, run)
    training.network.train()
    if hypotheses is None:
        return None
    return quality(hypotheses, data, {"bleu": of_text(sacrebleu_score)}, run.ranks, run.output, run.epoch + 1)


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, events.WORDING)
    config, ranks = run.config, run.ranks
    data = run.open(lambda: open_data(run.data))
    with run.initialization():
        training = build(config, data.vocabulary.size, ranks, run.saved)
        warm_up(training)
    run.log(events.hyperparameters(config, ranks.size))
    orders = order_of(config, data, ranks)
    # No sentence, nor the length of one, is read before run_start.
    with ExitStack() as owned, run.timed(lambda: events.timeline(config, run.open(lambda: orders(0)).steps)):
        batches = owned.enter_context(closing(training_input(config, data, orders, ranks, run.position)))
        run.log(samples(len(orders(0).sentences), len(data.test)))
        run.keep(partial(content, training), training.updates.own_content)
        rates = Rates(training.updates, partial(learning_rate, config), config.epochs * orders(0).steps)
        for _ in run.blocks():
            for number in run.steps():
                batch, rate = run.wait_for(batches.next), rates.of(number)
                run.report(train_step(training, batch, rate), rate, batch.all_source_tokens + batch.all_tokens)
            if run.evaluates():
                run.evaluated(evaluate(training, data, run))
    if ranks.rank == 0:
        score_translations(run.output)
    return run.finish()


if __name__ == "__main__":
    end_process(main)
