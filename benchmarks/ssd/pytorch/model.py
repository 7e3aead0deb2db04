"""SSD with a ResNet-34 up to its third stage, as MLPerf has it: images go in, a loss or detections come out.

N is the images of a batch, C the classes without the background.

The backbone's parameters have torchvision's names, so that its weights load as they are. The third stage has stride 1
instead of 2: at 300 x 300 it gives 38 x 38 positions (resnet34 and SSD300 of the submissions, resnet.py and ssd300.py).
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
from benchmarks.detection.pytorch.boxes import Found, best_of_images, decode
from benchmarks.detection.pytorch.operators import nms
from benchmarks.ssd.pytorch.config import FIRST_STRIDE, HALVED, RATIOS, Config, map_sizes
from benchmarks.ssd.pytorch.norms import Norm

MULTIPLE = 8  # outputs of a head with pad_channels are a multiple, as tensor cores want it in fp16
COLOURS = 3
NEGATIVES = 3  # background boxes for each box that has an object (arXiv 1512.02325, section 2.2)
BITS = 31  # bits of a float32 that is not negative, whose order is that of its bits read as a whole number
VARIANCES = (0.1, 0.1, 0.2, 0.2)  # the centre's x and y, width and height: scale_xy and scale_wh of the reference


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (He et al. 2015, arXiv 1512.03385)."""

    def __init__(self, before: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = norm(channels)
        self.downsample = None
        if stride != 1 or before != channels:
            self.downsample = nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), norm(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + shortcut)


def _stage(before: int, channels: int, blocks: int, stride: int, norm: Norm) -> nn.Sequential:
    rest = [BasicBlock(channels, channels, 1, norm) for _ in range(blocks - 1)]
    return nn.Sequential(BasicBlock(before, channels, stride, norm), *rest)


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


def _extra(before: int, inner: int, after: int, number: int) -> nn.Sequential:
    # What makes map ``number`` (from 0) of the one before: half the positions, or a border less
    stride, padding = (2, 1) if number < HALVED else (1, 0)
    convs = [nn.Conv2d(before, inner, 1), nn.Conv2d(inner, after, 3, stride, padding)]
    for conv in convs:
        nn.init.xavier_uniform_(conv.weight)
    return nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU())


def _head(channels: int, boxes: int, classes: int, padded: bool) -> nn.Conv2d:
    # A convolution to the offsets and logits of all boxes of a position, those of a box next to each other
    outputs = boxes * (4 + classes)
    head = nn.Conv2d(channels, -(-outputs // MULTIPLE) * MULTIPLE if padded else outputs, 3, padding=1)
    # Drawn apart, as in the submissions: the bounds depend on the number of outputs.
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
        self._boxes = [2 + 2 * len(ratios) for ratios in RATIOS[:maps]]  # at each position of each map
        self.backbone = backbone(config, norm)
        self.extras = nn.ModuleList(
            _extra(before, inside, after, number)
            for number, (before, inside, after) in enumerate(zip(channels, inner, channels[1:]), 1)
        )
        self.heads = nn.ModuleList(
            _head(each, boxes, classes, config.pad_channels) for each, boxes in zip(channels, self._boxes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(N, 3 or 4, S, S) to (N, boxes, 4 + classes), the boxes in the order of ``default_boxes``."""
        features = self.backbone(images)
        found = [self._predictions(features, 0)]
        for number, extra in enumerate(self.extras, 1):
            features = extra(features)
            found.append(self._predictions(features, number))
        return torch.cat(found, 1)

    def loss(self, images: torch.Tensor, offsets: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return multibox_loss(self(images), offsets, labels)

    def _predictions(self, features: torch.Tensor, number: int) -> torch.Tensor:
        boxes = self._boxes[number]
        # Where the layout is NHWC nothing moves here: positions, boxes of a position, outputs of a box.
        outputs = self.heads[number](features).permute(0, 2, 3, 1)[..., : boxes * self._outputs]
        return outputs.reshape(features.shape[0], -1, self._outputs)


WEIGHTS = "a ResNet-34 in torchvision's names (resnet34-333f7ec4.pth and later ones)"


def load_backbone(network: SSD, path: Path) -> None:
    """Give the backbone the weights of ``path``, as the submissions begin; what is behind its third stage is left out.

    Raises:
        Problem: the file is not there, cannot be read, or does not fit the network.
    """
    hint = "name a file with --set backbone=FILE, in the data folder or anywhere, or leave it out"
    given = files.tensors_of(files.load(path, WEIGHTS, hint))
    with torch.no_grad():
        for name, ours in network.backbone.state_dict().items():
            theirs = given.get(name)
            # The colour that is empty has no weights in the file.
            place = ours[:, : theirs.shape[1]] if theirs is not None and name == "conv1.weight" else ours
            if theirs is None or theirs.shape != place.shape:
                found = "nothing" if theirs is None else f"shape {tuple(theirs.shape)}"
                raise Problem(f"{path}: {found} for {name}", f"{WEIGHTS}: {tuple(ours.shape)}", hint)
            place.copy_(theirs)


# -- default boxes ----------------------------------------------------------------------------------------


def default_boxes(image_size: int, scales: Tuple[float, ...]) -> np.ndarray:
    """Return where each position of each map looks for objects: left, top, right, bottom, float32 (boxes, 4).

    As the MLPerf reference has them for 300 x 300 (dboxes300_coco in box_coder.py of the submissions): six maps of 38,
    19, 10, 5, 3 and 1 positions a side and 8,732 boxes. Other image sizes follow the same rules. In contrast to the
    reference the boxes of one position are next to each other, as a channels_last convolution writes its outputs.

    Args:
        image_size: pixels a side.
        scales: size of the smaller square box of each map, and one more, as shares of the image, as the result is.
    """
    found = []
    for number, size in enumerate(map_sizes(image_size)):
        # Positions a side, of which the last one may reach out of the image
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
        found.append(np.stack((x, y, sides[..., 0], sides[..., 1]), -1).reshape(-1, 4))
    # As the reference: neither a centre nor a size is larger than the image, but the corners may be outside.
    boxes = np.concatenate(found).clip(0.0, 1.0)
    half = boxes[:, 2:] / 2
    return np.concatenate((boxes[:, :2] - half, boxes[:, :2] + half), 1).astype(np.float32)


# -- loss -------------------------------------------------------------------------------------------------


def multibox_loss(predictions: torch.Tensor, offsets: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over the images of the sum over the chosen boxes, divided by the number of boxes that have an object.

    As the reference and the submissions (opt_loss.py). An image without such a box counts as 0.

    Args:
        predictions: (N, boxes, 4 + classes): offsets, then logits; class 0 is the background.
        offsets: (N, boxes, 4), what the first four are to be where there is an object.
        labels: int (N, boxes), 0 where there is none.
    """
    wide = torch.promote_types(predictions.dtype, torch.float32)
    predictions, labels = predictions.to(wide), labels.long()
    positive = labels > 0
    count = positive.sum(1)
    distance = functional.smooth_l1_loss(predictions[..., :4], offsets.to(wide), reduction="none").sum(-1)
    logits = predictions[..., 4:].flatten(0, 1)
    entropy = functional.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)
    with torch.no_grad():
        # abs: a loss of 0 may have a sign, by which its bits would be those of a negative number.
        weight = positive + hard_negatives(entropy.abs().masked_fill(positive, -1.0), NEGATIVES * count)
    total = (positive * distance + weight * entropy).sum(1)
    return (total / count.clamp(min=1) * (count > 0)).mean()


def hard_negatives(losses: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return weights (N, boxes) that choose the largest ``counts`` (N,) of ``losses`` (N, boxes).

    Negative ones are never chosen, and all others where there are fewer than wanted.

    A top-k with another k for each image, in shapes that do not depend on the values: the k-th largest loss is found
    bit by bit, by counting how many are at least as large, instead of by sorting thousands of losses of which some
    dozens are wanted. Losses that equal the k-th share what is left of the count.
    """
    order = losses.float().contiguous().view(torch.int32)
    wanted = torch.minimum(counts, (order >= 0).sum(1))[:, None]
    smallest = torch.zeros_like(wanted, dtype=torch.int32)
    for bit in reversed(range(BITS)):
        candidate = smallest | (1 << bit)
        enough = (order >= candidate).sum(1, keepdim=True) >= wanted
        smallest = torch.where(enough, candidate, smallest)
    larger, equal = order > smallest, order == smallest
    left = wanted - larger.sum(1, keepdim=True)
    chosen = larger + equal * (left / equal.sum(1, keepdim=True).clamp(min=1))
    return torch.where(wanted > 0, chosen, torch.zeros_like(chosen)).to(losses.dtype)


# -- detections -------------------------------------------------------------------------------------------


def decoded(predictions: torch.Tensor, defaults: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return corners (N, boxes, 4) as shares of the image and probabilities (N, boxes, C).

    Args:
        predictions: (N, boxes, 4 + C + 1), of ``SSD.forward``.
        defaults: (boxes, 4), of ``default_boxes``.
    """
    predictions = predictions.float()
    weights = [1 / variance for variance in VARIANCES]
    return decode(predictions[..., :4], defaults, weights), predictions[..., 4:].softmax(-1)[..., 1:]


@torch.no_grad()
def detect(network: SSD, images: torch.Tensor, defaults: torch.Tensor, config: Config) -> Found:
    """Return the detections in ``images`` (N, 3 or 4, S, S); the network is to be in evaluation mode."""
    with pytorch.autocast(images.device, config.precision):
        predictions = network(images)
    return chosen(*decoded(predictions, defaults), config)


@torch.no_grad()
def chosen(corners: torch.Tensor, probabilities: torch.Tensor, config: Config) -> Found:
    """Return the detections among what ``decoded`` gives, as decode_batch of the submissions.

    Of each class of an image the boxes with the highest probabilities, at most config.detections, go through
    non-maximum suppression; the best of all classes are kept, again at most that many. All images and classes of the
    batch are treated at once.
    """
    probabilities = probabilities.transpose(1, 2)  # (N, C, boxes)
    scores, places = probabilities.topk(min(config.detections, corners.shape[1]), dim=-1)
    image, label, rank = (scores > config.score_threshold).nonzero(as_tuple=True)
    score, box = scores[image, label, rank], corners[image, places[image, label, rank]]
    kept = nms(box, score, image * probabilities.shape[1] + label, config.nms_threshold)
    kept = best_of_images(kept, image, config.detections)
    return Found(image[kept], box[kept], score[kept], label[kept] + 1)


def in_originals(found: Found, part: Part, positions: np.ndarray) -> Detections:
    """Return detections in pixels of the images at ``positions``; those of later images of the batch are left out."""
    found = boxes.counted(found, len(positions))
    ltrb = boxes.in_originals(found, np.asarray(part.sizes)[positions].astype(np.float32))
    return boxes.detections(found, ltrb, part, positions)
