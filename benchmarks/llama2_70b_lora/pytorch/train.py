"""Fine-tune Llama 2 70B with LoRA in PyTorch.

    $ python -m benchmarks.llama2_70b_lora.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.llama2_70b_lora.pytorch.train --config config.json --data DATA \
        --output OUT

Writes result.txt (MLPerf log), metrics.jsonl, heartbeat/, checkpoint/ (adapters) and, at the end of the run,
adapter/ (peft format) to OUT, and resumes from a checkpoint there. Exit code 0: finished as planned, the last record
of metrics.jsonl has the reason; otherwise failed.
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
from benchmarks.llama.flops import adapter_flops
from benchmarks.llama.pytorch import adapters
from benchmarks.llama.pytorch.parallel import full_tensor, loss_context
from benchmarks.llama2_70b_lora import mlperf, schedule
from benchmarks.llama2_70b_lora.dataset import DataSet, open_data
from benchmarks.llama2_70b_lora.pytorch.config import Config
from benchmarks.llama2_70b_lora.pytorch.data import (
    Batch,
    MicroBatch,
    evaluation_input,
    synthetic_batch,
    training_input,
)
from benchmarks.llama2_70b_lora.pytorch.model import Training

ADAPTER = "adapter"  # a run's subfolder with the trained adapters


def build(config: Config, data: DataSet, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    # Load the base and a checkpoint's adapters, or initialize new ones, and warm up before the clock starts.
    base = data.base(config.base) if config.base else None
    training = Training(config, data.padded_vocabulary(config.vocabulary_multiple), ranks, base)
    warm_up(training)
    if saved:
        training.restore(saved["every_rank"])
    return training


def warm_up(training: Training) -> None:
    # Open connections and take memory at rate 0, which changes no weight.
    batch = synthetic_batch(training.config, training.vocabulary, training.ranks)
    part = batch[0]
    evaluated = part._replace(tokens=part.tokens[:1], labels=part.labels[:1], samples=part.samples[:1])
    for _ in range(training.config.warm_up_steps):
        evaluation_loss(training, evaluated)
        train_step(training, batch, 0.0)
        stopping.progress()
    training.forget()


def mean_loss(training: Training, part: MicroBatch) -> torch.Tensor:
    """Return the mean loss over the labels. Averaging over the ranks that share the samples gives their loss."""
    loss = training.network(part.tokens, part.labels, part.positions)
    return loss * (training.position.context / max(1, part.counted))


def train_step(training: Training, batch: Batch, rate: float) -> torch.Tensor:
    """Forward and backward on all micro-batches, and one update of the adapters.

    Returns the mean loss of the micro-batches, on the device. Its mean over the ranks is the loss of the step.
    """
    dropout, total = training.dropout, torch.zeros((), device=training.ranks.context)
    for part in batch:
        dropout.samples, dropout.positions = part.samples, part.positions
        with loss_context(training.position):
            loss = mean_loss(training, part) / len(batch)
            loss.backward()
        total += full_tensor(loss.detach())
    dropout.samples = adapters.NO_SAMPLES
    for group in training.optimizer.param_groups:
        group["lr"] = rate
    torch.nn.utils.clip_grad_norm_(training.parameters.values(), training.config.gradient_clip, foreach=True)
    training.optimizer.step()
    training.optimizer.zero_grad()
    return total


@torch.no_grad()
def evaluation_loss(training: Training, part: MicroBatch) -> torch.Tensor:
    # Mean loss of the samples of this rank's group.
    with loss_context(training.position):
        return full_tensor(mean_loss(training, part))


@torch.no_grad()
def evaluate(training: Training, data: DataSet, run: Run) -> Optional[Dict[str, float]]:
    # Mean over the samples of the per-sample mean loss, on all ranks; None if the run must stop.
    sums = torch.zeros(2, dtype=torch.float64, device=run.ranks.context)
    for part in run.interruptible(evaluation_input(training.config, data.test, run.ranks)):
        sums[0] += evaluation_loss(training, part)
        sums[1] += part.counted > 0
    if run.interrupted:
        return None
    # All ranks that share a sample have counted it.
    samples = len(data.test) * training.config.group
    (loss,) = run.total(sums, samples)
    return {"eval_loss": loss / samples}


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, mlperf.WORDING, reshards=True)
    config, ranks = run.config, run.ranks
    data = run.open(lambda: open_data(run.data))
    with run.initialization():
        training = run.open(lambda: build(config, data, ranks, run.saved))
    flops = partial(adapter_flops, config, training.vocabulary, config.sequence_length)
    run.log(mlperf.hyperparameters(config, ranks.size))
    # No token is read before run_start.
    with run.timed(schedule.timeline(config, ranks.size), flops) as timeline:
        run.log(mllog.samples(len(data.train), len(data.test)))
        batches = training_input(config, data.train, ranks, range(run.position, timeline.steps))
        run.register_state(dict, training.state_dict)
        with closing(batches):
            for _ in run.blocks():
                for number in run.steps():
                    rate = schedule.learning_rate(config, number)
                    run.report(train_step(training, run.wait_for(partial(next, batches)), rate), rate)
                if run.evaluates():
                    run.evaluated(evaluate(training, data, run))
    if not run.interrupted:
        training.save_adapters(run.output / ADAPTER)
    return run.finish()


if __name__ == "__main__":
    end_process(main)
