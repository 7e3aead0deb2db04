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
from typing import Any, Dict, List, Mapping, Optional

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import stopping
from benchmarks.common.run.mllog import samples
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.common.torch import optimizers
from benchmarks.common.torch.generators import seed_dropout
from benchmarks.common.torch.updates import Rate, Rates, ScaleRule, Updates
from benchmarks.gnmt import events
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.gnmt.pytorch.data import evaluation_input, order_of, synthetic_batch, training_input
from benchmarks.gnmt.pytorch.model import GNMT, Decoding
from benchmarks.gnmt.pytorch.search import search
from benchmarks.gnmt.schedule import learning_rate
from benchmarks.translation.arrays import DataSet, open_data
from benchmarks.translation.bleu import sacrebleu_score
from benchmarks.translation.pytorch import operators
from benchmarks.translation.pytorch.batches import Batch, SourceBatch
from benchmarks.translation.pytorch.evaluation import of_text, quality, score_translations, translate
from benchmarks.translation.pytorch.loss import smoothed_loss


class Training:
    """Network, its updates, and how a batch goes through them."""

    def __init__(self, config: Config, vocabulary: int, ranks: Ranks, saved: Mapping[str, Any]) -> None:
        self.config, self.ranks, self.vocabulary = config, ranks, vocabulary
        padded = -(-vocabulary // config.vocabulary_multiple) * config.vocabulary_multiple
        self.network = GNMT(config, padded).to(ranks.context)
        sizes = {"loss": {"rows": operators.LOSS_ROWS, "vocabulary": padded}}
        dtype = pytorch.DTYPES[config.precision]
        self.kernels, chosen = operators.choose(config.kernels, sizes, ranks, dtype, saved.get("kernels", {}))
        self._of_rows = chosen["loss"]
        candidates = optimizers.adam_candidates(
            config.learning_rate, (config.beta1, config.beta2), config.epsilon, optimizers.find_apex()
        )
        rule = ScaleRule(config.loss_scale, config.loss_scale_interval, config.loss_scale_limit)
        self.updates = Updates(
            list(self.network.parameters()),
            candidates,
            saved.get("kernel", config.optimizer_kernel),
            ranks,
            clip=config.gradient_clip,
            scale=rule if config.precision == "fp16" else None,
            split=config.split_optimizer,
        )

    def loss(self, batch: Batch) -> torch.Tensor:
        """Sum over the tokens of this rank's pairs."""
        network, config = self.network, self.config
        with pytorch.autocast(self.ranks.context, config.precision):
            hidden = network(batch.source, batch.source_lengths, batch.target_in)
            return smoothed_loss(
                hidden.reshape(-1, config.width),
                network.classifier.weight,
                network.classifier.bias,
                batch.target_out.view(-1),
                config.label_smoothing,
                config.loss_chunk or None,
                batch.rows,
                self._of_rows,
            )

    @torch.no_grad()
    def decode(self, batch: SourceBatch) -> List[List[int]]:
        """Translate a batch by beam search."""
        with pytorch.autocast(self.ranks.context, self.config.precision):
            encoded = self.network.encode(batch.source, batch.source_lengths)
            state = Decoding(self.network, encoded, self.config.beam_size)
            return search(
                self.config, self.vocabulary, batch, state, lambda tokens, position, state: state.step(tokens)
            )


def build(config: Config, vocabulary: int, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    """Build with what ``content`` and the updates saved, or with rank 0's fresh weights."""
    # A checkpoint's states of the generators are set when it is read.
    with torch.random.fork_rng(generators(ranks)):
        torch.manual_seed(config.seed)
        training = Training(config, vocabulary, ranks, saved)
    if saved:
        training.network.load_state_dict(saved["network"])
        training.updates.restore(saved)
    else:
        pytorch.broadcast(training.network.parameters())
        seed_dropout(config.seed, ranks)
    return training


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


def warm_up(training: Training) -> None:
    """Take the memory of the largest batch, as the submissions do, and open connections; changes nothing."""
    config = training.config
    with torch.random.fork_rng(generators(training.ranks)):
        batch = synthetic_batch(config, training.vocabulary, training.ranks.context, config.max_length_train)
        for _ in range(config.warm_up_steps):
            training.updates.scaled(training.loss(batch)).backward()
            stopping.progress()
    for parameter in training.network.parameters():
        parameter.grad.zero_()
    pytorch.total([0.0])


def generators(ranks: Ranks) -> List[torch.device]:
    """Return the devices, besides the CPU, whose generators a rank draws from."""
    return [ranks.context] if ranks.context.type == "cuda" else []


def content(training: Training) -> Dict[str, Any]:
    """What all ranks have in common."""
    return {"network": training.network.state_dict(), "kernels": training.kernels, **training.updates.content()}


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
