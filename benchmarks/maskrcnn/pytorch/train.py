"""Train Mask R-CNN with PyTorch, evaluate with COCO AP, and write an MLPerf log.

    $ python -m benchmarks.maskrcnn.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.maskrcnn.pytorch.train --config config.json --data DATA --output OUT

OUT: result.txt (MLPerf log), metrics.jsonl, detections/, heartbeat/ and checkpoint/. If OUT has a checkpoint, the run
resumes from it. Exit code 0: the last record of metrics.jsonl is "reached", "not_reached" or "interrupted". Other
codes: failure.
"""

import dataclasses
import sys
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.mllog import samples
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.common.torch import capabilities
from benchmarks.common.torch.cuda_graphs import Captured, repeated
from benchmarks.common.torch.flat_optimizer import ALIGNMENT, FlatOptimizer, ScaleRule, unchanged
from benchmarks.common.torch.optimizers import Build
from benchmarks.detection.annotations import DataSet, open_data
from benchmarks.detection.detections import Detections
from benchmarks.detection.evaluator import Evaluator
from benchmarks.maskrcnn import mlperf, schedule
from benchmarks.maskrcnn.flops import flops_per_image
from benchmarks.maskrcnn.order import Shape, all_shapes
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.data import Batch, Orders, synthetic_batch, training_input
from benchmarks.maskrcnn.pytorch.evaluation import detections
from benchmarks.maskrcnn.pytorch.model import Model
from benchmarks.maskrcnn.pytorch.operators import OperatorSet, choose, is_captured
from benchmarks.maskrcnn.schedule import Rates

QUALITIES = {"bbox": "box_ap", "segm": "mask_ap"}  # iouType of pycocotools: name of the quality
MAX_EDGES = 1 << 18  # CUDA graph capacity in polygon edges (5 MB). Larger batches are trained without the graph


class Training:
    """Model, optimizer and CUDA graphs."""

    def __init__(
        self,
        config: Config,
        classes: int,
        ranks: Ranks,
        kernel: str,
        operators: OperatorSet,
        backbone_file: Optional[Path],
    ) -> None:
        """Initialize the weights, with the backbone from ``backbone_file``; ``classes`` includes the background."""
        self.config, self.ranks, self.classes = config, ranks, classes
        self.model = Model(config, classes, operators, ranks.context, backbone_file)
        self.network = self.model.network
        parameters = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        # Biases are trained without weight decay and with a separate learning rate.
        weights = [parameter for parameter in parameters if parameter.dim() > 1]
        biases = [parameter for parameter in parameters if parameter.dim() == 1]
        scale_rule = ScaleRule(config.loss_scale, config.loss_scale_interval)
        candidates = sgd_candidates(config, weights)
        if config.cuda_graph:
            candidates = {"fused": candidates["fused"]}  # only the fused kernel reads the learning rate from a tensor
        self.optimizer = FlatOptimizer(
            [*weights, *biases],
            candidates,
            kernel,
            ranks,
            clip=config.gradient_clip or None,
            scale=scale_rule if config.precision == "fp16" else None,
            bucket_mb=config.bucket_mb,
            compression=config.gradient_compression,
        )
        self.rates: Sequence[Union[float, torch.Tensor]] = Rates(0.0, 0.0)
        if config.cuda_graph:
            self.rates = [torch.zeros((), device=ranks.context) for _ in self.rates]
        self.graphs: Dict[Shape, Captured] = {}


def build(
    config: Config,
    classes: int,
    ranks: Ranks,
    saved: Mapping[str, Any],
    backbone_file: Optional[Path] = None,
    shapes: Optional[Sequence[Shape]] = None,
) -> Training:
    """Build the training and warm up.

    Args:
        config: with compile and cuda_graph, which may be "auto".
        classes: number of classes, including the background.
        ranks: this rank.
        saved: checkpoint from ``state_dict``. If empty, broadcast rank 0's initial weights.
        backbone_file: pretrained weights of the backbone.
        shapes: padded image shapes to warm up; default: all possible shapes.
    """
    # Resolve "auto": torch.compile, operators, CUDA graph.
    requested_graph = config.cuda_graph
    if config.optimizer_kernel == "plain" or not config.warm_up_steps:
        config = dataclasses.replace(config, cuda_graph=False)
    config = capabilities.resolve(config, ranks)
    operators = choose(config, ranks, saved.get("operators", {}))
    if config.cuda_graph:
        config = dataclasses.replace(config, cuda_graph=is_captured(operators, requested_graph, ranks))
    with torch.random.fork_rng([ranks.context] if ranks.context.type == "cuda" else []):
        torch.manual_seed(config.seed)
        kernel = saved.get("kernel", config.optimizer_kernel)
        # A resumed run also needs backbone_file: it freezes the batch-norm shifts, which are trained otherwise.
        training = Training(config, classes, ranks, kernel, operators, backbone_file)
    pytorch.broadcast(training.network.state_dict().values())
    if config.warm_up_steps:
        warm_up(training, shapes or all_shapes(config.short_side, config.long_side, config.bucket_step))
    if saved:
        training.network.load_state_dict(saved["network"])
        training.optimizer.restore(saved)
    return training


def train_step(training: Training, batch: Batch, rates: Rates) -> torch.Tensor:
    """Train on one batch. Return the sum of this rank's losses, on the device."""
    rate_tensors = [rate for rate in training.rates if isinstance(rate, torch.Tensor)]
    for tensor, rate in zip(rate_tensors, rates):
        tensor.fill_(rate)
    training.rates = rate_tensors or rates
    graph = training.graphs.get(tuple(batch.images.shape[2:])) if len(batch.edges) <= MAX_EDGES else None
    step = graph or partial(train_on_batch, training)
    return step(*batch)


def train_on_batch(training: Training, *batch: torch.Tensor) -> torch.Tensor:
    """Forward, backward and weight update with training.rates. Return the sum of this rank's losses."""
    loss = training.model.loss(Batch(*batch))
    training.optimizer.backward(loss)
    training.optimizer.step(training.rates, training.ranks.size)  # gradients are divided by the number of ranks
    return loss.detach()


def evaluate(training: Training, data: DataSet, run: Run) -> Optional[Detections]:
    """Return the detections in all validation images on rank 0; None on other ranks or if the run was interrupted."""
    training.network.eval()
    all_detections = detections(training.model, data, run)
    training.network.train()
    return all_detections


def warm_up(training: Training, shapes: Sequence[Shape]) -> None:
    """Allocate memory, compile, connect the ranks and capture CUDA graphs for all ``shapes``, with synthetic data.

    The largest shape comes first, because the graphs share its memory pool. Weights and optimizer state do not change.
    """
    config = training.config
    step = partial(train_on_batch, training)
    warm_up_steps = repeated(step, config.warm_up_steps)
    # A CPU needs no compilation or memory pool per shape: use the smallest.
    shapes = sorted(shapes, key=lambda shape: -shape[0] * shape[1])
    if training.ranks.context.type != "cuda":
        shapes = shapes[-1:]
    first_graph: Optional[Captured] = None

    def local_forward_backward(batch: Batch) -> None:
        # Without communication
        training.model.loss(batch).backward()
        training.optimizer.gradients.zero_()

    with unchanged(training.network, training.optimizer):
        for number, shape in enumerate(shapes, start=1):
            if training.ranks.rank == 0 and len(shapes) > 1:
                print(f"warm-up for images of {shape[0]} x {shape[1]} ({number}/{len(shapes)})", file=sys.stderr)
            batch = synthetic_batch(config, training.classes, shape, training.ranks.context, edges=MAX_EDGES)
            if config.compile != "none":
                capabilities.compile_in_turns(partial(local_forward_backward, batch), training.ranks)
            if config.cuda_graph:
                training.graphs[shape] = Captured(step, batch, warm_up_steps, first_graph)
                first_graph = first_graph or training.graphs[shape]
            else:
                warm_up_steps(*batch)
    pytorch.total([0.0])


def sgd_candidates(config: Config, weights: Sequence[torch.nn.Parameter]) -> Dict[str, Build]:
    """Return constructors of SGD with momentum by kernel, for one flat tensor: ``weights``, then biases.

    The parameter groups have the order of Rates: weights, biases.
    """
    weights_end = sum(-(-weight.numel() // ALIGNMENT) * ALIGNMENT for weight in weights)

    def build(flat: Sequence[torch.nn.Parameter], **options: bool) -> torch.optim.Optimizer:
        groups = []
        for elements, decay in ((slice(0, weights_end), config.weight_decay), (slice(weights_end, None), 0.0)):
            view = torch.nn.Parameter(flat[0].detach()[elements])
            view.grad = flat[0].grad[elements]
            groups.append({"params": [view], "weight_decay": decay})
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, **options)

    return {"plain": partial(build, foreach=True), "fused": partial(build, fused=True)}


def state_dict(training: Training) -> Dict[str, Any]:
    """Return the training state, which is the same on all ranks."""
    state = {"network": training.network.state_dict(), "operators": training.model.operators.names}
    return {**state, **training.optimizer.state_dict()}


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, mlperf.WORDING)
    config, ranks = run.config, run.ranks
    data = run.open(lambda: open_data(run.data))
    backbone_file = run.data / config.backbone if config.backbone else None
    with run.initialization():
        training = run.open(lambda: build(config, len(data.categories) + 1, ranks, run.saved, backbone_file))
    run.log(mlperf.hyperparameters(config, ranks.size))
    orders = Orders(config, data.train, ranks)
    flops = partial(flops_per_image, config, len(data.categories) + 1, orders.resized)
    # MLPerf: no images are read before run_start, including their sizes.
    with ExitStack() as stack, run.timed(lambda: schedule.timeline(config, orders.steps), flops):
        batches = stack.enter_context(closing(training_input(orders, ranks, run.position)))
        run.log(samples(len(data.train.with_objects), len(data.val)))
        run.register_state(partial(state_dict, training))
        run.set_evaluator(Evaluator(data, QUALITIES, run.output, config.eval_workers))
        for _ in run.blocks():
            for step in run.steps():
                rates = schedule.rates(config, step)
                run.report(train_step(training, run.wait_for(partial(next, batches)), rates), rates.weights)
            if run.evaluates():
                run.submit_evaluation(evaluate(training, data, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
