"""Batches of the DALI pipelines of one rank as tensors, and a batch of noise."""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import Any, Deque, Dict, Iterator, Mapping, NamedTuple, Optional, Tuple

import numpy as np
import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch.dali import to_tensor
from benchmarks.detection.annotations import Part
from benchmarks.ssd.pytorch import pipeline
from benchmarks.ssd.pytorch.config import Config
from benchmarks.ssd.pytorch.default_boxes import default_boxes
from benchmarks.ssd.pytorch.model import COLOURS


class Batch(NamedTuple):
    """What a training step takes."""

    images: torch.Tensor  # (N, 3 or 4, S, S), normalized, in the memory order of config.layout
    offsets: torch.Tensor  # (N, boxes, 4) from the default boxes, where there is an object
    labels: torch.Tensor  # int32 (N, boxes), 0 for the background


def steps_per_epoch(part: Part, config: Config, ranks: Ranks) -> int:
    """Steps of a pass over the training images with objects; the last one is filled up."""
    return -(-len(part.with_objects) // (config.batch_size * ranks.size))


class TrainingInput:
    """An endless stream of training batches of one rank; begins anew, or resumes exactly what ``state_dict`` saved."""

    def __init__(self, config: Config, part: Part, ranks: Ranks, saved: Optional[Mapping[str, Any]] = None) -> None:
        self._config, self._device = config, ranks.context
        state = saved["input"] if saved else None
        self._pipeline = pipeline.training_pipeline(config, part, ranks, state)
        self._ready: Deque[Batch] = deque()
        # Before the batches that are ready, of which some were handed out.
        self._state, self._handed_out = b"", 0
        for _ in range(saved["input_handed_out"] if saved else 0):
            self.next()

    def next(self) -> Batch:
        """Return the next batch, on this rank's device."""
        if not self._ready:
            self._fill()
        self._handed_out += 1
        return self._ready.popleft()

    def _fill(self) -> None:
        count = self._config.dali_batches
        # DALI's state is that after the last output: where an output is many batches, keep the one before it.
        self._state = self._pipeline.checkpoint() if count > 1 else b""
        images, offsets, labels = (to_tensor(self._device, output) for output in self._pipeline.run())
        parts = (_renamed(images, self._config).chunk(count), offsets.chunk(count), labels.chunk(count))
        self._ready.extend(Batch(*each) for each in zip(*parts))
        self._handed_out = 0

    def state_dict(self) -> Dict[str, Any]:
        """State after the last batch handed out."""
        if self._ready:
            return {"input": self._state, "input_handed_out": self._handed_out}
        return {"input": self._pipeline.checkpoint(), "input_handed_out": 0}


class EvaluationInput:
    """Passes over this rank's share of the validation images with objects, each counted exactly once."""

    def __init__(self, config: Config, part: Part, ranks: Ranks) -> None:
        self._config, self._device = config, ranks.context
        self.part = part
        self.total = len(part.with_objects)
        self._mine = pipeline.shard_size(self.total, ranks.rank, ranks.size)
        # All ranks run as many batches as the largest shard needs, so that they stay together.
        self.batches = ceil(ceil(self.total / ranks.size) / config.eval_batch_size)
        self._pipeline = pipeline.evaluation_pipeline(config, part, ranks)

    def one_pass(self) -> Iterator[Tuple[torch.Tensor, np.ndarray]]:
        """Yield images and the positions in the part of those of them that count, which come first."""
        size = self._config.eval_batch_size
        for number in range(self.batches):
            valid = max(0, min(size, self._mine - number * size))
            images, positions = self._pipeline.run()
            yield (
                _renamed(to_tensor(self._device, images), self._config),
                np.array(positions.as_array()).reshape(-1)[:valid],
            )


def _renamed(images: torch.Tensor, config: Config) -> torch.Tensor:
    # The axes are renamed, not moved: NHWC in memory is what PyTorch calls channels_last.
    return images.permute(0, 3, 1, 2) if config.layout == "NHWC" else images


def synthetic_images(config: Config, device: torch.device, count: int) -> torch.Tensor:
    """Noise in the type and memory order of the real images."""
    dtype = torch.float16 if config.precision == "fp16" else torch.float32
    colours, side = COLOURS + config.pad_channels, config.image_size
    shape = (count, side, side, colours) if config.layout == "NHWC" else (count, colours, side, side)
    images = torch.rand(shape)
    if config.pad_channels:
        images.select(3 if config.layout == "NHWC" else 1, COLOURS).zero_()
    return _renamed(images.to(device, dtype), config)


def synthetic_batch(config: Config, classes: int, device: torch.device) -> Batch:
    """One training batch of noise, with as many matched default boxes as an image of COCO has, about one of 300."""
    boxes = len(default_boxes(config.image_size, config.box_scales))
    labels = torch.randint(1, classes, (config.batch_size, boxes)) * (torch.rand(config.batch_size, boxes) < 1 / 300)
    offsets = torch.randn(config.batch_size, boxes, 4) * (labels > 0)[..., None]
    images = synthetic_images(config, device, config.batch_size)
    return Batch(images, offsets.to(device), labels.int().to(device))
