"""From what the network gives for its default boxes to detections in the original images."""

from __future__ import annotations

from typing import NamedTuple, Tuple

import numpy as np
import torch

from benchmarks.detection.annotations import Part
from benchmarks.detection.detections import Detections
from benchmarks.detection.pytorch.boxes import ltrb_to_xywh
from benchmarks.detection.pytorch.nms import nms
from benchmarks.ssd.pytorch.coding import decode
from benchmarks.ssd.pytorch.config import Config


class Found(NamedTuple):
    """K detections of a batch, those of an image by falling score."""

    images: torch.Tensor
    """int64 (K,): number of the image in the batch."""
    boxes: torch.Tensor
    """(K, 4): left, top, right, bottom as shares of the image."""
    scores: torch.Tensor
    """(K,)"""
    labels: torch.Tensor
    """int64 (K,): 1 to C."""


@torch.no_grad()
def detect(predictions: torch.Tensor, defaults: torch.Tensor, config: Config) -> Found:
    """Return the detections in ``predictions`` (N, boxes, 4 + classes), as decode_batch of the submissions."""
    return chosen(*decoded(predictions, defaults), config)


def decoded(predictions: torch.Tensor, defaults: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return corners (N, boxes, 4) and probabilities (N, boxes, classes) of ``predictions``, without the background."""
    predictions = predictions.float()
    return decode(predictions[..., :4], defaults), predictions[..., 4:].softmax(-1)[..., 1:]


@torch.no_grad()
def chosen(boxes: torch.Tensor, probabilities: torch.Tensor, config: Config) -> Found:
    """Return the detections among what ``decoded`` gives.

    Of each class of an image the boxes with the highest probabilities, at most config.detections, go through
    non-maximum suppression; the best of all classes are kept, again at most so many. All images and classes of the
    batch are treated at once.
    """
    probabilities = probabilities.transpose(1, 2)
    scores, places = probabilities.topk(min(config.detections, boxes.shape[1]), dim=-1)
    image, label, rank = (scores > config.score_threshold).nonzero(as_tuple=True)
    score, box = scores[image, label, rank], boxes[image, places[image, label, rank]]
    kept = nms(box, score, image * probabilities.shape[1] + label, config.nms_threshold)
    kept = kept[image[kept].argsort(stable=True)]
    kept = kept[_number_within(image[kept]) < config.detections]
    return Found(image[kept], box[kept], score[kept], label[kept] + 1)


def _number_within(sorted_images: torch.Tensor) -> torch.Tensor:
    """Return the number of each element among those equal to it, which are next to each other."""
    first = torch.searchsorted(sorted_images, sorted_images)
    return torch.arange(len(sorted_images), device=sorted_images.device) - first


def in_original(found: Found, part: Part, positions: np.ndarray) -> Detections:
    """Return detections in pixels of the images at ``positions``; those of later images of the batch are left out."""
    counted = (found.images < len(positions)).cpu().numpy()
    of_image = positions[found.images.cpu().numpy()[counted]]
    size = np.asarray(part.sizes)[of_image].astype(np.float32)
    boxes = ltrb_to_xywh(found.boxes).cpu().numpy()[counted] * np.concatenate((size, size), 1)
    return Detections(
        images=np.asarray(part.image_ids)[of_image],
        boxes=boxes.astype(np.float32),
        scores=found.scores.cpu().numpy()[counted],
        labels=found.labels.cpu().numpy()[counted].astype(np.int16),
    )
