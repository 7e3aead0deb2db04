"""Fine-tune BERT on SQuAD in PyTorch with packed (unpadded) windows.

    $ python -m benchmarks.bert_squad.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.bert_squad.pytorch.train --config config.json --data DATA --output OUT

Writes result.txt (log), metrics.jsonl, heartbeat/, checkpoint/ and, from the last evaluation, predictions.json
(format of SQuAD's evaluate-v1.1.py) and nbest_predictions.json to OUT, and resumes from a checkpoint there. Exit
code 0: finished as planned, the last record of metrics.jsonl has the reason; otherwise failed.
"""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

import torch

from benchmarks.bert_squad import mlperf, schedule
from benchmarks.bert_squad.arrays import DataSet, open_data
from benchmarks.bert_squad.pytorch.config import Config
from benchmarks.bert_squad.pytorch.data import (
    Batch,
    evaluation_batches,
    steps_per_epoch,
    synthetic_batch,
    training_input,
)
from benchmarks.bert_squad.pytorch.evaluation import answer, quality
from benchmarks.bert_squad.pytorch.model import Network
from benchmarks.bert_squad.pytorch.optimizer import adam_candidates, without_correction
from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import stopping
from benchmarks.common.run.mllog import samples
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.common.torch import optimizers
from benchmarks.common.torch.flat_optimizer import ALIGNMENT, FlatOptimizer, ScaleRule
from benchmarks.common.torch.generators import dry_run, fixed_seed, seed_dropout
from benchmarks.language.flops import of_window
from benchmarks.language.pytorch import attention
from benchmarks.language.pytorch.checkpoint import load_weights
from benchmarks.language.pytorch.graphs import captured


class Training:
    # Network and optimizer on this rank's device.

    def __init__(self, config: Config, vocabulary: int, ranks: Ranks, kernel: str, weights: Optional[Path]) -> None:
        """Initialize the weights, the same on all ranks; load the encoder from ``weights`` if given.

        Args:
            config: of the run.
            vocabulary: rows of the word embedding, including padding.
            ranks: of the job.
            kernel: implementation of the optimizer, or "auto".
            weights: pretrained weights.
        """
        self.config, self.ranks, self.vocabulary = config, ranks, vocabulary
        dtype = pytorch.DTYPES[config.precision]
        backend = attention.choose(config.attention, ranks.context, dtype, config.width // config.heads, ranks.rank)
        with fixed_seed(config.seed):
            self.network = Network(config, vocabulary, backend)
        if weights is not None:
            load_weights(self.network.encoder, weights)
        self.network.to(ranks.context)
        # Decayed weights come first in the flat tensor of all.
        parameters = sorted(self.network.parameters(), key=lambda parameter: parameter.dim() < 2)
        decayed = sum(-(-weight.numel() // ALIGNMENT) * ALIGNMENT for weight in parameters if weight.dim() >= 2)
        self.optimizer = FlatOptimizer(
            parameters,
            adam_candidates(config, decayed, optimizers.find_apex()),
            kernel,
            ranks,
            clip=config.gradient_clip or None,
            scale=ScaleRule(config.loss_scale, config.loss_scale_window) if config.precision == "fp16" else None,
            bucket_mb=config.bucket_mb,
            compression=config.gradient_compression,
        )
        without_correction(self.optimizer.inner)
        # Forward and backward for a batch, replayed from a CUDA graph if captured.
        self.forward_and_backward: Callable[[Batch], torch.Tensor] = partial(forward_and_backward, self)

    def state_dict(self) -> Dict[str, Any]:
        # Return the state that all ranks have in common, for a checkpoint.
        return {"network": self.network.state_dict(), **self.optimizer.state_dict()}


def build(config: Config, data: DataSet, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    """Build with a checkpoint, pretrained or fresh weights, ready: warmed up before the clock.

    Raises:
        Problem: the pretrained weights do not fit.
    """
    weights = None if saved else weights_file(config, data.folder)
    multiple = config.vocabulary_multiple
    vocabulary = -(-data.vocabulary.size // multiple) * multiple
    kernel = saved.get("kernel", config.optimizer_kernel)
    training = Training(config, vocabulary, ranks, kernel, weights)
    if not saved:
        seed_dropout(config.seed, ranks)
    pytorch.broadcast(training.network.parameters())
    warm_up(training)
    if saved:
        training.network.load_state_dict(saved["network"])
        training.optimizer.restore(saved)
    return training


def train_step(training: Training, batch: Batch, rate: float) -> torch.Tensor:
    # Forward, backward and update on one batch; return the mean loss of this rank's windows, on the device.
    loss = training.forward_and_backward(batch)
    training.optimizer.step(rate, len(batch.start) * training.ranks.size)
    return loss / len(batch.start)


def forward_and_backward(training: Training, batch: Batch) -> torch.Tensor:
    # Return the sum of the losses of this rank's windows, on the device; the optimizer has the gradients.
    with pytorch.autocast(training.ranks.context, training.config.precision):
        loss = training.network.loss_sum(batch)
    # Ranks may replay or run eagerly in the same step: gradients are therefore reduced outside the graph.
    training.optimizer.backward(loss, last=not training.config.cuda_graph)
    return loss.detach()


@torch.no_grad()
def logits(training: Training, batch: Batch) -> torch.Tensor:
    # Return (T, 2) of windows to be answered.
    training.network.eval()
    with pytorch.autocast(training.ranks.context, training.config.precision):
        logits: torch.Tensor = training.network(batch.rows)
    training.network.train()
    return logits


def evaluate(training: Training, data: DataSet, run: Run) -> Optional[Dict[str, float]]:
    # F1 and exact match over all questions of the test part, 0 to 100; None if the run is to stop.
    batches = evaluation_batches(training.config, data.test, run.ranks)
    predictions = answer(training.config, batches, data, partial(logits, training), run)
    return None if predictions is None else quality(predictions, data, run.ranks, run.output)


def warm_up(training: Training) -> None:
    # Connect the ranks, compile and capture at rate 0; weights, optimizer and generators are as before.
    config, vocabulary, ranks = training.config, training.vocabulary, training.ranks
    with dry_run(training.optimizer, ranks):
        if config.cuda_graph:
            training.forward_and_backward = captured(
                training.forward_and_backward,
                lambda tokens: synthetic_batch(config, vocabulary, ranks, tokens),
                config.batch_size * config.sequence_length,
                config.token_bucket,
                config.warm_up_steps,
            )
            training.optimizer.gradients.zero_()
        batch = synthetic_batch(config, vocabulary, ranks)
        for _ in range(config.warm_up_steps):
            train_step(training, batch, 0.0)
            stopping.progress()
        if config.warm_up_steps:
            logits(training, batch)
    without_correction(training.optimizer.inner)


def weights_file(config: Config, folder: Path) -> Optional[Path]:
    """Return the file of the pretrained weights, which may be in the data folder; None without one.

    Raises:
        Problem: it is not there.
    """
    if not config.checkpoint:
        return None
    path = folder / config.checkpoint
    # TensorFlow's checkpoints consist of multiple files with a common prefix.
    if not path.exists() and not list(path.parent.glob(f"{path.name}.*")):
        raise Problem(
            f"{path} is not there",
            "pretrained weights of BERT",
            "pass the file with --set checkpoint=FILE, or set checkpoint= to start from random weights",
        )
    return path


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, mlperf.WORDING)
    config, ranks = run.config, run.ranks
    data = run.open(lambda: open_data(run.data))
    steps, saved = steps_per_epoch(config, data, ranks), run.saved
    with run.initialization():
        training = run.open(lambda: build(config, data, ranks, saved))
    run.log(mlperf.hyperparameters(config, ranks.size))
    timeline = schedule.timeline(config, steps)
    # No window is read before run_start.
    with run.timed(timeline, partial(of_window, config, data.train)):
        batches = training_input(config, data, steps, ranks, run.position)
        questions = data.manifest["facts"]["questions"]
        run.log(samples(questions["train"], questions["test"]))
        run.register_state(training.state_dict, training.optimizer.rank_state_dict)
        with closing(batches):
            for _ in run.blocks():
                for number in run.steps():
                    batch, rate = (
                        run.wait_for(partial(next, batches)),
                        schedule.learning_rate(config, number, timeline.steps),
                    )
                    run.report(train_step(training, batch, rate), rate)
                if run.evaluates():
                    run.evaluated(evaluate(training, data, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
