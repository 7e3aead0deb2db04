"""The input of ResNet, defined once in DALI for CPU and GPU and for every framework.

Training: read RecordIO by shards, decode a random crop (only the region of interest), resize, mirror,
normalize. Evaluation: resize the shorter side, crop the centre, normalize; every image exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from nvidia.dali import fn, pipeline_def, types

# Mean and standard deviation of ImageNet's training images, per colour, on the scale 0..255. The means are
# those in the v0.5 logs (input_mean_subtraction); the deviations are the usual 0.229, 0.224, 0.225.
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)


@dataclass(frozen=True)
class Input:
    """What a pipeline needs to know; sizes in pixels, see config.py for the rest."""

    records: Path
    index: Path
    shard: int
    shards: int
    batch_size: int
    device_id: Optional[int]
    threads: int
    prefetch: int
    image_size: int
    layout: str
    precision: str
    pad_channels: bool
    seed: int
    mmap: bool


@dataclass(frozen=True)
class Augmentation:
    """Random part of the training input."""

    crop_area: Tuple[float, ...]
    crop_ratio: Tuple[float, ...]
    mirror: bool
    shuffle_buffer: int
    decoder_cache_mb: int
    hw_decoder_load: float


def _decoder(source: Input) -> Dict[str, Any]:
    return {"device": "cpu" if source.device_id is None else "mixed", "output_type": types.RGB}


def _normalize(images: Any, source: Input, mirror: Any) -> Any:
    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT16 if source.precision == "fp16" else types.FLOAT,
        output_layout=source.layout.replace("N", ""),
        crop=(source.image_size, source.image_size),
        mean=list(MEAN),
        std=list(STD),
        mirror=mirror,
        pad_output=source.pad_channels,
    )


def _random_crop(jpegs: Any, source: Input, augmentation: Augmentation) -> Any:
    """Crop and resize: either decode only the region of interest, or whole images that a cache keeps."""
    options = _decoder(source)
    crop = {
        "random_area": list(augmentation.crop_area),
        "random_aspect_ratio": list(augmentation.crop_ratio),
        "num_attempts": 100,
        "seed": source.seed + 1,
    }
    if source.device_id is not None:
        options["hw_decoder_load"] = augmentation.hw_decoder_load
        # ImageNet's largest image, so that the decoder never reallocates (DALI's ResNet-50 example).
        options.update(preallocate_width_hint=5980, preallocate_height_hint=6430)
    if augmentation.decoder_cache_mb:
        options.update(cache_size=augmentation.decoder_cache_mb, cache_type="threshold", cache_threshold=0)
        images = fn.decoders.image(jpegs, **options)
        return fn.random_resized_crop(images, size=(source.image_size, source.image_size), **crop)
    images = fn.decoders.image_random_crop(jpegs, **options, **crop)
    return fn.resize(images, resize_x=source.image_size, resize_y=source.image_size)


@pipeline_def
def _training(source: Input, augmentation: Augmentation) -> Any:
    jpegs, labels = fn.readers.mxnet(
        path=[str(source.records)],
        index_path=[str(source.index)],
        random_shuffle=True,
        initial_fill=augmentation.shuffle_buffer,
        shard_id=source.shard,
        num_shards=source.shards,
        dont_use_mmap=not source.mmap,
        seed=source.seed,
        name="reader",
    )
    images = _random_crop(jpegs, source, augmentation)
    mirror = fn.random.coin_flip(probability=0.5, seed=source.seed + 2) if augmentation.mirror else 0
    return _normalize(images, source, mirror), labels


@pipeline_def
def _evaluation(source: Input, resize_shorter: int, cache_mb: int) -> Any:
    jpegs, labels = fn.readers.mxnet(
        path=[str(source.records)],
        index_path=[str(source.index)],
        random_shuffle=False,
        shard_id=source.shard,
        num_shards=source.shards,
        # Every evaluation sees the same shard, padded to the same number of batches on all ranks;
        # the padding is not counted.
        stick_to_shard=True,
        pad_last_batch=True,
        dont_use_mmap=not source.mmap,
        name="reader",
    )
    options = _decoder(source)
    if source.device_id is not None and cache_mb:
        options.update(cache_size=cache_mb, cache_type="threshold", cache_threshold=0)
    images = fn.decoders.image(jpegs, **options)
    images = fn.resize(images, resize_shorter=resize_shorter)
    return _normalize(images, source, 0), labels


def _arguments(source: Input) -> Dict[str, Any]:
    return {
        "batch_size": source.batch_size,
        "num_threads": source.threads,
        "device_id": source.device_id,
        "prefetch_queue_depth": source.prefetch,
        "seed": source.seed,
    }


def training_pipeline(source: Input, augmentation: Augmentation, checkpoint: Optional[bytes]) -> Any:
    """Build the endless training pipeline, or go on exactly from a ``checkpoint`` of an earlier one."""
    pipeline = _training(source, augmentation, enable_checkpointing=True, checkpoint=checkpoint, **_arguments(source))
    pipeline.build()
    return pipeline


def evaluation_pipeline(source: Input, resize_shorter: int, cache_mb: int = 0) -> Any:
    """Build the evaluation pipeline; its outputs start over after each pass over the shard."""
    pipeline = _evaluation(source, resize_shorter, cache_mb, **_arguments(source))
    pipeline.build()
    return pipeline


def shard_size(total: int, shard: int, shards: int) -> int:
    """Images in ``shard``, as DALI cuts ``total`` into ``shards``."""
    return total * (shard + 1) // shards - total * shard // shards
