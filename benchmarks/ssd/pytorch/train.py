"""Train SSD300 with PyTorch: DALI input, mAP by pycocotools, MLPerf log.

    $ python -m benchmarks.ssd.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.ssd.pytorch.train --config config.json --data DATA --output OUT

Writes result.txt (MLPerf log), metrics.jsonl, detections/, heartbeat/ and checkpoint/ to OUT, and resumes from a
checkpoint there. Exit code 0: finished as configured, see the last record of metrics.jsonl; otherwise: failed.
"""

from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Union

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.mllog import samples
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.common.torch import capabilities, networks, optimizers
from benchmarks.common.torch.cuda_graphs import Captured, repeated
from benchmarks.common.torch.flat_optimizer import FlatOptimizer, unchanged
from benchmarks.detection.annotations import open_data
from benchmarks.detection.detections import Detections, empty, join_detections
from benchmarks.detection.evaluator import Evaluator
from benchmarks.detection.pytorch.boxes import gather_detections
from benchmarks.ssd import mlperf, schedule
from benchmarks.ssd.flops import training_flops
from benchmarks.ssd.pytorch import model, norms
from benchmarks.ssd.pytorch.config import Config
from benchmarks.ssd.pytorch.data import (
    Batch,
    EvaluationInput,
    TrainingInput,
    steps_per_epoch,
    synthetic_batch,
    synthetic_images,
)


class Training:
    """Network, optimizer and loss on this rank."""

    def __init__(
        self, config: Config, classes: int, ranks: Ranks, saved: Mapping[str, Any], backbone: Optional[Path]
    ) -> None:
        """Initialize or load the weights, the same on all ranks; ``classes`` count the background."""
        self.config, self.classes, self.ranks = config, classes, ranks
        # A checkpoint from before there was a choice has the plain one.
        self.norm, norm = norms.choose(config, ranks, saved.get("norm", norms.PLAIN) if saved else None)
        network = model.SSD(config, classes, norm)
        if backbone is not None:
            model.load_backbone(network, backbone)
        self.network = network.to(device=ranks.context, memory_format=networks.memory_format(config.layout))
        self.defaults = torch.from_numpy(model.default_boxes(config.image_size, config.box_scales)).to(ranks.context)
        apex = None if config.cuda_graph else optimizers.find_apex()
        candidates = optimizers.sgd_candidates(config.learning_rate, config.momentum, config.weight_decay, apex)
        if config.cuda_graph:
            # the implementation that reads the learning rate from the device
            candidates = {"fused": candidates["fused"]}
        self.optimizer = FlatOptimizer(
            list(self.network.parameters()),
            candidates,
            saved.get("kernel", config.optimizer_kernel),
            ranks,
            bucket_mb=config.bucket_mb,
            compression=config.gradient_compression,
        )
        self.loss_scale = config.loss_scale if config.precision == "fp16" else 1.0
        self.rate: Union[float, torch.Tensor] = 0.0
        if config.cuda_graph:
            self.rate = torch.zeros((), device=ranks.context)
        self.graph: Optional[Captured] = None
        loss = self.network.loss
        self.loss = loss if config.compile == "none" else torch.compile(loss, mode=config.compile, dynamic=False)


def build(
    config: Config, classes: int, ranks: Ranks, saved: Mapping[str, Any], backbone: Optional[Path] = None
) -> Training:
    """Restore ``state_dict`` and ``rank_state_dict``, or broadcast the initial weights of rank 0; warm up."""
    config = capabilities.resolve(config, ranks)
    # A checkpoint's states of the generators are set when it is read.
    with torch.random.fork_rng([ranks.context] if ranks.context.type == "cuda" else []):
        training = Training(config, classes, ranks, saved, None if saved else backbone)
        pytorch.broadcast(training.network.parameters())
        if config.warm_up_steps:
            warm_up(training)
    if saved:
        training.network.load_state_dict(saved["network"])
        training.optimizer.restore(saved)
        networks.set_statistics(training.network, saved["statistics"])
    return training


def train_step(training: Training, batch: Batch, rate: float) -> torch.Tensor:
    """Train on one batch; return the mean loss of this rank, still on the device."""
    if isinstance(training.rate, torch.Tensor):
        training.rate.fill_(rate)
    else:
        training.rate = rate
    step = training.graph or partial(train_on_batch, training)  # the same, captured
    return step(*batch)


def train_on_batch(training: Training, *batch: torch.Tensor) -> torch.Tensor:
    """Forward, backward and update on a batch at the rate that is set; return the mean loss of this rank."""
    loss = local_loss(training, *batch)
    training.optimizer.backward(loss * training.loss_scale)
    training.optimizer.step(training.rate, training.ranks.size * training.loss_scale)
    return loss.detach()


def local_loss(training: Training, *batch: torch.Tensor) -> torch.Tensor:
    with pytorch.autocast(training.ranks.context, training.config.precision):
        loss: torch.Tensor = training.loss(*batch)
    return loss


def evaluate(training: Training, evaluation: EvaluationInput, run: Run) -> Optional[Detections]:
    """Return the detections of all ranks on rank 0; None on other ranks, or if the run is to stop."""
    if training.config.average_statistics:  # otherwise ranks evaluate with local statistics, as in v0.5 and v0.6
        pytorch.average_tensors(networks.statistics(training.network))
    training.network.eval()
    parts = [empty()]
    for images, positions in run.interruptible(evaluation.one_pass()):
        detected = model.detect(training.network, images, training.defaults, training.config)
        parts.append(model.to_original(detected, evaluation.part, positions))
    training.network.train()
    return None if run.interrupted else gather_detections(join_detections(parts), run.ranks)


def warm_up(training: Training) -> None:
    """Compile, select kernels, connect the ranks and capture, on noise and before the clock; restores all state."""
    config = training.config
    batch = synthetic_batch(config, training.classes, training.ranks.context)
    with unchanged(training.network, training.optimizer):
        # Batch-norm over groups has collectives in the forward pass.
        if config.compile != "none" and config.bn_group == 1:
            capabilities.compile_in_turns(lambda: local_loss(training, *batch).backward(), training.ranks)
            training.optimizer.gradients.zero_()
        once = partial(train_on_batch, training)
        repeat = repeated(once, config.warm_up_steps)
        if config.cuda_graph:
            training.graph = Captured(once, batch, repeat)
        else:
            repeat(*batch)
        training.network.eval()
        images = synthetic_images(config, training.ranks.context, config.eval_batch_size)
        model.detect(training.network, images, training.defaults, config)
        training.network.train()


def state_dict(training: Training) -> Dict[str, Any]:
    """Return the state shared by all ranks, for a checkpoint."""
    return {"network": training.network.state_dict(), "norm": training.norm, **training.optimizer.state_dict()}


def rank_state_dict(training: Training, batches: TrainingInput) -> Dict[str, Any]:
    """Return the rank's local state: input and running statistics."""
    statistics: List[torch.Tensor] = [tensor.cpu() for tensor in networks.statistics(training.network)]
    return {**batches.state_dict(), "statistics": statistics}


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, mlperf.WORDING)
    config, ranks, saved = run.config, run.ranks, run.saved
    data = run.open(lambda: open_data(run.data))
    backbone = run.data / config.backbone if config.backbone else None
    with run.initialization():
        training = run.open(lambda: build(config, len(data.categories) + 1, ranks, saved, backbone))
    run.log(mlperf.hyperparameters(config, ranks.size))
    flops = partial(training_flops, config, len(data.categories) + 1)
    # No object is counted before run_start.
    with run.timed(lambda: schedule.timeline(config, ranks.size, steps_per_epoch(data.train, config, ranks)), flops):
        batches = TrainingInput(config, data.train, ranks, saved)
        evaluation = EvaluationInput(config, data.val, ranks)
        steps = steps_per_epoch(data.train, config, ranks)
        run.log({**mlperf.decays(config, ranks.size, steps), **samples(len(data.train.with_objects), evaluation.total)})
        run.register_state(partial(state_dict, training), partial(rank_state_dict, training, batches))
        run.set_evaluator(Evaluator(data, {"bbox": "map"}, run.output))
        for _ in run.blocks():
            for number in run.steps():
                rate = schedule.learning_rate(config, number, ranks.size, steps)
                run.report(train_step(training, run.wait_for(batches.next), rate), rate)
            if run.evaluates():
                run.submit_evaluation(evaluate(training, evaluation, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
