"""Input of SSD: a DALI pipeline for CPU and GPU, batches as tensors, and synthetic batches.

Training: read a shard of COCO, crop at random by overlap with objects (Liu et al. 2016, arXiv 1512.02325, section
2.2), flip, resize, colour jitter, normalize, match objects with default boxes. Evaluation: resize and normalize
every image exactly once. Parameters are from NVIDIA's v0.7 submission (data/dali_iterator.py).
"""

from collections import deque
from math import ceil
from typing import Any, Deque, Dict, Iterator, Mapping, NamedTuple, Optional, Tuple

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types

from benchmarks.common.data.dali import EXECUTOR, resampling
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch.dali import to_tensor
from benchmarks.detection.annotations import Part
from benchmarks.ssd.pytorch.config import Config
from benchmarks.ssd.pytorch.model import COLOURS, VARIANCES, default_boxes

# ImageNet's mean and deviation, per colour, on the scale 0..255: data_normalization_mean and _std of the v0.5 logs.
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)
# Minimum overlaps between a random crop and objects, one is selected per image; or the full image is used
OVERLAPS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
MATCHED = 0.5  # intersection over union above which a default box has an object
SEEDS = {"reader": 0, "crop": 1, "flip": 2, "saturation": 3, "contrast": 4, "brightness": 5, "hue": 6}


def _seed(config: Config, ranks: Ranks, name: str) -> int:
    # Different crops and colours on every rank
    return config.seed + 1000 * ranks.rank + SEEDS[name]


def _normalize(images: Any, config: Config, mirror: Any) -> Any:
    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT16 if config.precision == "fp16" else types.FLOAT,
        output_layout=config.layout.replace("N", ""),
        mean=list(MEAN),
        std=list(STD),
        mirror=mirror,
        pad_output=config.pad_channels,
    )


def _resize(images: Any, config: Config, antialias: bool) -> Any:
    return fn.resize(images, resize_x=config.image_size, resize_y=config.image_size, **resampling(antialias))


def _to_device(output: Any, config: Config) -> Any:
    return output.gpu() if config.device == "gpu" else output


def _decode(jpegs: Any, crop: Optional[Tuple[Any, Any]], config: Config) -> Any:
    # Decode full images if they are cached or not cropped, otherwise only the crop
    options: Dict[str, Any] = {"device": "cpu", "output_type": types.RGB}
    if config.device == "gpu" and config.decoder == "gpu":
        # With affinity, DALI would pin the threads of all ranks to the same cores.
        options.update(device="mixed", hw_decoder_load=config.dali_hw_decoder_load, affine=False)
        if config.dali_decoder_cache_mb:
            options.update(cache_size=config.dali_decoder_cache_mb, cache_type="threshold", cache_threshold=0)
    if crop is None or config.dali_decoder_cache_mb:
        images = _to_device(fn.decoders.image(jpegs, **options), config)
        return images if crop is None else fn.slice(images, *crop)
    return _to_device(fn.decoders.image_slice(jpegs, *crop, **options), config)


def _read(config: Config, part: Part, ranks: Ranks) -> Any:
    # Read encoded images, boxes and labels of the shard of this rank, which changes every epoch. DALI shuffles with a
    # constant seed; the order of the run is applied to the file list.
    order = np.random.RandomState(config.seed % 2**32).permutation(part.with_objects)
    options: Dict[str, Any] = {"shuffle_after_epoch": True}
    if config.dali_decoder_cache_mb:
        # As submitted: the cache hits only if a rank has the same images in every epoch, and then needs no file.
        options = {"random_shuffle": True, "stick_to_shard": True, "skip_cached_images": True, "lazy_init": True}
    return fn.readers.coco(
        file_root=str(part.folder),
        annotations_file=str(part.boxes_json),
        images=[part.files[position] for position in order.tolist()],
        ltrb=True,
        ratio=True,
        skip_empty=True,
        shard_id=ranks.rank,
        num_shards=ranks.size,
        seed=config.seed + SEEDS["reader"],
        name="reader",
        **options,
    )


@pipeline_def
def _training(config: Config, part: Part, ranks: Ranks) -> Any:
    jpegs, boxes, labels = _read(config, part, ranks)
    crop, mirror = None, 0
    if config.crop:
        *crop, boxes, labels = fn.random_bbox_crop(
            boxes,
            labels,
            aspect_ratio=[0.5, 2.0],
            thresholds=list(OVERLAPS),
            scaling=[0.3, 1.0],
            bbox_layout="xyXY",
            allow_no_crop=True,
            num_attempts=1,
            seed=_seed(config, ranks, "crop"),
        )
    if config.flip:
        mirror = fn.random.coin_flip(probability=0.5, seed=_seed(config, ranks, "flip"))
        boxes = fn.bb_flip(boxes, ltrb=True, horizontal=mirror)
    images = _resize(_decode(jpegs, crop, config), config, config.antialias)
    if config.colour:
        # Within the ranges of the submissions; the hue in degrees
        ranges = {"saturation": (0.5, 1.5), "contrast": (0.5, 1.5), "brightness": (0.875, 1.125), "hue": (-0.5, 0.5)}
        twist = {
            name: fn.random.uniform(range=limits, seed=_seed(config, ranks, name)) for name, limits in ranges.items()
        }
        images = fn.color_twist(images, **twist)
    offsets, labels = fn.box_encoder(
        _to_device(boxes, config),
        _to_device(labels, config),
        anchors=default_boxes(config.image_size, config.box_scales).reshape(-1).tolist(),
        criteria=MATCHED,
        offset=True,
        stds=list(VARIANCES),
        scale=float(config.image_size),
    )
    return _normalize(images, config, mirror), offsets, labels


@pipeline_def
def _evaluation(config: Config, part: Part, ranks: Ranks) -> Any:
    # Every evaluation sees the same shard, padded to the same number of batches on all ranks;
    # the padding is not counted.
    jpegs, positions = fn.readers.file(
        file_root=str(part.folder),
        files=[part.files[position] for position in part.with_objects.tolist()],
        labels=part.with_objects.tolist(),
        shard_id=ranks.rank,
        num_shards=ranks.size,
        stick_to_shard=True,
        pad_last_batch=True,
        name="reader",
    )
    images = _to_device(fn.decoders.image(jpegs, device="cpu", output_type=types.RGB), config)
    # All submissions evaluate on images that Pillow resized, which antialiases.
    return _normalize(_resize(images, config, antialias=True), config, 0), positions


def _build(definition: Any, config: Config, part: Part, ranks: Ranks, **options: Any) -> Any:
    pipeline = definition(
        config,
        part,
        ranks,
        num_threads=config.dali_threads,
        # If Slurm shows only one GPU to a rank, it has number 0.
        device_id=(ranks.context.index or 0) if config.device == "gpu" else None,
        seed=config.seed + 1000 * ranks.rank,
        **EXECUTOR,
        **options,
    )
    pipeline.build()
    return pipeline


# -- as tensors -----------------------------------------------------------------------------------------


class Batch(NamedTuple):
    images: torch.Tensor  # (N, 3 or 4, S, S), normalized, in the memory order of config.layout
    offsets: torch.Tensor  # (N, boxes, 4) from the default boxes; only used for positive labels
    labels: torch.Tensor  # int32 (N, boxes), 0 for the background


def steps_per_epoch(part: Part, config: Config, ranks: Ranks) -> int:
    """Steps per epoch over the training images with objects, with a padded last step."""
    return -(-len(part.with_objects) // (config.batch_size * ranks.size))


class TrainingInput:
    """Endless stream of training batches for a rank; resumes exactly from the state of ``state_dict``."""

    def __init__(self, config: Config, part: Part, ranks: Ranks, saved: Optional[Mapping[str, Any]] = None) -> None:
        self._config, self._device = config, ranks.context
        state = saved["input"] if saved else None
        self._pipeline = _build(
            _training,
            config,
            part,
            ranks,
            batch_size=config.batch_size * config.dali_batches,
            prefetch_queue_depth=config.dali_prefetch,
            enable_checkpointing=True,
            checkpoint=state,
        )
        self._ready: Deque[Batch] = deque()
        # State before the ready batches, and how many batches were returned.
        self._state, self._handed_out = b"", 0
        for _ in range(saved["input_handed_out"] if saved else 0):
            self.next()

    def next(self) -> Batch:
        if not self._ready:
            count = self._config.dali_batches
            # DALI's state is after the last output. If an output contains several batches, keep the state before it.
            self._state = self._pipeline.checkpoint() if count > 1 else b""
            images, offsets, labels = (to_tensor(self._device, output) for output in self._pipeline.run())
            parts = (_to_nchw(images, self._config).chunk(count), offsets.chunk(count), labels.chunk(count))
            self._ready.extend(Batch(*tensors) for tensors in zip(*parts))
            self._handed_out = 0
        self._handed_out += 1
        return self._ready.popleft()

    def state_dict(self) -> Dict[str, Any]:
        """State after the last batch handed out."""
        if self._ready:
            return {"input": self._state, "input_handed_out": self._handed_out}
        return {"input": self._pipeline.checkpoint(), "input_handed_out": 0}


class EvaluationInput:
    """Passes over the shard of validation images with objects of this rank; every image counts exactly once."""

    def __init__(self, config: Config, part: Part, ranks: Ranks) -> None:
        self._config, self._device = config, ranks.context
        self.part = part
        self.total = len(part.with_objects)
        # As DALI cuts the images into shards
        self._shard_size = self.total * (ranks.rank + 1) // ranks.size - self.total * ranks.rank // ranks.size
        # All ranks run the number of batches of the largest shard, to stay synchronized.
        self.batches = ceil(ceil(self.total / ranks.size) / config.eval_batch_size)
        self._pipeline = _build(_evaluation, config, part, ranks, batch_size=config.eval_batch_size)

    def one_pass(self) -> Iterator[Tuple[torch.Tensor, np.ndarray]]:
        """Yield images, and positions in the part for the valid images, which are at the start of the batch."""
        size = self._config.eval_batch_size
        for number in range(self.batches):
            valid = max(0, min(size, self._shard_size - number * size))
            images, positions = self._pipeline.run()
            valid_positions = np.array(positions.as_array()).reshape(-1)[:valid]
            yield _to_nchw(to_tensor(self._device, images), self._config), valid_positions


def _to_nchw(images: torch.Tensor, config: Config) -> torch.Tensor:
    # Only the axes are permuted, not the memory: NHWC in memory is channels_last in PyTorch.
    return images.permute(0, 3, 1, 2) if config.layout == "NHWC" else images


def synthetic_images(config: Config, device: torch.device, count: int) -> torch.Tensor:
    """Noise in the type and memory order of the real images."""
    dtype = torch.float16 if config.precision == "fp16" else torch.float32
    colours, size = COLOURS + config.pad_channels, config.image_size
    shape = (count, size, size, colours) if config.layout == "NHWC" else (count, colours, size, size)
    images = torch.rand(shape)
    if config.pad_channels:
        images.select(3 if config.layout == "NHWC" else 1, COLOURS).zero_()
    return _to_nchw(images.to(device, dtype), config)


def synthetic_batch(config: Config, classes: int, device: torch.device) -> Batch:
    boxes = len(default_boxes(config.image_size, config.box_scales))
    labels = torch.randint(1, classes, (config.batch_size, boxes)) * (torch.rand(config.batch_size, boxes) < 1 / 300)
    offsets = torch.randn(config.batch_size, boxes, 4) * (labels > 0)[..., None]
    images = synthetic_images(config, device, config.batch_size)
    return Batch(images, offsets.to(device), labels.int().to(device))
