"""Train GNMT v2 in PyTorch.

    $ python -m benchmarks.gnmt.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.gnmt.pytorch.train --config config.json --data DATA --output OUT

Writes result.txt (MLPerf log), metrics.jsonl, translations.jsonl, heartbeat/ and checkpoint/ to OUT, and resumes
from a checkpoint there. Exit code 0: finished as planned, the last record of metrics.jsonl has the reason; otherwise
failed.
"""

from contextlib import closing
from functools import partial
from typing import Any, Dict, List, Mapping, Optional

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import stopping
from benchmarks.common.run.mllog import samples
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.common.torch.flat_optimizer import Rate, Rates, ScaleRule
from benchmarks.common.torch.generators import dry_run, fixed_seed, seed_dropout
from benchmarks.gnmt import mlperf, schedule
from benchmarks.gnmt.flops import training_flops
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.gnmt.pytorch.data import evaluation_input, order_of, shape
from benchmarks.gnmt.pytorch.model import GNMT, decode
from benchmarks.gnmt.pytorch.operators import OPERATORS
from benchmarks.translation.arrays import DataSet, open_data
from benchmarks.translation.bleu import sacrebleu_score
from benchmarks.translation.flops import of_pair
from benchmarks.translation.pytorch import evaluation, operators
from benchmarks.translation.pytorch.batches import Batch, synthetic_batch, training_input
from benchmarks.translation.pytorch.state import Training, adam

SCORES = {"bleu": evaluation.of_text(sacrebleu_score)}


def build(config: Config, vocabulary_size: int, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    # Load a checkpoint or initialize the weights, and warm up before the clock starts.
    if not saved:
        seed_dropout(config.seed, ranks)
    padded = -(-vocabulary_size // config.vocabulary_multiple) * config.vocabulary_multiple
    with fixed_seed(config.seed):
        network = GNMT(config, padded).to(ranks.context)
    length = config.max_length_train // 2
    sizes = {
        "loss": {"rows": operators.LOSS_ROWS, "vocabulary": padded},
        "attention": {"sentences": config.batch_size, "targets": length, "sources": length, "width": config.width},
    }
    dtype = pytorch.DTYPES[config.precision]
    kernels, implementations = operators.choose(
        config.kernels, sizes, ranks, dtype, saved.get("kernels", {}), registry={**operators.OPERATORS, **OPERATORS}
    )
    network.row_loss, network.decoder.attention.weigh = implementations["loss"], implementations["attention"]
    scale = ScaleRule(config.loss_scale, config.loss_scale_interval, config.loss_scale_limit)
    training = Training(config, ranks, vocabulary_size, network, adam(network, config, ranks, saved, scale), kernels)
    pytorch.broadcast(network.parameters())
    warm_up(training)
    if saved:
        training.restore(saved)
    return training


def warm_up(training: Training) -> None:
    # Allocate the memory of the largest batch, as in the submissions, and open connections; restores the state.
    config, multiple = training.config, shape(training.config).multiple
    length = -(-config.max_length_train // multiple) * multiple
    batch = synthetic_batch(training.words, config.batch_size, length, training.ranks)
    with dry_run(training.optimizer, training.ranks):
        for _ in range(config.warm_up_steps):
            train_step(training, batch, 0.0)
            stopping.progress()


def train_step(training: Training, batch: Batch, rate: Rate) -> torch.Tensor:
    # Forward, backward and update. Returns the loss per token; the mean over the ranks is the step loss.
    loss = training.network.loss_sum(batch)
    # As submitted: sum over the tokens, mean over the sentences. Normalize by the rank's sentences before scaling, so
    # that the fp16 loss scale is independent of the batch size.
    here = len(batch.source)
    training.optimizer.backward(loss / here)
    training.optimizer.step(rate, batch.sentences / here)
    return loss.detach() * (training.ranks.size / batch.all_tokens)


def evaluate(training: Training, data: DataSet, run: Run) -> Optional[Dict[str, float]]:
    # BLEU of the translations of all test sentences by all ranks, or None if the run is to stop.
    batches = evaluation_input(training.config, data, run.ranks)
    translate = partial(decode, training.network, training.words)
    return evaluation.evaluate(training.network, batches, translate, SCORES, data, run)


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, mlperf.WORDING)
    config, ranks = run.config, run.ranks
    data = run.open(lambda: open_data(run.data))
    with run.initialization():
        training = build(config, data.vocabulary.size, ranks, run.saved)
    run.log(mlperf.hyperparameters(config, ranks.size))
    orders = order_of(config, data, ranks)
    # Sentences and lengths must not be read before run_start.
    with run.timed(
        lambda: schedule.timeline(config, run.open(lambda: orders(0)).steps),
        lambda: of_pair(training_flops, config, data, orders(0)),
    ):
        batches = training_input(data.train, orders, ranks, run.position, shape(config), config.prefetch)
        run.log(samples(len(orders(0).sentences), len(data.test)))
        run.register_state(training.state_dict, training.optimizer.rank_state_dict)
        rates = Rates(training.optimizer, partial(schedule.learning_rate, config), config.epochs * orders(0).steps)
        with closing(batches):
            for _ in run.blocks():
                for number in run.steps():
                    batch, rate = run.wait_for(partial(next, batches)), rates.of(number)
                    loss = train_step(training, batch, rate)
                    run.report(loss, rate, batch.all_source_tokens + batch.all_tokens)
                if run.evaluates():
                    run.evaluated(evaluate(training, data, run))
    if ranks.rank == 0:
        evaluation.score_translations(run.output)
    return run.finish()


if __name__ == "__main__":
    end_process(main)
