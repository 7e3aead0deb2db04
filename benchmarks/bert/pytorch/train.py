"""Train BERT in PyTorch with packed (unpadded) sequences.

    $ python -m benchmarks.bert.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.bert.pytorch.train --config config.json --data DATA --output OUT

Writes result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/ to OUT, and resumes from a checkpoint
there. Exit code 0: finished as planned, the last record of metrics.jsonl has the reason; otherwise failed.
"""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional

import torch

from benchmarks.bert import mlperf, schedule
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import Batch, MicroBatch, evaluation_input, synthetic_batch, training_input
from benchmarks.bert.pytorch.model import Network, decay_of, parts_of
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import mllog, stopping
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.common.torch import capabilities, lamb
from benchmarks.common.torch.flat_optimizer import FlatOptimizer, Rate, Rates, ScaleRule
from benchmarks.common.torch.generators import dry_run, fixed_seed, seed_dropout
from benchmarks.language.arrays import DataSet, Samples, open_data
from benchmarks.language.flops import of_sample
from benchmarks.language.pytorch import attention, checkpoint, fp8, low_precision
from benchmarks.language.pytorch.encoder import shape_of
from benchmarks.language.pytorch.graphs import captured

LARGEST_SCALE = float(1 << 24)  # largest scale of the loss, as apex has it (amp/scaler.py, max_loss_scale)
MANY_PARTS = 8  # micro-batches from which a step can be interrupted; ranks then synchronize after every micro-batch


class Training:
    # Network and optimizer on this rank's device, and the progress within a step.

    def __init__(
        self, config: Config, vocabulary: int, ranks: Ranks, kernel: str = "", weights: Optional[Path] = None
    ) -> None:
        """Initialize the weights, the same on all ranks, or load them from a file.

        Args:
            config: of the run.
            vocabulary: rows of the word embedding, including padding.
            ranks: of the job.
            kernel: optimizer implementation in a checkpoint; "": choose according to ``config``.
            weights: file with initial weights.
        """
        self.config, self.ranks, self.vocabulary = config, ranks, vocabulary
        dtype, size = pytorch.DTYPES[config.precision], config.width // config.heads
        backend = attention.choose(config.attention, ranks.context, dtype, size, ranks.rank)
        with fixed_seed(config.seed):
            network = Network(shape_of(config, vocabulary), backend, config.compile)
        if weights is not None:
            checkpoint.fill(checkpoint.published_tensors(network.state_dict()), checkpoint.read(weights), weights)
        self.network = network.to(ranks.context)
        self.kept = fp8.set_up(network.encoder, config, ranks)
        self.optimizer = flat_optimizer(network, config, ranks, kernel or config.optimizer_kernel)
        # Forward and backward for a micro-batch (and whether it is the last), replayed from a CUDA graph if captured.
        self.micro_step: Callable[[MicroBatch, bool], torch.Tensor] = partial(micro_step, self)
        # Finished micro-batches of the step, and the sum of their losses; the optimizer has their gradients.
        self.done, self.loss = 0, torch.zeros((), device=ranks.context)

    def state_dict(self) -> Dict[str, Any]:
        # Return the state that all ranks have in common, for a checkpoint.
        return {"network": self.network.state_dict(), **self.optimizer.state_dict()}

    def rank_state_dict(self) -> Dict[str, Any]:
        # Return the state of this rank for a checkpoint, also within a step.
        state = self.optimizer.rank_state_dict()
        if self.done:
            state["done"] = {"parts": self.done, "loss": self.loss, "gradients": self.optimizer.gradients}
        return state

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.network.load_state_dict(saved["network"])
        self.optimizer.restore(saved)
        if "done" in saved:
            self.done = saved["done"]["parts"]
            self.loss.copy_(saved["done"]["loss"])
            self.optimizer.gradients.copy_(saved["done"]["gradients"])


def flat_optimizer(network: Network, config: Config, ranks: Ranks, kernel: str) -> FlatOptimizer:
    # Return the optimizer of the network's weights, LAMB; ``kernel`` is the implementation, or "auto".
    named_parameters = list(network.named_parameters())
    groups = lamb.parameter_groups(named_parameters, partial(decay_of, config=config), parts_of)
    options = lamb.Options((config.beta1, config.beta2), config.epsilon)
    split = config.split_optimizer and ranks.size > 1
    scale = ScaleRule(config.loss_scale, config.loss_scale_window, LARGEST_SCALE)
    return FlatOptimizer(
        [parameter for _, parameter in named_parameters],
        lamb.lamb_candidates(groups, options, lamb.find_apex(), ranks if split else None),
        "fused" if split else kernel,
        ranks,
        clip=config.gradient_clip or None,
        scale=scale if config.precision == "fp16" else None,
        split=split,
        bucket_mb=config.bucket_mb,
        compression=config.gradient_compression,
    )


def build(
    config: Config, data: DataSet, ranks: Ranks, saved: Mapping[str, Any], weights: Optional[Path] = None
) -> Training:
    """Build with a checkpoint, given or fresh weights, ready: warmed up before the clock.

    Raises Problem where a file of weights does not fit.
    """
    multiple = config.vocabulary_multiple
    vocabulary = -(-data.vocabulary.size // multiple) * multiple
    training = Training(config, vocabulary, ranks, saved.get("kernel", ""), None if saved else weights)
    if not saved:
        seed_dropout(config.seed, ranks)
    pytorch.broadcast(training.network.parameters())
    warm_up(training)
    if saved:
        training.restore(saved)
    low_precision.refresh(training.kept)
    return training


def train_step(
    training: Training,
    batch: Batch,
    rate: Rate,
    interruptible: Callable[[List[MicroBatch]], Iterable[MicroBatch]] = iter,
) -> Optional[torch.Tensor]:
    """Forward and backward on the remaining micro-batches, and one update.

    Returns this rank's part of the mean loss over all ranks, times the number of ranks, on the device. Returns None
    if ``interruptible`` stopped; a checkpoint of ``training`` then continues within the step.
    """
    for micro_batch in interruptible(batch[training.done :]):
        training.done += 1
        # Losses are weighted: their sum is the loss of the step.
        training.loss += training.micro_step(micro_batch, training.done == len(batch))
    if training.done < len(batch):
        return None
    training.optimizer.step(rate, 1.0)
    low_precision.refresh(training.kept)
    loss = training.loss * training.ranks.size
    training.loss.zero_()
    training.done = 0
    return loss


def micro_step(training: Training, micro_batch: MicroBatch, last: bool = True) -> torch.Tensor:
    # Forward and backward on a micro-batch; return its part of the mean loss.
    with pytorch.autocast(training.ranks.context, training.config.precision):
        loss = training.network.loss(micro_batch)
    training.optimizer.backward(loss, last)
    return loss.detach()


def evaluation_sums(training: Training, part: MicroBatch) -> torch.Tensor:
    # Sums over the samples of a part, see Network.figures.
    with pytorch.autocast(training.ranks.context, training.config.precision):
        return training.network.figures(part)


def evaluate(training: Training, samples: Samples, run: Run) -> Optional[Dict[str, float]]:
    # Fraction of correctly predicted masked tokens on all ranks, and other figures; None if the run must stop.
    sums = torch.zeros(5, dtype=torch.float64, device=run.ranks.context)
    training.network.eval()
    with closing(evaluation_input(training.config, samples, run.ranks)) as parts:
        for part in run.interruptible(parts):
            if part is not None:
                sums += evaluation_sums(training, part)
    training.network.train()
    if run.interrupted:
        return None
    masked = len(samples.masked_labels)
    right, loss, follows, count = run.total(sums, masked)
    return {
        "masked_accuracy": right / masked,
        "masked_loss": loss / masked,
        "next_accuracy": follows / count,
    }


def warm_up(training: Training) -> None:
    # Connect the ranks, compile and capture at rate 0; weights, optimizer and generators are as before.
    config = training.config
    with dry_run(training.optimizer, training.ranks):
        if config.compile and (config.cuda_graph or config.warm_up_steps):
            example = synthetic_batch(config, training.vocabulary, training.ranks)[0]
            capabilities.compile_in_turns(partial(compile_layers, training, example), training.ranks)
            training.optimizer.gradients.zero_()
        if config.cuda_graph:
            # Ranks may replay or run eagerly in the same step: gradients are therefore reduced outside the graph.
            replayed = captured(
                lambda micro_batch: micro_step(training, micro_batch, False),
                lambda tokens: synthetic_batch(config, training.vocabulary, training.ranks, tokens)[0],
                config.batch_size // config.accumulation * config.positions,
                config.token_bucket,
                config.warm_up_steps,
            )
            training.micro_step = lambda micro_batch, last: replayed(micro_batch)
            training.optimizer.gradients.zero_()
        if config.warm_up_steps:
            batch = synthetic_batch(config, training.vocabulary, training.ranks)
            for _ in range(config.warm_up_steps):
                train_step(training, batch, 0.0)
                stopping.progress()
            warm_up_evaluation(training, batch[0])


def warm_up_evaluation(training: Training, part: MicroBatch) -> None:
    training.network.eval()
    evaluation_sums(training, part)
    training.network.train()


def compile_layers(training: Training, part: MicroBatch) -> None:
    # Both graphs: for training and for evaluation.
    training.micro_step(part, False)
    warm_up_evaluation(training, part)


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, mlperf.WORDING)
    config, ranks, saved = run.config, run.ranks, run.saved
    data = run.open(lambda: open_data(run.data))
    weights = run.data / config.checkpoint if config.checkpoint else None
    with run.initialization():
        training = run.open(lambda: build(config, data, ranks, saved, weights))
    run.log(mlperf.hyperparameters(config, ranks.size, data.max_predictions))
    flops = partial(of_sample, config, data.vocabulary.size, data.train)
    # No sample is read before run_start.
    with run.timed(schedule.timeline(config, ranks.size), flops) as timeline:
        optimizer = training.optimizer
        batches = training_input(config, data.train, ranks, run.position + optimizer.uncounted)
        run.register_state(training.state_dict, training.rank_state_dict)
        # As submitted: neither the rate nor the samples trained on advance with a step that is skipped.
        rates = Rates(optimizer, partial(schedule.learning_rate, config), timeline.steps)
        run.on_skipped_steps(optimizer.skipped_since)
        interruptible = run.interruptible if config.accumulation >= MANY_PARTS else iter
        with closing(batches):
            for _ in run.blocks():
                for number in run.steps():
                    rate = rates.of(number)
                    run.report(train_step(training, run.wait_for(partial(next, batches)), rate, interruptible), rate)
                if run.evaluates():
                    run.evaluated(evaluate(training, data.test, run))
        if not run.interrupted:
            # As submitted: of the samples that the run trained on.
            run.log(mllog.samples(run.position * config.batch_size * ranks.size, len(data.test)))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
