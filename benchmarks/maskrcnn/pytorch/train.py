"""Train Mask R-CNN in PyTorch: images in, boxes and masks evaluated by COCO's AP, MLPerf events out.

    $ python -m benchmarks.maskrcnn.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.maskrcnn.pytorch.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, detections/, heartbeat/ and checkpoint/; a run that finds a checkpoint
there resumes from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
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
from benchmarks.common.torch import abilities
from benchmarks.common.torch.cuda_graphs import Captured, repeated
from benchmarks.common.torch.flat_optimizer import ALIGNMENT, FlatOptimizer, ScaleRule, unchanged
from benchmarks.common.torch.optimizers import Build
from benchmarks.detection.annotations import DataSet, open_data
from benchmarks.detection.detections import Detections
from benchmarks.detection.evaluator import Evaluator
from benchmarks.maskrcnn import events
from benchmarks.maskrcnn.events import Rates
from benchmarks.maskrcnn.flops import of_image
from benchmarks.maskrcnn.order import Shape, all_shapes
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.data import Batch, Orders, synthetic_batch, training_input
from benchmarks.maskrcnn.pytorch.evaluation import detections
from benchmarks.maskrcnn.pytorch.model import Model
from benchmarks.maskrcnn.pytorch.operators import Chosen, choose, is_captured

QUALITIES = {"bbox": "box_ap", "segm": "mask_ap"}  # name of the quality of each kind of comparison
EDGES = 1 << 18  # a graph has room for as many edges of outlines, 5 MB; a batch with more is trained without one


class Training:
    """Network, its updates, and how a batch goes through them."""

    def __init__(
        self,
        config: Config,
        classes: int,
        ranks: Ranks,
        kernel: str,
        operators: Chosen,
        trained: Optional[Path],
    ) -> None:
        """``classes`` counts the background; ``trained`` is a file with the backbone's weights."""
        self.config, self.ranks, self.classes = config, ranks, classes
        self.model = Model(config, classes, operators, ranks.context, trained)
        self.network = self.model.network
        parameters = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        # Weights, which decay, and biases, which do not and have rates of their own
        matrices = [each for each in parameters if each.dim() > 1]
        biases = [each for each in parameters if each.dim() == 1]
        rule = ScaleRule(config.loss_scale, config.loss_scale_interval)
        candidates = sgd_candidates(config, matrices)
        if config.cuda_graph:
            candidates = {"fused": candidates["fused"]}  # the one that reads its rate from the device
        self.optimizer = FlatOptimizer(
            [*matrices, *biases],
            candidates,
            kernel,
            ranks,
            clip=config.gradient_clip or None,
            scale=rule if config.precision == "fp16" else None,
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
    trained: Optional[Path] = None,
    shapes: Optional[Sequence[Shape]] = None,
) -> Training:
    """Build with what ``state_dict`` saved, or with rank 0's fresh weights and those of the file ``trained``; warm up.

    ``shapes`` are those of the images to come; default: all that there may be.
    """
    # What "auto" leaves open: compilation, operators, graph
    asked = config.cuda_graph
    if config.optimizer_kernel == "plain" or not config.warm_up_steps:
        config = dataclasses.replace(config, cuda_graph=False)
    config = abilities.resolve(config, ranks)
    operators = choose(config, ranks, saved.get("operators", {}))
    if config.cuda_graph:
        config = dataclasses.replace(config, cuda_graph=is_captured(operators, asked, ranks))
    with torch.random.fork_rng([ranks.context] if ranks.context.type == "cuda" else []):
        torch.manual_seed(config.seed)
        kernel = saved.get("kernel", config.optimizer_kernel)
        # A resumed run needs the file as well: the shifts of a given backbone are not trained.
        training = Training(config, classes, ranks, kernel, operators, trained)
    pytorch.broadcast(training.network.state_dict().values())
    if config.warm_up_steps:
        warm_up(training, shapes or all_shapes(config.short_side, config.long_side, config.bucket_step))
    if saved:
        training.network.load_state_dict(saved["network"])
        training.optimizer.restore(saved)
    return training


def train_step(training: Training, batch: Batch, rates: Rates) -> torch.Tensor:
    """Train on one batch; return the sum of this rank's losses, still on the device."""
    held = [each for each in training.rates if isinstance(each, torch.Tensor)]
    for tensor, rate in zip(held, rates):
        tensor.fill_(rate)
    training.rates = held or rates
    # The same, captured, where there is a graph for the shape and the batch is no more than it holds.
    graph = training.graphs.get(tuple(batch.images.shape[2:])) if len(batch.edges) <= EDGES else None
    step = graph or partial(whole_step, training)
    return step(*batch)


def whole_step(training: Training, *batch: torch.Tensor) -> torch.Tensor:
    """Forward, backward and update on one batch, at the rates that are set; returns the sum of this rank's losses."""
    loss = torch.stack(list(training.model.losses(Batch(*batch)).values())).sum()
    training.optimizer.backward(loss)
    training.optimizer.step(training.rates, training.ranks.size)  # averaged over the ranks
    return loss.detach()


def evaluate(training: Training, data: DataSet, run: Run) -> Optional[Detections]:
    """Return the detections of all ranks in all evaluation images on rank 0; None elsewhere or if it is to stop."""
    training.network.eval()
    found = detections(training.model, data, run)
    training.network.train()
    return found


def warm_up(training: Training, shapes: Sequence[Shape]) -> None:
    """Take memory, compile, connect and capture on noise of each of ``shapes``, the largest first; changes nothing."""
    config = training.config
    once = partial(whole_step, training)
    repeat = repeated(once, config.warm_up_steps)
    # A CPU has nothing to compile or to set aside for a shape.
    listed = sorted(shapes, key=lambda shape: -shape[0] * shape[1])
    if training.ranks.context.type != "cuda":
        listed = listed[-1:]
    first: Optional[Captured] = None

    def own_pass(batch: Batch) -> None:
        # Forward and backward pass whose gradients no other rank sees
        torch.stack(list(training.model.losses(batch).values())).sum().backward()
        training.optimizer.gradients.zero_()

    with unchanged(training.network, training.optimizer):
        for number, shape in enumerate(listed, start=1):
            if training.ranks.rank == 0 and len(listed) > 1:
                print(f"preparing the step for {shape[0]} x {shape[1]}, {number} of {len(listed)}", file=sys.stderr)
            batch = synthetic_batch(config, training.classes, shape, training.ranks.context, edges=EDGES)
            if config.compile != "none":
                abilities.compile_in_turns(partial(own_pass, batch), training.ranks)
            if config.cuda_graph:
                training.graphs[shape] = Captured(once, batch, repeat, first)
                first = first or training.graphs[shape]
            else:
                repeat(*batch)
    pytorch.total([0.0])


def sgd_candidates(config: Config, matrices: Sequence[torch.nn.Parameter]) -> Dict[str, Build]:
    """Return SGD with momentum by implementation, for one flat tensor that begins with ``matrices``.

    Its two groups are the weights and the biases, in the order of Rates.
    """
    border = sum(-(-each.numel() // ALIGNMENT) * ALIGNMENT for each in matrices)

    def build(flat: Sequence[torch.nn.Parameter], **options: bool) -> torch.optim.Optimizer:
        groups = []
        for part, decay in ((slice(0, border), config.weight_decay), (slice(border, None), 0.0)):
            piece = torch.nn.Parameter(flat[0].detach()[part])
            piece.grad = flat[0].grad[part]
            groups.append({"params": [piece], "weight_decay": decay})
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, **options)

    return {"plain": partial(build, foreach=True), "fused": partial(build, fused=True)}


def state_dict(training: Training) -> Dict[str, Any]:
    """What all ranks have in common, which is everything."""
    state = {"network": training.network.state_dict(), "operators": training.model.operators.names}
    return {**state, **training.optimizer.state_dict()}


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, events.WORDING)
    config, ranks = run.config, run.ranks
    data = run.open(lambda: open_data(run.data))
    trained = run.data / config.backbone if config.backbone else None
    with run.initialization():
        training = run.open(lambda: build(config, len(data.categories) + 1, ranks, run.saved, trained))
    run.log(events.hyperparameters(config, ranks.size))
    orders = Orders(config, data.train, ranks)
    flops = partial(of_image, config, len(data.categories) + 1, orders.resized)
    # No image, nor the size of one, is read before run_start.
    with ExitStack() as owned, run.timed(lambda: events.timeline(config, orders.steps), flops):
        batches = owned.enter_context(closing(training_input(orders, ranks, run.position)))
        run.log(samples(len(data.train.with_objects), len(data.val)))
        run.register_state(partial(state_dict, training))
        run.use(Evaluator(data, QUALITIES, run.output, config.eval_workers))
        for _ in run.blocks():
            for number in run.steps():
                now = events.rates(config, number)
                run.report(train_step(training, run.wait_for(partial(next, batches)), now), now.weights)
            if run.evaluates():
                run.evaluated_later(evaluate(training, data, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
