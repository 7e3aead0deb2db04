"""Train DLRM with PyTorch: embedding tables distributed over ranks, AUC evaluation, MLPerf log.

    $ python -m benchmarks.dlrm.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.dlrm.pytorch.train --config config.json --data DATA --output OUT

Writes result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/ to OUT, and resumes from a checkpoint
there. Exit code 0: finished as configured, see the last record of metrics.jsonl; otherwise: failed.
"""

from contextlib import closing
from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch.nn import functional

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.mllog import samples
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.common.torch.cuda_graphs import Captured, repeated
from benchmarks.dlrm import mlperf, schedule
from benchmarks.dlrm.flops import training_flops
from benchmarks.dlrm.placement import Placement
from benchmarks.dlrm.pytorch.auc import area_under_curve
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import (
    Batch,
    EvaluationInput,
    free_memory,
    open_data,
    synthetic_batch,
    training_batches,
)
from benchmarks.dlrm.pytorch.model import Training

STEPS_BEFORE_CAPTURE = 3  # at least, as PyTorch's documentation of CUDA graphs asks


def build(
    config: Config,
    sizes: Tuple[int, ...],
    ranks: Ranks,
    saved: Mapping[str, Any],
    placement: Optional[Placement] = None,
) -> Training:
    """Build with weights, kernels and placement from a checkpoint, or with initial weights."""
    if saved:
        placement = saved_placement(saved, sizes, ranks)
    training = Training(config, sizes, ranks, saved.get("kernels"), placement)
    if saved:
        training.weights.copy_(saved["weights"])
        training.tables.weight.copy_(saved["tables"])
    pytorch.broadcast([training.weights])
    return training


def train_step(training: Training, batch: Batch, rate: torch.Tensor) -> torch.Tensor:
    """Train on one batch; return the mean loss of this rank's rows, still on the device."""
    compute = training.graph or partial(train_on_batch, training)  # the same, captured
    return compute(*batch, rate)


def train_on_batch(
    training: Training, numbers: torch.Tensor, labels: torch.Tensor, indices: torch.Tensor, rate: torch.Tensor
) -> torch.Tensor:
    """Forward, backward and update on batch tensors, with the rate as a tensor ()."""
    loss = training.forward(Batch(numbers, labels, indices))
    (loss * training.loss_scale).backward()
    training.update(rate)
    return loss.detach()


def evaluate(training: Training, evaluation: EvaluationInput, run: Run) -> Optional[Dict[str, float]]:
    """Exact AUC and mean log loss over all evaluation rows of all ranks, or None if the run is to stop."""
    scores, labels = [], []
    with closing(evaluation.one_pass()) as batches:
        for batch, valid in run.interruptible(batches):
            scores.append(training.scores(batch)[:valid])
            labels.append(batch.labels[:valid])
    if run.interrupted:
        return None
    logits, clicks = torch.cat(scores), torch.cat(labels)
    loss = functional.binary_cross_entropy_with_logits(logits.double(), clicks.double(), reduction="sum")
    counted_here = torch.tensor(float(len(logits)), dtype=torch.float64, device=loss.device)
    (total_loss,) = run.total(torch.stack((loss, counted_here)), evaluation.total)
    # Uses logits because large logits have equal probabilities.
    try:
        return {"auc": area_under_curve(logits, clicks), "log_loss": total_loss / evaluation.total}
    except ValueError as problem:
        raise SystemExit(f"{problem}\n  hint: lower learning_rate, or check the data") from None


def warm_up(training: Training, sizes: Sequence[int]) -> None:
    """Select kernels, connect the ranks and capture, on synthetic data before the clock (MLPerf since v0.6).

    Steps use rate 0, which leaves the weights unchanged.
    """
    config, ranks = training.config, training.ranks
    local_sizes = [sizes[table] for table in training.tables.mine]
    example, rate = synthetic_batch(config, local_sizes, ranks), torch.zeros((), device=ranks.context)
    once = partial(train_on_batch, training)
    if config.cuda_graph:
        steps = max(config.warm_up_steps, STEPS_BEFORE_CAPTURE)
        training.graph = Captured(once, (*example, rate), repeated(once, steps))
    elif config.warm_up_steps:
        repeated(once, config.warm_up_steps)(*example, rate)
    if config.warm_up_steps:
        training.scores(synthetic_batch(config, local_sizes, ranks, config.eval_batch_size))


def saved_placement(saved: Mapping[str, Any], sizes: Sequence[int], ranks: Ranks) -> Placement:
    """Return the placement in a checkpoint, which is needed to identify the tables saved by a rank."""
    placement = tuple(tuple(tables) for tables in saved.get("placement", ()))
    rows = sum(sizes[table] for tables in placement[ranks.rank : ranks.rank + 1] for table in tables)
    fits = sorted(sum(placement, ())) == list(range(len(sizes))) and rows == len(saved["tables"])
    problem = f"rank {ranks.rank} saved {len(saved['tables']):,} rows, and the recorded placement gives it {rows:,}"
    # If only one rank exited, the others would hang in the next collective.
    reason = pytorch.agreed("" if fits else problem)
    if reason:
        raise SystemExit(
            f"the checkpoint's tables do not fit: {reason}\n"
            "  expected: a checkpoint of this version on this data set\n"
            "  hint: remove the checkpoint, or resume with the version and the data set that wrote it"
        )
    return placement


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, mlperf.WORDING)
    config, ranks = run.config, run.ranks
    data = run.open(lambda: open_data(run.data, config, ranks.size, free_memory(ranks)))
    with run.initialization():
        training = build(config, data.table_sizes, ranks, run.saved, data.placement)
        warm_up(training, data.table_sizes)
    run.log(mlperf.hyperparameters(config, ranks.size))
    steps_per_epoch = -(-data.train_rows // (config.batch_size * ranks.size))
    # No row is read before run_start: the clock starts before any part of the system touches the data set.
    batches = training_batches(config, data, training.tables.mine, ranks, run.position)
    flops = partial(training_flops, config, len(data.table_sizes))
    with closing(batches), run.timed(schedule.timeline(config, steps_per_epoch), flops):
        evaluation = EvaluationInput(config, data, training.tables.mine, ranks)
        run.log(samples(data.train_rows, data.val_rows))
        # MLPs are equal on all ranks; tables are local.
        run.register_state(training.state_dict, lambda: {"tables": training.tables.weight})
        rate = torch.zeros((), device=ranks.context)
        for _ in run.blocks():
            for number in run.steps():
                rate.fill_(schedule.learning_rate(config, number))
                run.report(
                    train_step(training, run.wait_for(partial(next, batches)), rate),
                    schedule.learning_rate(config, number),
                )
            if run.evaluates():
                run.evaluated(evaluate(training, evaluation, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
