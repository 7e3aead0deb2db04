"""Train gpt-oss-20b in PyTorch.

    $ python -m benchmarks.gpt_oss_20b.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.gpt_oss_20b.pytorch.train --config config.json --data DATA --output OUT

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
from benchmarks.gpt_oss_20b.pytorch.config import Config
from benchmarks.llama import mlperf, schedule, tokenization
from benchmarks.llama.dataset import DataSet
from benchmarks.llama.flops import training_flops
from benchmarks.llama.order import Order
from benchmarks.llama.pytorch import parallel, texts
from benchmarks.llama.pytorch.data import (
    Batch,
    MicroBatch,
    evaluated_samples,
    evaluation_input,
    open_for,
    remove_order,
    shown_samples,
    synthetic_batch,
    synthetic_micro_batch,
    training_input,
    training_order,
)
from benchmarks.llama.pytorch.model import Training
from benchmarks.llama.pytorch.network import IGNORE_INDEX


def build(config: Config, vocabulary: int, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    # Build for a padded vocabulary, with a checkpoint or fresh weights, ready: warmed up before the clock.
    training = Training(config, vocabulary, ranks)
    batch = synthetic_batch(config, vocabulary, ranks)
    evaluated = synthetic_micro_batch(config, vocabulary, ranks, config.eval_batch_size)
    for _ in range(config.warm_up_steps):
        evaluation_loss(training, evaluated)  # before the step: it leaves gathered weights, which hide restored ones
        train_step(training, batch, 0.0)  # which changes no weight
        stopping.progress()
    training.forget()
    if saved:
        training.restore(saved["every_rank"])
    return training


def train_step(training: Training, batch: Batch, rate: float) -> torch.Tensor:
    """Forward and backward on all micro-batches, and one update.

    Returns the mean of the micro-batches' mean losses, on the device. Its mean over the ranks is the loss of the step.
    """
    total = torch.zeros((), device=training.ranks.context)
    for part in batch:
        # As Megatron's loss: the mean of a micro-batch's labels, then of micro-batches and, by FSDP, of ranks.
        labels = (part.labels != IGNORE_INDEX).sum().clamp(min=1) * len(batch)
        loss = training.network(part.tokens, part.labels) / labels
        loss.backward()
        total += loss.detach()
    for group in training.optimizer.param_groups:
        group["lr"] = rate
    parallel.clip(training.parameters.values(), training.config.gradient_clip)
    training.optimizer.step()
    training.optimizer.zero_grad()
    return total


@torch.no_grad()
def evaluation_loss(training: Training, part: MicroBatch) -> torch.Tensor:
    # Summed loss of this rank's samples.
    return training.network(part.tokens, part.labels)


@torch.no_grad()
def evaluate(training: Training, data: DataSet, samples: Order, run: Run) -> Optional[Dict[str, float]]:
    # Mean loss per label of the evaluation samples on all ranks; None if the run must stop.
    sums = torch.zeros(3, dtype=torch.float64, device=run.ranks.context)
    for part in run.interruptible(evaluation_input(training.config, data.test, samples, run.ranks)):
        sums[0] += evaluation_loss(training, part)
        is_label = part.labels != IGNORE_INDEX
        sums[1] += is_label.sum()
        sums[2] += is_label.any(dim=1).sum()  # not the samples that only fill a batch
    if run.interrupted:
        return None
    loss, labels = run.total(sums, len(samples))
    return {"log_perplexity": loss / labels}


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, mlperf.wording("gpt_oss_20b"), reshards=True)
    config, ranks = run.config, run.ranks
    data = run.open(lambda: open_for(config, run.data))
    vocabulary = data.padded_vocabulary(config.vocabulary_multiple)
    with run.initialization():
        training = run.open(lambda: build(config, vocabulary, ranks, run.saved))
        samples = training_order(config, data, run)
        # The reference's megatron_validation_consumed_samples.patch shuffles the samples of one evaluation.
        evaluated = evaluated_samples(config, data, 1)
    flops = partial(training_flops, config, vocabulary, config.sequence_length)
    run.log(mlperf.hyperparameters(config, ranks.size))
    # Tokens must not be read before run_start.
    with run.timed(schedule.timeline(config, ranks.size), flops) as timeline:
        batches = training_input(config, data.train, samples, ranks, range(run.position, timeline.steps))
        run.register_state(dict, training.state_dict)
        with closing(batches):
            for _ in run.blocks():
                for number in run.steps():
                    rate = schedule.megatron_learning_rate(config, number)
                    run.report(train_step(training, run.wait_for(partial(next, batches)), rate), rate)
                if run.evaluates():
                    run.evaluated(evaluate(training, data, evaluated, run))
        if not run.interrupted:
            # As the reference logs it: of the samples that the run trained on.
            run.log(mllog.samples(run.position * config.global_batch(ranks.size), len(evaluated)))
    if not run.interrupted:
        remove_order(run)
        texts.write(
            training.network,
            shown_samples(data, evaluated),
            run.data / tokenization.FILE,
            ranks,
            config.seed,
            run.output,
        )
    return run.finish()


if __name__ == "__main__":
    end_process(main)
