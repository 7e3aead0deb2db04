"""What a step works on: built, warmed up, and carried through checkpoints."""

from __future__ import annotations

import dataclasses
import sys
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from benchmarks.common import torch_abilities
from benchmarks.common.cuda_graphs import Captured, repeated
from benchmarks.common.frameworks import pytorch
from benchmarks.common.ranks import Ranks
from benchmarks.common.torch_optimizers import Build
from benchmarks.common.torch_updates import ALIGNMENT, ScaleRule, Updates, unchanged
from benchmarks.maskrcnn.order import Shape, all_shapes
from benchmarks.maskrcnn.pytorch import anchors, losses, targets, weights
from benchmarks.maskrcnn.pytorch.choice import Chosen, choose, is_captured
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.data import Batch, EvaluationBatch, batch_of, synthetic_batch
from benchmarks.maskrcnn.pytorch.model import BOX_BINS, MASK_BINS, MASK_SIZE, MaskRCNN, Scored
from benchmarks.maskrcnn.pytorch.operators import POOLED_LEVELS
from benchmarks.maskrcnn.pytorch.proposals import Found, Limits, Proposals, detect, propose, trimmed
from benchmarks.maskrcnn.schedule import Rates

Step = Callable[["Training", Batch], torch.Tensor]
"""``whole_step`` of train.py."""
EDGES = 1 << 18
"""Of a batch's outlines that a graph has room for, 5 MB; a batch with more is trained without a graph."""


class Rois(NamedTuple):
    """Sampled boxes of a batch and what the heads should say of them; see targets.Sample for the slots."""

    boxes: torch.Tensor
    """(B, S, 4)"""
    labels: torch.Tensor
    """int64 (B, S): 0 for background."""
    offsets: torch.Tensor
    """(B, S, 4): of the object from the box."""
    objects: torch.Tensor
    """int64 (B, S): number of the object in the batch, -1 for background."""
    filled: torch.Tensor
    """bool (B, S)"""


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
        self.network = MaskRCNN(config, classes)
        if trained is not None:
            weights.load_backbone(self.network.backbone, trained)
        self.network.to(ranks.context, memory_format=torch.channels_last)
        matrices, biases = parameters(self.network)
        rule = ScaleRule(config.loss_scale, config.loss_scale_interval)
        candidates = sgd_candidates(config, matrices)
        if config.cuda_graph:
            candidates = {"fused": candidates["fused"]}  # the one that reads its rate from the device
        self.updates = Updates(
            [*matrices, *biases],
            candidates,
            kernel,
            ranks,
            clip=config.gradient_clip or None,
            scale=rule if config.precision == "fp16" else None,
        )
        self.operators = operators
        self.rates: Sequence[Union[float, torch.Tensor]] = Rates(0.0, 0.0)
        if config.cuda_graph:
            self.rates = [torch.zeros((), device=ranks.context) for _ in self.rates]
        self.graphs: Dict[Shape, Captured] = {}
        self._forward, self._boxes, self._masks = (
            _compiled(module, config) for module in (self.network, self.network.boxes, self.network.masks)
        )
        # On a GPU all shapes are fixed and nothing is waited for; a CPU computes what is there.
        self._is_static = ranks.context.type == "cuda"
        self._anchors: Callable[[Tuple[Tuple[int, int], ...]], List[torch.Tensor]] = lru_cache(maxsize=None)(
            partial(self._anchors_of)
        )

    def _anchors_of(self, shapes: Tuple[Tuple[int, int], ...]) -> List[torch.Tensor]:
        config = self.config
        return anchors.grid_anchors(shapes, config.anchor_sizes, config.anchor_ratios, self.ranks.context)

    # -- training -----------------------------------------------------------------------------------------

    def set_rates(self, rates: Rates) -> None:
        """Give the next step its learning rates."""
        held = [each for each in self.rates if isinstance(each, torch.Tensor)]
        for tensor, rate in zip(held, rates):
            tensor.fill_(rate)
        self.rates = held or rates

    def graph_of(self, batch: Batch) -> Optional[Captured]:
        """Return the captured step for ``batch``; None where there is none, or the batch is more than it holds."""
        height, width = batch.images.shape[2:]
        return self.graphs.get((height, width)) if len(batch.outlines.edges) <= EDGES else None

    def losses(self, batch: Batch) -> Dict[str, torch.Tensor]:
        """Return the five losses of this rank's images by name; their sum is trained."""
        present = batch.labels > 0
        with pytorch.autocast(self.ranks.context, self.config.precision):
            levels, scored = self._forward(batch.images)
        grid = self._anchors(tuple((level.shape[2], level.shape[3]) for level in levels))
        found = self._proposal_losses(scored, torch.cat(grid), batch, present)
        rois = self._sampled(self._proposals(scored, grid, batch.sizes, training=True), batch, present)
        found.update(self._box_losses(levels, rois))
        found["mask"] = self._mask_loss(levels, rois, batch)
        return found

    def _proposal_losses(
        self, scored: Scored, grid: torch.Tensor, batch: Batch, present: torch.Tensor
    ) -> Dict[str, torch.Tensor]:
        config = self.config
        matched = self.operators.match(batch.boxes, present, grid, config.anchor_high, config.anchor_low)
        usable = targets.inside(grid, batch.sizes)
        sampled = targets.sample(matched, usable, batch.seeds, config.anchors_per_image, config.anchor_positive)
        wanted = anchors.encode(
            targets.of_objects(batch.boxes, targets.take(matched, sampled.positions)),
            grid[sampled.positions],
            anchors.RPN_WEIGHTS,
        )
        logits = targets.take(torch.cat(scored.scores, 1), sampled.positions).float()
        offsets = targets.take(torch.cat(scored.offsets, 1), sampled.positions).float()
        return {
            "objectness": losses.objectness(logits, sampled.positive, sampled.filled),
            "proposals": losses.boxes(offsets, wanted, sampled.positive, sampled.filled, losses.RPN_BETA),
        }

    def _proposals(
        self, scored: Scored, grid: Sequence[torch.Tensor], sizes: torch.Tensor, training: bool
    ) -> Proposals:
        config = self.config
        limits = Limits(config.candidates_test, config.proposals_test, False, config.proposal_overlap)
        if training:
            limits = Limits(config.candidates_train, config.proposals_train, True, config.proposal_overlap)
        found = propose(scored.scores, scored.offsets, grid, sizes, limits, self.operators.suppress)
        return found if self._is_static else trimmed(found)

    @torch.no_grad()
    def _sampled(self, proposals: Proposals, batch: Batch, present: torch.Tensor) -> Rois:
        config = self.config
        # The objects themselves are proposed too, so that the heads see what is right from the beginning. They come
        # first: how many columns there are behind the last proposal changes nothing that is drawn.
        boxes = torch.cat((batch.boxes, proposals.boxes), 1)
        usable = torch.cat((present, proposals.valid), 1)
        quality = targets.overlaps(batch.boxes, boxes)
        matched = targets.match(quality, present, config.roi_overlap, config.roi_overlap, rescue=False)
        drawn = targets.sample(matched, usable, batch.seeds + 1, config.rois_per_image, config.roi_positive)
        boxes, matched = targets.take(boxes, drawn.positions), targets.take(matched, drawn.positions)
        labels = targets.of_objects(batch.labels, matched).masked_fill(~drawn.positive, 0)
        wanted = anchors.encode(targets.of_objects(batch.boxes, matched), boxes, anchors.HEAD_WEIGHTS)
        first = torch.arange(len(boxes), device=boxes.device).unsqueeze(1) * batch.boxes.shape[1]
        objects = (matched + first).masked_fill(~drawn.positive, -1)
        return Rois(boxes, labels, wanted, objects, drawn.filled)

    def _pooled(self, levels: List[torch.Tensor], boxes: torch.Tensor, images: torch.Tensor, bins: int) -> torch.Tensor:
        edge = self.config.edge
        return self.operators.roi_align(levels[:POOLED_LEVELS], anchors.sampled(boxes, edge), images, bins, edge)

    def _box_losses(self, levels: List[torch.Tensor], rois: Rois) -> Dict[str, torch.Tensor]:
        labels, filled = rois.labels.flatten(), rois.filled.flatten()
        images = _images(rois.boxes)
        with pytorch.autocast(self.ranks.context, self.config.precision):
            pooled = self._pooled(levels, rois.boxes.flatten(0, 1), images, BOX_BINS)
            logits, offsets = self._boxes(pooled)
        of_class = targets.take(offsets.float(), labels.unsqueeze(1)).squeeze(1)
        return {
            "classes": losses.classes(logits.float(), labels, filled),
            "boxes": losses.boxes(of_class, rois.offsets.flatten(0, 1), labels > 0, filled, 1.0),
        }

    def _mask_loss(self, levels: List[torch.Tensor], rois: Rois, batch: Batch) -> torch.Tensor:
        slots = min(int(self.config.rois_per_image * self.config.roi_positive), rois.boxes.shape[1])
        boxes, labels, objects = (each[:, :slots].flatten(0, 1) for each in (rois.boxes, rois.labels, rois.objects))
        images = _images(rois.boxes[:, :slots])
        if not self._is_static:
            there = (labels > 0).nonzero().squeeze(1)
            boxes, labels, objects, images = boxes[there], labels[there], objects[there], images[there]
        with pytorch.autocast(self.ranks.context, self.config.precision):
            pooled = self._pooled(levels, boxes, images, MASK_BINS)
            logits = self._masks(pooled, labels)
        drawn = anchors.sampled(boxes, self.config.edge)
        wanted = self.operators.project_masks(batch.outlines, drawn, objects, MASK_SIZE)
        return losses.masks(logits.float(), wanted, labels > 0)

    def update(self) -> None:
        """Update the weights by the gradients, averaged over the ranks."""
        self.updates.step(self.rates, self.ranks.size)

    # -- evaluation ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def detect(self, batch: EvaluationBatch) -> Tuple[Found, torch.Tensor]:
        """Return the detections of a batch and their masks' probabilities, float32 (D, 28, 28)."""
        config = self.config
        with pytorch.autocast(self.ranks.context, config.precision):
            # Not compiled: numbers of images and detections differ, and so does what a shape would be compiled for.
            levels, scored = self.network(batch.images)
            grid = self._anchors(tuple((level.shape[2], level.shape[3]) for level in levels))
            found = self._proposals(scored, grid, batch.sizes, training=False)
            boxes = found.boxes.flatten(0, 1)
            pooled = self._pooled(levels, boxes, _images(found.boxes), BOX_BINS)
            logits, offsets = self.network.boxes(pooled)
            shape = found.boxes.shape[:2]
            detected = detect(
                logits.view(*shape, -1),
                offsets.view(*shape, -1, 4),
                found,
                batch.sizes,
                config.score_threshold,
                config.detection_overlap,
                config.detections,
                self.operators.suppress,
            )
            pooled = self._pooled(levels, detected.boxes, detected.images, MASK_BINS)
            masks = self.network.masks(pooled, detected.labels)
        return detected, masks.float().sigmoid()


def _images(boxes: torch.Tensor) -> torch.Tensor:
    """Return the image int64 (B * S,) of each of ``boxes`` (B, S, 4)."""
    return torch.arange(len(boxes), device=boxes.device).unsqueeze(1).expand(boxes.shape[:2]).flatten()


def _compiled(module: torch.nn.Module, config: Config) -> Callable[..., Any]:
    if config.compile == "none":
        return module
    # Once for each shape, of which there are more than the eight after which PyTorch gives up.
    for name in ("cache_size_limit", "recompile_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 64)
    return torch.compile(module, mode=config.compile, dynamic=False)


def parameters(network: MaskRCNN) -> Tuple[List[torch.nn.Parameter], List[torch.nn.Parameter]]:
    """Return what is trained: weights, which decay, and biases, which do not and have rates of their own."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return [each for each in trained if each.dim() > 1], [each for each in trained if each.dim() == 1]


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


def build(
    config: Config,
    classes: int,
    ranks: Ranks,
    saved: Mapping[str, Any],
    step: Step,
    trained: Optional[Path] = None,
    shapes: Optional[Sequence[Shape]] = None,
) -> Training:
    """Build with what ``content`` saved, or with rank 0's fresh weights and those of the file ``trained``; warm up.

    ``shapes`` are those of the images to come; default: all that there may be.
    """
    config, operators = settle(config, ranks, saved.get("operators", {}))
    with torch.random.fork_rng([ranks.context] if ranks.context.type == "cuda" else []):
        torch.manual_seed(config.seed)
        kernel = saved.get("kernel", config.optimizer_kernel)
        # A resumed run needs the file as well: the shifts of a given backbone are not trained.
        training = Training(config, classes, ranks, kernel, operators, trained)
    pytorch.broadcast(training.network.state_dict().values())
    if config.warm_up_steps:
        warm_up(training, step, shapes or all_shapes(config.short_side, config.long_side, config.bucket_step))
    if saved:
        training.network.load_state_dict(saved["network"])
        training.updates.restore(saved)
    return training


def settle(config: Config, ranks: Ranks, saved: Mapping[str, str]) -> Tuple[Config, Chosen]:
    """Choose what "auto" leaves open: compilation, graph, operators; ``saved`` are a checkpoint's operators."""
    asked = config.cuda_graph
    if config.optimizer_kernel == "plain" or not config.warm_up_steps:
        config = dataclasses.replace(config, cuda_graph=False)
    config = torch_abilities.settle(config, ranks)
    operators = choose(config, ranks, saved)
    if config.cuda_graph:
        config = dataclasses.replace(config, cuda_graph=is_captured(operators, asked, ranks))
    return config, operators


def content(training: Training) -> Dict[str, Any]:
    """What all ranks have in common, which is everything."""
    names = {"operators": training.operators.names}
    return {"network": training.network.state_dict(), **training.updates.content(), **names}


def warm_up(training: Training, step: Step, shapes: Sequence[Shape]) -> None:
    """Take memory, compile, connect and capture on noise of each of ``shapes``, the largest first; changes nothing."""
    config = training.config
    once = partial(_on_tensors, training, step)
    repeat = repeated(once, config.warm_up_steps)
    # A CPU has nothing to compile or to set aside for a shape.
    listed = sorted(shapes, key=lambda shape: -shape[0] * shape[1])
    if training.ranks.context.type != "cuda":
        listed = listed[-1:]
    first: Optional[Captured] = None
    with unchanged(training.network, training.updates):
        for number, shape in enumerate(listed, start=1):
            if training.ranks.rank == 0 and len(listed) > 1:
                print(f"preparing the step for {shape[0]} x {shape[1]}, {number} of {len(listed)}", file=sys.stderr)
            batch = synthetic_batch(config, training.classes, shape, training.ranks.context, edges=EDGES)
            if config.compile != "none":
                torch_abilities.compile_in_turns(partial(_own_pass, training, batch), training.ranks)
            if config.cuda_graph:
                training.graphs[shape] = Captured(once, batch.tensors(), repeat, first)
                first = first or training.graphs[shape]
            else:
                repeat(*batch.tensors())
    pytorch.total([0.0])


def _own_pass(training: Training, batch: Batch) -> None:
    """Forward and backward pass whose gradients no other rank sees."""
    torch.stack(list(training.losses(batch).values())).sum().backward()
    training.updates.gradients.zero_()


def _on_tensors(training: Training, step: Step, *tensors: torch.Tensor) -> torch.Tensor:
    return step(training, batch_of(tensors))
