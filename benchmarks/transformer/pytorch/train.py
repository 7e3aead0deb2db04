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
from typing import Any, Dict, List, Mapping, Optional

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import stopping
from benchmarks.common.run.mllog import samples
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.common.torch import abilities, optimizers
from benchmarks.common.torch.generators import drawn_from, seed_dropout, without_trace
from benchmarks.common.torch.updates import Rate, Rates, ScaleRule, Updates
from benchmarks.transformer import events
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.data import evaluation_order, noise, order_of
from benchmarks.transformer.pytorch.model import Network, Norm
from benchmarks.transformer.pytorch.search import translate_batch
from benchmarks.transformer.schedule import learning_rate
from benchmarks.translation.arrays import DataSet, open_data
from benchmarks.translation.bleu import fairseq_score, plain_score, sacrebleu_score, tokenized_score
from benchmarks.translation.orders import Order
from benchmarks.translation.pytorch import operators
from benchmarks.translation.pytorch.batches import Batch, SourceBatch, TrainingInput, evaluation_batches
from benchmarks.translation.pytorch.evaluation import Score, of_text, of_tokens, quality, score_translations, translate
from benchmarks.translation.pytorch.loss import smoothed_loss


class Training:
    """The network on this rank's device, and its optimizer."""

    def __init__(self, config: Config, vocabulary: int, words: int, ranks: Ranks, saved: Mapping[str, Any]) -> None:
        """Draw the weights, the same on all ranks.

        Args:
            config: of the run.
            vocabulary: entries of the table, padding included.
            words: those of them that a translation may have.
            ranks: of the job.
            saved: a checkpoint's content, which names the implementations; empty: they are chosen.
        """
        self.config, self.ranks, self.words, self.vocabulary = config, ranks, words, vocabulary
        with drawn_from(config.seed):
            self.network = Network(config, vocabulary).to(ranks.context)
        self._choose_kernels(saved.get("kernels", {}))
        self._hidden: Any = torch.compile(self.network, dynamic=True) if config.compile else self.network
        candidates = optimizers.adam_candidates(
            config.learning_rate, (config.beta1, config.beta2), config.epsilon, optimizers.find_apex()
        )
        self.updates = Updates(
            list(self.network.parameters()),
            candidates,
            saved.get("kernel", config.optimizer_kernel),
            ranks,
            clip=config.gradient_clip or None,
            scale=ScaleRule(config.loss_scale, config.loss_scale_window) if config.precision == "fp16" else None,
            split=config.split_optimizer,
        )

    def _choose_kernels(self, saved: Mapping[str, str]) -> None:
        """Choose how loss and norms are computed, by measuring on the sizes of a step; a compiled norm is PyTorch's."""
        config = self.config
        sizes: Dict[str, Mapping[str, Any]] = {"loss": {"rows": operators.LOSS_ROWS, "vocabulary": self.vocabulary}}
        if not config.compile:
            sizes["norm"] = {"rows": config.batch_size, "width": config.width}
        dtype = pytorch.DTYPES[config.precision]
        self.kernels, chosen = operators.choose(config.kernels, sizes, self.ranks, dtype, saved)
        self._of_rows = chosen["loss"]
        for module in self.network.modules():
            if isinstance(module, Norm) and "norm" in chosen:
                module.compute = chosen["norm"]

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """The smoothed loss of this rank's tokens, summed."""
        config, network = self.config, self.network
        with pytorch.autocast(self.ranks.context, config.precision):
            hidden = self._hidden(batch.source, batch.target_in).flatten(0, 1)
            return smoothed_loss(
                hidden,
                network.table.weight,
                None,
                batch.target_out.flatten(),
                config.label_smoothing,
                config.loss_chunk or None,
                batch.rows,
                self._of_rows,
            )

    def decode(self, batch: SourceBatch) -> List[List[int]]:
        """Translate a batch of the test part."""
        return translate_batch(self.network, batch.source, batch.source_lengths, self.words)

    def content(self) -> Dict[str, Any]:
        """What all ranks have in common, for a checkpoint."""
        return {"network": self.network.state_dict(), "kernels": self.kernels, **self.updates.content()}


def build(config: Config, data: DataSet, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    """Build with a checkpoint or fresh weights, ready: warmed up on noise, before the clock."""
    if not saved:
        seed_dropout(config.seed, ranks)
    vocabulary = data.vocabulary.padded(config.vocabulary_multiple)
    training = Training(config, vocabulary, data.vocabulary.size, ranks, saved)
    pytorch.broadcast(training.network.parameters())
    warm_up(training)
    if saved:
        training.network.load_state_dict(saved["network"])
        training.updates.restore(saved)
    return training


def train_step(training: Training, batch: Batch, rate: Rate) -> torch.Tensor:
    """Forward, backward and update on one batch.

    Returns this rank's part of the mean loss over the tokens of all ranks, times the number of ranks, on the device.
    """
    loss = training.loss_sum(batch)
    training.updates.scaled(loss).backward()
    training.updates.step(rate, batch.all_tokens)
    return loss.detach() * (training.ranks.size / batch.all_tokens)


def score_of(config: Config) -> Score:
    """Return the BLEU that a configuration is judged by: of its round's submission, or plain."""
    if config.bleu == "plain":
        return of_text(plain_score)
    return of_tokens(fairseq_score if config.round == "v0.5" else tokenized_score)


def evaluate(training: Training, data: DataSet, order: Order, run: Run) -> Optional[Dict[str, float]]:
    """BLEU of the whole test part as the configuration judges it, and sacreBLEU; None if the run is to stop."""
    batches = evaluation_batches(data.test.source, order, run.ranks)
    hypotheses = translate(batches, len(data.test), training.decode, run.ranks, run)
    if hypotheses is None:
        return None
    scores = {"bleu": score_of(training.config), "sacrebleu": of_text(sacrebleu_score)}
    return quality(hypotheses, data, scores, run.ranks, run.output, run.epoch + 1)


def warm_up(training: Training) -> None:
    """Connect the ranks and compile, by steps on noise at rate 0; weights, optimizer and generators are as before."""
    if not training.config.warm_up_steps:
        return
    batch = noise(training.config, training.vocabulary, training.ranks)
    with without_trace(training.updates, training.ranks):
        if training.config.compile:
            abilities.compile_in_turns(lambda: training.loss_sum(batch).backward(), training.ranks)
            training.updates.gradients.zero_()
        for _ in range(training.config.warm_up_steps):
            train_step(training, batch, 0.0)
            stopping.progress()


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, events.WORDING)
    config, ranks = run.config, run.ranks
    data = run.open(lambda: open_data(run.data))
    with run.initialization():
        training = build(config, data, ranks, run.saved)
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
