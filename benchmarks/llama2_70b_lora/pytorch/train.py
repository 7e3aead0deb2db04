"""Fine-tune Llama 2 70B by LoRA in PyTorch: packed samples in, loss evaluated, MLPerf events out.

    $ python -m benchmarks.llama2_70b_lora.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.llama2_70b_lora.pytorch.train --config config.json --data DATA \
        --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/, checkpoint/ (of the adapters) and, once the run has ended,
adapter/ by peft's names; a run that finds a checkpoint there resumes from it. Exit code 0: ended as planned, the last
record of metrics.jsonl says how; else: failed.
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
from benchmarks.llama.pytorch.parallel import loss_context, sum_of
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

ADAPTER = "adapter"  # folder of a run that holds the trained adapters


def build(config: Config, data: DataSet, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    # Build on the base, with a checkpoint's adapters or fresh ones, ready: warmed up before the clock.
    base = data.base(config.base) if config.base else None
    training = Training(config, data.padded_vocabulary(config.vocabulary_multiple), ranks, base)
    warm_up(training)
    if saved:
        training.restore(saved["every_rank"])
    return training


def warm_up(training: Training) -> None:
    # Open connections and take memory at rate 0, which changes no weight.
    batch = synthetic_batch(training.config, training.vocabulary, training.ranks)
    for _ in range(training.config.warm_up_steps):
        train_step(training, batch, 0.0)
        stopping.progress()
    training.forget()


def mean_loss(training: Training, part: MicroBatch) -> torch.Tensor:
    """Return the mean loss of the labels that count: of the ranks that share the samples the mean is that of all."""
    loss = training.network(part.tokens, part.labels, part.positions)
    return loss * (training.place.context / max(1, part.counted))


def train_step(training: Training, batch: Batch, rate: float) -> torch.Tensor:
    """Forward and backward on each micro-batch, and one update of the adapters.

    Returns the mean of the micro-batches' losses, of which the mean over the ranks is that of all, on the device.
    """
    dropout, total = training.dropout, torch.zeros((), device=training.ranks.context)
    for part in batch:
        dropout.samples, dropout.positions = part.samples, part.positions
        dropout.length = training.config.sequence_length
        with loss_context(training.place):
            loss = mean_loss(training, part) / len(batch)
            loss.backward()
        total += sum_of(loss.detach())
    dropout.samples = ()
    for group in training.optimizer.param_groups:
        group["lr"] = rate
    torch.nn.utils.clip_grad_norm_(training.adapters.values(), training.config.gradient_clip, foreach=True)
    training.optimizer.step()
    training.optimizer.zero_grad()
    return total


@torch.no_grad()
def evaluate(training: Training, data: DataSet, run: Run) -> Optional[Dict[str, float]]:
    # The mean over the samples of each one's mean loss, of all ranks; None if the run is to stop.
    sums = torch.zeros(2, dtype=torch.float64, device=run.ranks.context)
    for part in run.interruptible(evaluation_input(training.config, data.test, run.ranks)):
        with loss_context(training.place):
            sums[0] += sum_of(mean_loss(training, part))
        sums[1] += part.counted > 0
    if run.interrupted:
        return None
    # Each of the ranks that share a sample has counted it.
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
