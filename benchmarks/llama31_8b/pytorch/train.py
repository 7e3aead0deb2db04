"""Train Llama 3.1 8B in PyTorch.

    $ python -m benchmarks.llama31_8b.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.llama31_8b.pytorch.train --config config.json --data DATA --output OUT

Writes result.txt (MLPerf log), metrics.jsonl, texts.jsonl, order/, heartbeat/ and checkpoint/ to OUT, and resumes
from a checkpoint there. Exit code 0: finished as planned, the last record of metrics.jsonl has the reason; otherwise
failed.
"""

from contextlib import closing
from functools import partial
from typing import Any, Dict, List, Mapping, Optional

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import mllog, stopping
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.llama import mlperf, schedule
from benchmarks.llama.dataset import DataSet, open_data
from benchmarks.llama.flops import training_flops
from benchmarks.llama.order import Order
from benchmarks.llama.pytorch import texts
from benchmarks.llama.pytorch.data import (
    Batch,
    MicroBatch,
    evaluated_samples,
    evaluation_input,
    remove_order,
    shown_samples,
    synthetic_batch,
    synthetic_micro_batch,
    training_input,
    training_order,
)
from benchmarks.llama.pytorch.model import Training
from benchmarks.llama.pytorch.network import IGNORE_INDEX
from benchmarks.llama.pytorch.parallel import full_tensor, loss_context
from benchmarks.llama.tokenization import FILE
from benchmarks.llama31_8b.pytorch.config import Config


def build(config: Config, vocabulary: int, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    # Build for a padded vocabulary, with a checkpoint or fresh weights, ready: warmed up before the clock.
    training = Training(config, vocabulary, ranks)
    warm_up(training)
    if saved:
        training.restore(saved["every_rank"])
    return training


def warm_up(training: Training) -> None:
    # Open connections, compile and take memory at rate 0, which changes no weight.
    config, inputs = training.config, (training.config, training.vocabulary, training.ranks)
    batch, evaluated = synthetic_batch(*inputs), synthetic_micro_batch(*inputs, config.eval_batch_size)
    for _ in range(config.warm_up_steps):
        evaluation_loss(training, evaluated)  # before the step: it leaves gathered weights, which hide restored ones
        train_step(training, batch, 0.0)
        stopping.progress()
    training.forget()


def train_step(training: Training, batch: Batch, rate: float) -> torch.Tensor:
    """Forward and backward on all micro-batches, and one update.

    Returns the mean loss of this rank's positions, on the device. Its mean over the ranks is the loss of the step.
    """
    config, position = training.config, training.position
    positions = sum(part.labels.numel() for part in batch)
    total = torch.zeros((), device=training.ranks.context)
    for part in batch:
        with loss_context(position):
            # FSDP averages gradients over ranks, so normalize by the rank's positions.
            loss = training.network(part.tokens, part.labels, part.positions) / positions
            loss.backward()
        total += full_tensor(loss.detach())
    for group in training.optimizer.param_groups:
        group["lr"] = rate
    torch.nn.utils.clip_grad_norm_(training.network.parameters(), config.gradient_clip, foreach=True)
    training.optimizer.step()
    training.optimizer.zero_grad()
    return total


@torch.no_grad()
def evaluation_loss(training: Training, part: MicroBatch) -> torch.Tensor:
    # Summed loss of the samples of this rank's group.
    with loss_context(training.position):
        return full_tensor(training.network(part.tokens, part.labels, part.positions))


@torch.no_grad()
def evaluate(training: Training, data: DataSet, samples: Order, run: Run) -> Optional[Dict[str, float]]:
    # Mean loss per token of the evaluation samples on all ranks; None if the run must stop.
    config, position = training.config, training.position
    sums = torch.zeros(2, dtype=torch.float64, device=run.ranks.context)
    for part in run.interruptible(evaluation_input(config, data.test, samples, run.ranks)):
        sums[0] += evaluation_loss(training, part)
        sums[1] += (part.labels != IGNORE_INDEX).sum()
    if run.interrupted:
        return None
    # Tensor-parallel ranks have the same loss.
    tokens = len(samples) * config.sequence_length
    (loss,) = run.total(sums, tokens * position.tensor)
    return {"log_perplexity": loss / (tokens * position.tensor)}


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, mlperf.wording("llama31_8b"), reshards=True)
    config, ranks = run.config, run.ranks
    data = run.open(lambda: open_data(run.data))
    vocabulary = data.padded_vocabulary(config.vocabulary_multiple)
    with run.initialization():
        training = run.open(lambda: build(config, vocabulary, ranks, run.saved))
        samples = training_order(config, data, run)
        evaluated = evaluated_samples(config, data, schedule.evaluations(config, ranks.size))
    flops = partial(training_flops, config, vocabulary, config.sequence_length)
    run.log(mlperf.hyperparameters(config, ranks.size))
    # Tokens must not be read before run_start.
    with run.timed(schedule.timeline(config, ranks.size), flops) as timeline:
        batches = training_input(config, data.train, samples, ranks, range(run.position, timeline.steps))
        run.register_state(dict, training.state_dict)
        with closing(batches):
            for _ in run.blocks():
                for number in run.steps():
                    rate = schedule.learning_rate(config, number)
                    run.report(train_step(training, run.wait_for(partial(next, batches)), rate), rate)
                if run.evaluates():
                    run.evaluated(evaluate(training, data, evaluated, run))
        if not run.interrupted:
            # As the reference logs it: of the samples that the run trained on.
            run.log(mllog.samples(run.position * config.global_batch(ranks.size), len(evaluated)))
    if not run.interrupted:
        remove_order(run)
    # With context or tensor parallelism, prompts of arbitrary length cannot be sharded.
    if not run.interrupted and config.group == 1:
        texts.write(training.network, shown_samples(data, evaluated), run.data / FILE, ranks, config.seed, run.output)
    return run.finish()


if __name__ == "__main__":
    end_process(main)
