"""Train the Transformer in PyTorch.

    $ python -m benchmarks.transformer.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.transformer.pytorch.train --config config.json --data DATA --output OUT

Writes result.txt (MLPerf log), metrics.jsonl, heartbeat/, checkpoint/ and, from the last evaluation,
translations.jsonl to OUT, and resumes from a checkpoint there. Exit code 0: finished as planned, the last record of
metrics.jsonl has the reason; otherwise failed.
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
from benchmarks.common.torch import capabilities
from benchmarks.common.torch.flat_optimizer import Rate, Rates, ScaleRule
from benchmarks.common.torch.generators import dry_run, fixed_seed, seed_dropout
from benchmarks.transformer import mlperf, schedule
from benchmarks.transformer.flops import training_flops
from benchmarks.transformer.pytorch import packing
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.data import evaluation_input, order_of
from benchmarks.transformer.pytorch.model import Network, Norm, decode
from benchmarks.translation.arrays import DataSet, open_data
from benchmarks.translation.bleu import fairseq_score, plain_score, sacrebleu_score, tokenized_score
from benchmarks.translation.flops import of_position
from benchmarks.translation.pytorch import evaluation, operators
from benchmarks.translation.pytorch.batches import Batch, synthetic_pairs, training_input
from benchmarks.translation.pytorch.state import Training, adam


def build(config: Config, vocabulary_size: int, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    # Load a checkpoint or initialize the weights, and warm up before the clock starts.
    if not saved:
        seed_dropout(config.seed, ranks)
    padded = -(-vocabulary_size // config.vocabulary_multiple) * config.vocabulary_multiple
    with fixed_seed(config.seed):
        network = Network(config, padded).to(ranks.context)
    sizes: Dict[str, Mapping[str, Any]] = {"loss": {"rows": operators.LOSS_ROWS, "vocabulary": padded}}
    if not config.compile:  # the compiler fuses norms with adjacent operations
        sizes["norm"] = {"rows": config.batch_size, "width": config.width}
        sizes["join"] = {**sizes["norm"], "dropout": config.dropout}
    dtype = pytorch.DTYPES[config.precision]
    kernels, implementations = operators.choose(config.kernels, sizes, ranks, dtype, saved.get("kernels", {}))
    network.row_loss = implementations["loss"]
    packed_attention = packing.choose(config, ranks)
    if packed_attention:
        network.set_packed_attention(packed_attention)
    for module in network.modules():
        if isinstance(module, Norm) and "norm" in implementations:
            module.compute = implementations["norm"]
            plain = kernels["join"] == "plain"
            module.compute_add_norm = (
                partial(operators.join, norm=implementations["norm"]) if plain else implementations["join"]
            )
    if config.compile:
        network.compile(dynamic=True)
    scale = ScaleRule(config.loss_scale, config.loss_scale_window)
    training = Training(config, ranks, vocabulary_size, network, adam(network, config, ranks, saved, scale), kernels)
    pytorch.broadcast(network.parameters())
    warm_up(training)
    if saved:
        training.restore(saved)
    return training


def warm_up(training: Training) -> None:
    # Connect the ranks and compile, by steps at rate 0; weights, optimizer and generators are as before.
    config = training.config
    if not config.warm_up_steps:
        return
    examples = warm_up_batches(config, training.words, training.ranks)
    with dry_run(training.optimizer, training.ranks):
        if config.compile:
            capabilities.compile_in_turns(
                lambda: [training.network.loss_sum(batch).backward() for batch in examples], training.ranks
            )
            training.optimizer.gradients.zero_()
        for batch in examples * config.warm_up_steps:
            train_step(training, batch, 0.0)
            stopping.progress()


def warm_up_batches(config: Config, words: int, ranks: Ranks) -> List[Batch]:
    """Return synthetic batches for which torch.compile makes all the code that training needs, with dynamic shapes.

    Targets are shorter than sources, since the compiler takes equal sizes for the same size and compiles again once
    they differ. If batches can be packed, one batch has padding and is packed.
    """
    length = max(2, config.max_length // 2)
    lengths = torch.full((2, max(1, config.batch_size // length)), length)
    lengths[1] = max(1, length - config.length_multiple)
    ragged = lengths.clone()
    ragged[:, ::2] = 1
    examples = (lengths, ragged) if config.compile and config.packed else (lengths,)
    return [synthetic_pairs(words, pair_lengths, ranks) for pair_lengths in examples]


def train_step(training: Training, batch: Batch, rate: Rate) -> torch.Tensor:
    """Forward, backward and update on one batch.

    Returns this rank's part of the mean loss over the tokens of all ranks, times the number of ranks, on the device.
    """
    loss = training.network.loss_sum(batch)
    training.optimizer.backward(loss)
    training.optimizer.step(rate, batch.all_tokens)
    return loss.detach() * (training.ranks.size / batch.all_tokens)


def score_of(config: Config) -> evaluation.Score:
    # Return the BLEU variant of the configuration: as in the round's submission, or plain.
    if config.bleu == "plain":
        return evaluation.of_text(plain_score)
    return evaluation.of_tokens(fairseq_score if config.round == "v0.5" else tokenized_score)


def evaluate(training: Training, data: DataSet, run: Run) -> Optional[Dict[str, float]]:
    # BLEU of the test part according to the configuration, and sacreBLEU; None if the run must stop.
    batches = evaluation_input(training.config, data, run.ranks)
    translate = partial(decode, training.network, training.words)
    scores = {"bleu": score_of(training.config), "sacrebleu": evaluation.of_text(sacrebleu_score)}
    return evaluation.evaluate(training.network, batches, translate, scores, data, run)


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
        lambda: of_position(training_flops, config, data, orders(0), ranks.size),
    ):
        batches = training_input(data.train, orders, ranks, run.position, ahead=config.prefetch)
        run.log(samples(len(data.train), len(data.test)))
        run.register_state(training.state_dict, training.optimizer.rank_state_dict)
        rates = Rates(training.optimizer, partial(schedule.learning_rate, config), config.epochs * orders(0).steps)
        with closing(batches):
            for _ in run.blocks():
                for number in run.steps():
                    batch, rate = run.wait_for(partial(next, batches)), rates.of(number)
                    run.report(train_step(training, batch, rate), rate, batch.all_tokens)
                if run.evaluates():
                    run.evaluated(evaluate(training, data, run))
    if ranks.rank == 0:
        evaluation.score_translations(run.output)
    return run.finish()


if __name__ == "__main__":
    end_process(main)
