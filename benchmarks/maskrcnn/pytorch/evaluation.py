"""Detections in ``data.val`` on all ranks, with masks in pixels of the original images."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Tuple

import numpy as np
import torch
from pycocotools import mask as coco_masks

from benchmarks.detection.annotations import DataSet
from benchmarks.detection.detections import Detections, empty, join_detections
from benchmarks.detection.pytorch import boxes
from benchmarks.maskrcnn.pytorch.data import EvaluationBatch, evaluation_input
from benchmarks.maskrcnn.pytorch.model import Model

THRESHOLD = 0.5  # probability from which a pixel belongs to an object


def detections(model: Model, data: DataSet, run: Any) -> Optional[Detections]:
    """Return all ranks' detections on rank 0; None on other ranks, or if the run is to stop.

    Threads paste a batch's masks while the device computes the next batch.
    """
    config = model.config
    with no_cudnn_benchmark(), ThreadPoolExecutor(config.threads) as pool:
        waiting: List[Future[Detections]] = []
        for batch in run.interruptible(evaluation_input(config, data, run.ranks)):
            detected, masks = model.detect(batch.images, batch.sizes)
            on_cpu = boxes.DetectedBoxes(*(future.cpu() for future in detected))
            waiting.append(pool.submit(to_detections, data, batch, on_cpu, masks.cpu().numpy(), config.edge))
        if run.interrupted:
            return None
        parts = [future.result() for future in waiting]
    return boxes.gather_detections(join_detections([empty(masks=True), *parts]), run.ranks)


@contextmanager
def no_cudnn_benchmark() -> Iterator[None]:
    """Disable cuDNN's autotuning, which would run for every shape and number of detections.

    It would run within the clock in the first evaluation; the submissions do not use it.
    """
    previous, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = previous


def to_detections(
    data: DataSet, batch: EvaluationBatch, detected: boxes.DetectedBoxes, masks: np.ndarray, edge: float
) -> Detections:
    """Convert a batch's boxes and masks to pixels in the original images; padding images are dropped."""
    # Padding images are at the end of the batch, so their detections are, too.
    detected = boxes.drop_padding(detected, len(batch.positions))
    sizes = np.asarray(data.val.sizes)[batch.positions]
    scales = sizes.astype(np.float32) / batch.sizes[: len(sizes)].cpu().numpy()
    ltrb = boxes.to_original(detected, scales, edge)
    image_masks = [paste(mask, box, *sizes[image]) for mask, box, image in zip(masks, ltrb, detected.images.tolist())]
    encoded = [coco_masks.encode(image_mask.view(np.uint8))["counts"] for image_mask in image_masks]
    return boxes.detections(detected, ltrb, data.val, batch.positions, encoded)


def paste(mask: np.ndarray, box: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return bool (height, width): True where ``mask``, resized to ``box``, exceeds THRESHOLD.

    Values are interpolated between pixel centres of the mask and 0 outside, like the padding in the submitted code.
    That code rounds the box to integers first; here the mask is sampled at pixel centres.

    Args:
        mask: float32 (m, m), probabilities.
        box: (4,), left, top, right, bottom in pixels.
        width: image width.
        height: image height.
    """
    pasted = np.zeros((height, width), dtype=bool, order="F")
    columns, of_x = _axis(box[0], box[2], width, mask.shape[1])
    rows, of_y = _axis(box[1], box[3], height, mask.shape[0])
    pasted[rows, columns] = of_y @ mask @ of_x.T > THRESHOLD
    return pasted


def _axis(start: float, end: float, length: int, size: int) -> Tuple[slice, np.ndarray]:
    # Range of image pixels covered by the mask along an axis, with interpolation weights float32 (pixels, size)
    scale = max(float(end - start), 1e-3) / size
    # The value falls to half of the outermost one at 0.5 mask pixels outside the box, and to 0 at 1 mask pixel.
    first, last = max(0, int(np.floor(start - scale))), min(length, int(np.ceil(end + scale)))
    positions = (np.arange(first, max(first, last)) + 0.5 - start) / scale - 0.5
    weights = np.maximum(0, 1 - np.abs(positions[:, None] - np.arange(size)))
    return slice(first, max(first, last)), weights.astype(np.float32)
