"""Detections of all images of ``data.val`` over the ranks, with masks in the images' own pixels."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Iterator, List, Optional

import numpy as np
import torch

from benchmarks.detection.annotations import DataSet
from benchmarks.detection.detections import Detections, empty, joined
from benchmarks.detection.pytorch.gather import gathered
from benchmarks.maskrcnn.pytorch.data import EvaluationBatch, evaluation_input
from benchmarks.maskrcnn.pytorch.masks import encoded
from benchmarks.maskrcnn.pytorch.model import Model
from benchmarks.maskrcnn.pytorch.proposals import Found


def detections(model: Model, data: DataSet, run: Any) -> Optional[Detections]:
    """Return the detections of all ranks on rank 0, None on the others, and where the run is to stop.

    Threads draw the masks of a batch while the device computes the next one.
    """
    config, parts = model.config, []
    with untuned(), ThreadPoolExecutor(config.threads) as pool:
        waiting: List[Future[Detections]] = []
        for batch in run.watch(evaluation_input(config, data, run.ranks)):
            found, masks = model.detect(batch)
            moved = Found(*(each.cpu() for each in found))
            waiting.append(pool.submit(in_images, data, batch, moved, masks.cpu().numpy(), config.edge))
        if run.interrupted:
            return None
        parts = [each.result() for each in waiting]
    return gathered(joined(parts) if parts else empty(masks=True), run.ranks)


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


def in_images(data: DataSet, batch: EvaluationBatch, found: Found, masks: np.ndarray, edge: float) -> Detections:
    """Bring boxes and masks of a batch into the pixels of the original images; fillers are left out."""
    rows = [_of_image(data, batch, found, masks, number, edge) for number in range(len(batch.positions))]
    return joined(rows) if rows else empty(masks=True)


def _of_image(
    data: DataSet, batch: EvaluationBatch, found: Found, masks: np.ndarray, number: int, edge: float
) -> Detections:
    position = int(batch.positions[number])
    mine = (found.images == number).nonzero().squeeze(1)
    width, height = data.val.sizes[position].tolist()
    scale = np.array([width, height], dtype=np.float32) / batch.sizes[number].cpu().numpy()
    last = np.array([0, 0, edge, edge], dtype=np.float32)
    boxes = (found.boxes[mine].numpy().astype(np.float32) - last) * np.tile(scale, 2) + last
    return Detections(
        images=np.full(len(mine), data.val.image_ids[position], np.int64),
        boxes=np.concatenate((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), axis=1),
        scores=found.scores[mine].numpy().astype(np.float32),
        labels=found.labels[mine].numpy().astype(np.int16),
        masks=encoded(masks[mine.numpy()], boxes, width, height),
    )
