"""Train ResNet in PyTorch: DALI in, DistributedDataParallel across, MLPerf events out.

    $ python -m benchmarks.resnet.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --standalone --nproc-per-node 8 -m benchmarks.resnet.pytorch.train --config config.json ...

OUT gets result.txt (MLPerf log), metrics.jsonl, heartbeat/ and checkpoint/; a run that finds a checkpoint there
resumes from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

from functools import lru_cache, partial, reduce
from typing import Dict, List, Optional

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.frameworks.pytorch import autocast
from benchmarks.common.mllog import samples
from benchmarks.common.run import Run
from benchmarks.common.stopping import end_process
from benchmarks.resnet import events
from benchmarks.resnet.inputs import EvaluationInput, TrainingInput, count_records, steps_per_epoch
from benchmarks.resnet.pytorch import data, model
from benchmarks.resnet.pytorch.config import Config
from benchmarks.resnet.pytorch.training import Training, accumulating, build, content, own_content
from benchmarks.resnet.schedule import learning_rate


def forward_backward(training: Training, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Fill the gradients, times config.loss_scale, summed over the ranks; return the mean loss of this rank."""
    config, passes = training.config, training.config.accumulation_steps
    training.optimizer.zero_grad(set_to_none=True)
    losses: List[torch.Tensor] = []
    for part, targets in zip(images.chunk(passes), labels.chunk(passes)):
        with accumulating(training, is_last=len(losses) == passes - 1):
            with autocast(images.device, config.precision):
                logits = training.parallel(part)
            loss = model.smoothed_loss(logits, targets, config.label_smoothing)
            (loss * (config.loss_scale / passes)).backward()
        losses.append(loss.detach())
    return reduce(torch.add, losses) / passes


def whole_step(training: Training, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Forward, backward and update on one batch, at the rate that is set."""
    loss = forward_backward(training, images, labels)
    training.optimizer.step()
    return loss


def train_step(training: Training, images: torch.Tensor, labels: torch.Tensor, rate: float) -> torch.Tensor:
    """Train on one batch; return the mean loss of this rank, still on the device."""
    training.optimizer.set_learning_rate(rate)
    compute = training.graph or partial(whole_step, training)  # the same, captured
    loss: torch.Tensor = compute(images, labels)
    return loss


@torch.no_grad()
def evaluate(training: Training, evaluation: EvaluationInput, run: Run) -> Optional[Dict[str, float]]:
    """Top-1 accuracy over all validation images of all ranks, or None if the run is to stop."""
    network, device = training.network, run.ranks.context
    pytorch.average_tensors(model.statistics(network))  # all ranks evaluate one network
    network.eval()
    correct = torch.zeros(1, device=device)
    counted = 0
    for images, labels, valid in run.watch(evaluation.one_pass()):
        if valid:
            with autocast(device, training.config.precision):
                logits = network(images)
            correct += (logits.argmax(dim=1) == labels)[:valid].sum()
        counted += valid
    network.train()
    if run.interrupted:
        return None
    (hits,) = run.total(torch.cat((correct, correct.new_tensor([counted]))), evaluation.total)
    return {"accuracy": hits / evaluation.total}


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, events.WORDING)
    config, ranks, saved = run.config, run.ranks, run.saved
    with run.initialization():
        run.log(events.initialization(config))
        training = build(config, ranks, saved, whole_step)
    train_images = lru_cache(None)(partial(count_records, run.data / "train.idx"))
    # The index is read behind run_start, like all of the data set.
    with run.timed(lambda: events.timeline(config, steps_per_epoch(train_images(), config, ranks))) as timeline:
        steps = timeline.steps_per_epoch
        run.log(events.hyperparameters(config, ranks.size, steps))
        batches = TrainingInput(data, config, run.data, ranks, saved.get("input"))
        evaluation = EvaluationInput(data, config, run.data, ranks)
        run.log(samples(train_images(), evaluation.total))
        run.keep(partial(content, training), partial(own_content, training, batches))
        for _ in run.blocks():
            for step in run.steps():
                rate = learning_rate(config, step, steps)
                run.report(train_step(training, *run.wait_for(batches.next), rate), rate)
            if run.evaluates():
                run.evaluated(evaluate(training, evaluation, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
