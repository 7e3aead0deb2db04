"""Detections of all images of ``data.val`` over the ranks, with masks in the images' own pixels."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Tuple

import numpy as np
import torch
from pycocotools import mask as coco_masks

from benchmarks.detection.annotations import DataSet
from benchmarks.detection.detections import Detections, empty, joined
from benchmarks.detection.pytorch import boxes
from benchmarks.maskrcnn.pytorch.data import EvaluationBatch, evaluation_input
from benchmarks.maskrcnn.pytorch.model import Model

THRESHOLD = 0.5  # probability from which a pixel belongs to an object


def detections(model: Model, data: DataSet, run: Any) -> Optional[Detections]:
    """Return the detections of all ranks on rank 0, None on the others, and where the run is to stop.

    Threads draw the masks of a batch while the device computes the next one.
    """
    config = model.config
    with untuned(), ThreadPoolExecutor(config.threads) as pool:
        waiting: List[Future[Detections]] = []
        for batch in run.interruptible(evaluation_input(config, data, run.ranks)):
            found, masks = model.detect(batch.images, batch.sizes)
            moved = boxes.Found(*(each.cpu() for each in found))
            waiting.append(pool.submit(in_images, data, batch, moved, masks.cpu().numpy(), config.edge))
        if run.interrupted:
            return None
        parts = [each.result() for each in waiting]
    return boxes.gathered(joined([empty(masks=True), *parts]), run.ranks)


@contextmanager
def untuned() -> Iterator[None]:
    """Let cuDNN take convolutions without measuring them: it would for each shape and each number of detections.

    Those of the first evaluation would be measured inside the clock; the submissions never let it measure.
    """
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def in_images(data: DataSet, batch: EvaluationBatch, found: boxes.Found, masks: np.ndarray, edge: float) -> Detections:
    """Bring boxes and masks of a batch into the pixels of the original images; fillers are left out."""
    # What fills the batch comes last, and so do its detections.
    found = boxes.counted(found, len(batch.positions))
    sizes = np.asarray(data.val.sizes)[batch.positions]
    scales = sizes.astype(np.float32) / batch.sizes[: len(sizes)].cpu().numpy()
    ltrb = boxes.in_originals(found, scales, edge)
    drawn = [paste(mask, box, *sizes[image]) for mask, box, image in zip(masks, ltrb, found.images.tolist())]
    encoded = [coco_masks.encode(each.view(np.uint8))["counts"] for each in drawn]
    return boxes.detections(found, ltrb, data.val, batch.positions, encoded)


def paste(mask: np.ndarray, box: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return bool (height, width): where ``mask``, stretched over ``box``, is above THRESHOLD.

    Between the middles of a mask's pixels its values are interpolated, and outside of it they are 0, as the submitted
    code pads it; that code rounds the box to whole pixels first, here each pixel's middle is looked up.

    Args:
        mask: float32 (m, m), probabilities.
        box: (4,), left, top, right, bottom in pixels.
        width: of the image.
        height: of the image.
    """
    drawn = np.zeros((height, width), dtype=bool, order="F")
    columns, of_x = _axis(box[0], box[2], width, mask.shape[1])
    rows, of_y = _axis(box[1], box[3], height, mask.shape[0])
    drawn[rows, columns] = of_y @ mask @ of_x.T > THRESHOLD
    return drawn


def _axis(low: float, high: float, length: int, size: int) -> Tuple[slice, np.ndarray]:
    # Pixels of the image that a mask's pixels reach on one axis, and their weights float32 (pixels, size)
    scale = max(float(high - low), 1e-3) / size
    # Half a mask's pixel beyond the box the value has fallen to half of the outermost one, beyond a whole one to 0.
    first, last = max(0, int(np.floor(low - scale))), min(length, int(np.ceil(high + scale)))
    places = (np.arange(first, max(first, last)) + 0.5 - low) / scale - 0.5
    weights = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(size)))
    return slice(first, max(first, last)), weights.astype(np.float32)
