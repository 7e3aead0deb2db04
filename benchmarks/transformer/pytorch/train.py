"""Train the Transformer in PyTorch: batches of so many tokens in, translations judged by BLEU, MLPerf events out.

    $ python -m benchmarks.transformer.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.transformer.pytorch.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/, checkpoint/ and translations.jsonl, of the last evaluation;
a run that finds a checkpoint there resumes from it. Exit code 0: ended as planned, the last record of metrics.jsonl
says how; else: failed.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Dict, List, Optional

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.mllog import samples
from benchmarks.common.run import Run
from benchmarks.common.stopping import end_process
from benchmarks.common.torch_updates import Rate, Rates
from benchmarks.transformer import events
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.data import evaluation_order, order_of
from benchmarks.transformer.pytorch.training import Training, build, score_of
from benchmarks.transformer.schedule import learning_rate
from benchmarks.translation.arrays import DataSet, open_data
from benchmarks.translation.bleu import sacrebleu_score
from benchmarks.translation.orders import Order
from benchmarks.translation.pytorch.batches import Batch, TrainingInput, evaluation_batches
from benchmarks.translation.pytorch.evaluation import of_text, quality, score_translations, translate


def train_step(training: Training, batch: Batch, rate: Rate) -> torch.Tensor:
    """Forward, backward and update on one batch.

    Returns this rank's part of the mean loss over the tokens of all ranks, times the number of ranks, on the device.
    """
    loss = training.loss_sum(batch)
    training.updates.scaled(loss).backward()
    training.updates.step(rate, batch.all_tokens)
    return loss.detach() * (training.ranks.size / batch.all_tokens)


def evaluate(training: Training, data: DataSet, order: Order, run: Run) -> Optional[Dict[str, float]]:
    """BLEU of the whole test part as the configuration judges it, and sacreBLEU; None if the run is to stop."""
    batches = evaluation_batches(data.test.source, order, run.ranks)
    hypotheses = translate(batches, len(data.test), training.decode, run.ranks, run)
    if hypotheses is None:
        return None
    scores = {"bleu": score_of(training.config), "sacrebleu": of_text(sacrebleu_score)}
    return quality(hypotheses, data, scores, run.ranks, run.output, run.epoch + 1)


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, events.WORDING)
    config, ranks = run.config, run.ranks
    data = run.open(lambda: open_data(run.data))
    with run.initialization():
        training = build(config, data, ranks, run.saved, train_step)
    run.log(events.hyperparameters(config, ranks.size))
    orders = order_of(config, data, ranks)
    # No sentence, nor the length of one, is read before run_start.
    with run.timed(lambda: events.timeline(config, run.open(lambda: orders(0)).steps)):
        batches = TrainingInput(data.train, orders, ranks, run.position, ahead=config.prefetch)
        evaluation = evaluation_order(config, data, ranks)
        run.log(samples(len(data.train), len(data.test)))
        run.keep(training.content, training.updates.own_content)
        rates = Rates(training.updates, partial(learning_rate, config), config.epochs * orders(0).steps)
        with closing(batches):
            for _ in run.blocks():
                for number in run.steps():
                    batch, rate = run.wait_for(batches.next), rates.of(number)
                    run.report(train_step(training, batch, rate), rate, batch.all_tokens)
                if run.evaluates():
                    run.evaluated(evaluate(training, data, evaluation, run))
    if ranks.rank == 0:
        score_translations(run.output)
    return run.finish()


if __name__ == "__main__":
    end_process(main)
