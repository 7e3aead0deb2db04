"""SSD with a ResNet-34 backbone up to the third stage, as in MLPerf.

N: images in a batch, C: classes without background.

Backbone parameters have torchvision's names, to load torchvision's weights. The third stage has stride 1 instead of
2, which gives 38 x 38 positions at 300 x 300 (resnet34 and SSD300 of the submissions, resnet.py and ssd300.py).
"""

from collections import OrderedDict
from math import sqrt
from pathlib import Path
from typing import Tuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.common.torch import files
from benchmarks.detection.annotations import Part
from benchmarks.detection.detections import Detections
from benchmarks.detection.pytorch import boxes
from benchmarks.detection.pytorch.boxes import DetectedBoxes, decode, top_per_image
from benchmarks.detection.pytorch.operators import nms
from benchmarks.ssd.pytorch.config import FIRST_STRIDE, HALVED, RATIOS, Config, map_sizes
from benchmarks.ssd.pytorch.norms import Norm

MULTIPLE = 8  # with pad_channels, head outputs are padded to a multiple, for fp16 tensor cores
COLOURS = 3
NEGATIVES = 3  # background boxes per positive box (arXiv 1512.02325, section 2.2)
BITS = 31  # bits in a non-negative float32, which sorts like the same bits as an integer
VARIANCES = (0.1, 0.1, 0.2, 0.2)  # the centre's x and y, width and height: scale_xy and scale_wh of the reference


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (He et al. 2015, arXiv 1512.03385)."""

    def __init__(self, inputs: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = norm(channels)
        self.downsample = None
        if stride != 1 or inputs != channels:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, channels, 1, stride, bias=False), norm(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + shortcut)


def _stage(inputs: int, channels: int, blocks: int, stride: int, norm: Norm) -> nn.Sequential:
    rest = [BasicBlock(channels, channels, 1, norm) for _ in range(blocks - 1)]
    return nn.Sequential(BasicBlock(inputs, channels, stride, norm), *rest)


def backbone(config: Config, norm: Norm) -> nn.Sequential:
    """Images (N, 3 or 4, S, S) to (N, 4 * width, S / 8, S / 8)."""
    width = config.width
    colours = COLOURS + config.pad_channels
    layers = OrderedDict(
        conv1=nn.Conv2d(colours, width, 7, 2, padding=3, bias=False),
        bn1=norm(width),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, 2, 1),
        layer1=_stage(width, width, config.blocks[0], 1, norm),
        layer2=_stage(width, 2 * width, config.blocks[1], 2, norm),
        layer3=_stage(2 * width, 4 * width, config.blocks[2], 1, norm),
    )
    network = nn.Sequential(layers)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    with torch.no_grad():
        layers["conv1"].weight[:, COLOURS:] = 0  # the fourth colour is empty
    return network


def _extra(inputs: int, inner: int, outputs: int, number: int) -> nn.Sequential:
    # Layers from the previous map to map ``number`` (from 0): half the size, or 2 positions less
    stride, padding = (2, 1) if number < HALVED else (1, 0)
    convs = [nn.Conv2d(inputs, inner, 1), nn.Conv2d(inner, outputs, 3, stride, padding)]
    for conv in convs:
        nn.init.xavier_uniform_(conv.weight)
    return nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU())


def _head(channels: int, boxes: int, classes: int, padded: bool) -> nn.Conv2d:
    # Convolution to offsets and logits of all boxes at a position, grouped by box
    outputs = boxes * (4 + classes)
    head = nn.Conv2d(channels, -(-outputs // MULTIPLE) * MULTIPLE if padded else outputs, 3, padding=1)
    # Separate initialization as in the submissions: the bounds depend on the number of outputs.
    offsets, logits = (nn.init.xavier_uniform_(torch.empty(boxes * n, channels, 3, 3)) for n in (4, classes))
    parts = (offsets.view(boxes, 4, channels, 3, 3), logits.view(boxes, classes, channels, 3, 3))
    with torch.no_grad():
        head.weight.zero_()
        head.weight[:outputs] = torch.cat(parts, 1).view(outputs, channels, 3, 3)
    return head


class SSD(nn.Module):
    """Images to offsets and logits of all default boxes."""

    def __init__(self, config: Config, classes: int, norm: Norm) -> None:
        """Initialize the weights from config.seed, in fp32 on the CPU; ``classes`` count the background."""
        super().__init__()
        torch.manual_seed(config.seed)
        maps, width = len(map_sizes(config.image_size)), config.width
        channels = [4 * width, 8 * width, 8 * width, 4 * width, 4 * width, 4 * width][:maps]
        inner = [4 * width, 4 * width, 2 * width, 2 * width, 2 * width]
        self._outputs = 4 + classes
        self._boxes = [2 + 2 * len(ratios) for ratios in RATIOS[:maps]]  # at a position, by map
        self.backbone = backbone(config, norm)
        self.extras = nn.ModuleList(
            _extra(inputs, inner_width, outputs, number)
            for number, (inputs, inner_width, outputs) in enumerate(zip(channels, inner, channels[1:]), 1)
        )
        self.heads = nn.ModuleList(
            _head(width_in, boxes, classes, config.pad_channels) for width_in, boxes in zip(channels, self._boxes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(N, 3 or 4, S, S) to (N, boxes, 4 + classes), the boxes in the order of ``default_boxes``."""
        features = self.backbone(images)
        predictions = [self._predictions(features, 0)]
        for number, extra in enumerate(self.extras, 1):
            features = extra(features)
            predictions.append(self._predictions(features, number))
        return torch.cat(predictions, 1)

    def loss(self, images: torch.Tensor, offsets: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return multibox_loss(self(images), offsets, labels)

    def _predictions(self, features: torch.Tensor, number: int) -> torch.Tensor:
        boxes = self._boxes[number]
        # For NHWC this moves no data: positions, boxes at a position, outputs per box.
        outputs = self.heads[number](features).permute(0, 2, 3, 1)[..., : boxes * self._outputs]
        return outputs.reshape(features.shape[0], -1, self._outputs)


WEIGHTS = "a ResNet-34 in torchvision's names (resnet34-b627a593.pth)"


def load_backbone(network: SSD, path: Path) -> None:
    """Load the backbone weights in ``path``, as in the submissions; later stages in the file are ignored.

    Raises:
        Problem: the file is missing, unreadable, or does not fit the network.
    """
    hint = "name a file with --set backbone=FILE, in the data folder or anywhere, or leave it out"
    weights = files.tensors_of(files.load(path, WEIGHTS, hint))
    with torch.no_grad():
        for name, parameter in network.backbone.state_dict().items():
            weight = weights.get(name)
            # The file lacks weights for the padding channel.
            target = parameter[:, : weight.shape[1]] if weight is not None and name == "conv1.weight" else parameter
            if weight is None or weight.shape != target.shape:
                got = "nothing" if weight is None else f"shape {tuple(weight.shape)}"
                raise Problem(f"{path}: {got} for {name}", f"{WEIGHTS}: {tuple(parameter.shape)}", hint)
            target.copy_(weight)


# -- default boxes ----------------------------------------------------------------------------------------


def default_boxes(image_size: int, scales: Tuple[float, ...]) -> np.ndarray:
    """Return the default boxes of all positions: left, top, right, bottom, float32 (boxes, 4).

    For 300 x 300 as in the MLPerf reference (dboxes300_coco in box_coder.py of the submissions): six maps with 38,
    19, 10, 5, 3 and 1 positions per side and 8,732 boxes. Other image sizes follow the same rules. In contrast to
    the reference, boxes at a position are contiguous, as in the output of channels_last convolutions.

    Args:
        image_size: pixels per side.
        scales: size of the smaller square box by map, and one more, as fractions of the image, like the result.
    """
    maps = []
    for number, size in enumerate(map_sizes(image_size)):
        # Cells per side; the last cell may extend beyond the image
        cells = image_size / (FIRST_STRIDE << number) if number < HALVED else size
        scale = scales[number]
        middle = sqrt(scale * scales[number + 1])
        shapes = [(scale, scale), (middle, middle)]
        for ratio in RATIOS[number]:
            wide, narrow = scale * sqrt(ratio), scale / sqrt(ratio)
            shapes += [(wide, narrow), (narrow, wide)]
        centres = (np.arange(size) + 0.5) / cells
        y, x, shape = np.meshgrid(centres, centres, np.arange(len(shapes)), indexing="ij")
        sides = np.array(shapes)[shape]
        maps.append(np.stack((x, y, sides[..., 0], sides[..., 1]), -1).reshape(-1, 4))
    # As the reference: neither a centre nor a size is larger than the image, but the corners may be outside.
    boxes = np.concatenate(maps).clip(0.0, 1.0)
    half = boxes[:, 2:] / 2
    return np.concatenate((boxes[:, :2] - half, boxes[:, :2] + half), 1).astype(np.float32)


# -- loss -------------------------------------------------------------------------------------------------


def multibox_loss(predictions: torch.Tensor, offsets: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean over images of the summed box losses, divided by the number of positive boxes.

    As in the reference and the submissions (opt_loss.py). An image without positive boxes counts as 0.

    Args:
        predictions: (N, boxes, 4 + classes): offsets, then logits; class 0 is the background.
        offsets: (N, boxes, 4), target offsets of positive boxes.
        labels: int (N, boxes), 0 for background.
    """
    wide = torch.promote_types(predictions.dtype, torch.float32)
    predictions, labels = predictions.to(wide), labels.long()
    positive = labels > 0
    count = positive.sum(1)
    distance = functional.smooth_l1_loss(predictions[..., :4], offsets.to(wide), reduction="none").sum(-1)
    logits = predictions[..., 4:].flatten(0, 1)
    entropy = functional.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)
    with torch.no_grad():
        # abs: the bits of -0.0 would be a negative integer.
        weight = positive + hard_negatives(entropy.abs().masked_fill(positive, -1.0), NEGATIVES * count)
    total = (positive * distance + weight * entropy).sum(1)
    return (total / count.clamp(min=1) * (count > 0)).mean()


def hard_negatives(losses: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return weights (N, boxes) that select the largest ``counts`` (N,) of ``losses`` (N, boxes).

    Negative losses are not selected; if fewer than ``counts`` are non-negative, all non-negative losses are.

    This is a top-k with k per image and fixed shapes: the k-th largest loss is found bit by bit, by counting larger
    losses, instead of sorting thousands of losses for a few dozen. Losses equal to the k-th share the remaining
    weight.
    """
    order = losses.float().contiguous().view(torch.int32)
    k = torch.minimum(counts, (order >= 0).sum(1))[:, None]
    smallest = torch.zeros_like(k, dtype=torch.int32)
    for bit in reversed(range(BITS)):
        candidate = smallest | (1 << bit)
        enough = (order >= candidate).sum(1, keepdim=True) >= k
        smallest = torch.where(enough, candidate, smallest)
    larger, equal = order > smallest, order == smallest
    remaining = k - larger.sum(1, keepdim=True)
    weights = larger + equal * (remaining / equal.sum(1, keepdim=True).clamp(min=1))
    return torch.where(k > 0, weights, torch.zeros_like(weights)).to(losses.dtype)


# -- detections -------------------------------------------------------------------------------------------


def decode_predictions(predictions: torch.Tensor, defaults: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return corners (N, boxes, 4) as shares of the image and probabilities (N, boxes, C).

    Args:
        predictions: (N, boxes, 4 + C + 1), of ``SSD.forward``.
        defaults: (boxes, 4), of ``default_boxes``.
    """
    predictions = predictions.float()
    weights = [1 / variance for variance in VARIANCES]
    return decode(predictions[..., :4], defaults, weights), predictions[..., 4:].softmax(-1)[..., 1:]


@torch.no_grad()
def detect(network: SSD, images: torch.Tensor, defaults: torch.Tensor, config: Config) -> DetectedBoxes:
    """Return the detections in ``images`` (N, 3 or 4, S, S); the network is to be in evaluation mode."""
    with pytorch.autocast(images.device, config.precision):
        predictions = network(images)
    return select_detections(*decode_predictions(predictions, defaults), config)


@torch.no_grad()
def select_detections(corners: torch.Tensor, probabilities: torch.Tensor, config: Config) -> DetectedBoxes:
    """Apply NMS to the output of ``decode_predictions``, as decode_batch of the submissions.

    Per class and image up to config.detections boxes with the highest probabilities enter NMS; then the best boxes
    of all classes are kept, up to the same number per image. All images and classes are processed in parallel.
    """
    probabilities = probabilities.transpose(1, 2)  # (N, C, boxes)
    scores, indices = probabilities.topk(min(config.detections, corners.shape[1]), dim=-1)
    image, label, rank = (scores > config.score_threshold).nonzero(as_tuple=True)
    score, box = scores[image, label, rank], corners[image, indices[image, label, rank]]
    positions = nms(box, score, image * probabilities.shape[1] + label, config.nms_threshold)
    positions = top_per_image(positions, image, config.detections)
    return DetectedBoxes(image[positions], box[positions], score[positions], label[positions] + 1)


def to_original(detected: DetectedBoxes, part: Part, positions: np.ndarray) -> Detections:
    """Return detections in pixels of the images at ``positions``; later images of the batch are padding."""
    detected = boxes.drop_padding(detected, len(positions))
    ltrb = boxes.to_original(detected, np.asarray(part.sizes)[positions].astype(np.float32))
    return boxes.detections(detected, ltrb, part, positions)
