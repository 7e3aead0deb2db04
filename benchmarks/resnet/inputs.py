"""Batches of the DALI pipelines of one rank, for any framework; ``convert`` makes its tensors of DALI's.

``convert(images, labels)`` takes what a pipeline puts out (TensorListCPU or TensorListGPU, all samples of one
shape) and returns tensors, labels of shape (batch,), that stay valid when DALI reuses its memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Tuple

from benchmarks.common.ranks import Ranks
from benchmarks.resnet import pipeline
from benchmarks.resnet.config import Hyperparameters

Convert = Callable[[Any, Any], Tuple[Any, Any]]


def count_records(index: Path) -> int:
    """Number of records that a RecordIO index lists."""
    with open(index, "rb") as file:
        return sum(1 for _ in file)


def steps_per_epoch(train_images: int, config: Hyperparameters, ranks: Ranks) -> int:
    """Steps of a pass over the training images; the last one is filled up."""
    return -(-train_images // (config.batch_size * ranks.size))


def _source(config: Hyperparameters, data: Path, split: str, ranks: Ranks, batch_size: int) -> pipeline.Input:
    return pipeline.Input(
        records=data / f"{split}.rec",
        index=data / f"{split}.idx",
        shard=ranks.rank,
        shards=ranks.size,
        batch_size=batch_size,
        device_id=ranks.local_rank if config.device == "gpu" else None,
        threads=config.dali_threads,
        prefetch=config.dali_prefetch,
        image_size=config.image_size,
        layout=config.layout,
        precision=config.precision,
        pad_channels=config.pad_channels,
        # Every rank draws crops of its own; the order of the images must be the same on all of them,
        # and is: the reader cuts the shards before it shuffles.
        seed=config.seed + 1000 * ranks.rank,
        mmap=config.dali_mmap,
    )


class TrainingInput:
    """An endless stream of training batches of one rank; images in config.layout, labels (batch,)."""

    def __init__(
        self,
        config: Hyperparameters,
        data: Path,
        ranks: Ranks,
        convert: Convert,
        checkpoint: Optional[bytes] = None,
    ) -> None:
        self._convert = convert
        source = _source(config, data, "train", ranks, config.batch_size)
        augmentation = pipeline.Augmentation(
            crop_area=config.crop_area,
            crop_ratio=config.crop_ratio,
            mirror=config.mirror,
            shuffle_buffer=config.dali_shuffle_buffer,
            decoder_cache_mb=config.dali_decoder_cache_mb,
            hw_decoder_load=config.dali_hw_decoder_load,
        )
        self._pipeline = pipeline.training_pipeline(source, augmentation, checkpoint)

    def next(self) -> Tuple[Any, Any]:
        """The next batch, on this rank's device."""
        return self._convert(*self._pipeline.run())

    def checkpoint(self) -> bytes:
        """State after the last batch handed out; give it to a new TrainingInput to go on exactly."""
        state: bytes = self._pipeline.checkpoint()
        return state


class EvaluationInput:
    """Passes over this rank's share of the validation images, each counted exactly once."""

    def __init__(self, config: Hyperparameters, data: Path, ranks: Ranks, convert: Convert) -> None:
        self._convert = convert
        self._batch_size = config.eval_batch_size or config.batch_size
        self.total = count_records(data / "val.idx")
        self._mine = pipeline.shard_size(self.total, ranks.rank, ranks.size)
        # All ranks run as many batches as the largest shard needs, so that they stay together.
        largest = -(-self.total // ranks.size)
        self.batches = -(-largest // self._batch_size)
        source = _source(config, data, "val", ranks, self._batch_size)
        cache = config.dali_decoder_cache_mb if config.device == "gpu" else 0
        self._pipeline = pipeline.evaluation_pipeline(source, config.eval_resize, cache)

    def one_pass(self) -> Iterator[Tuple[Any, Any, int]]:
        """Batches of images and labels with the number of their first images that count."""
        for number in range(self.batches):
            valid = max(0, min(self._batch_size, self._mine - number * self._batch_size))
            images, labels = self._convert(*self._pipeline.run())
            yield images, labels, valid
