"""The input of SSD, defined once in DALI for CPU and GPU.

Training: read COCO's images and objects by shards, crop at random by the overlap with the objects (Liu et al. 2016,
arXiv 1512.02325, section 2.2), flip, resize, twist the colours, normalize, match objects with the default boxes.
Evaluation: resize and normalize; every image exactly once. Values are those of NVIDIA's v0.7 submission
(data/dali_iterator.py).
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import numpy as np
from nvidia.dali import fn, pipeline_def, types

from benchmarks.common.data.dali import EXECUTOR, resampling
from benchmarks.common.run.ranks import Ranks
from benchmarks.detection.annotations import Part
from benchmarks.ssd.pytorch.config import Config
from benchmarks.ssd.pytorch.default_boxes import default_boxes
from benchmarks.ssd.pytorch.model import VARIANCES

# Of ImageNet, per colour, on the scale 0..255: data_normalization_mean and _std of the v0.5 logs.
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)
# From which an image's least overlap of a crop with its objects is drawn; or the whole image is taken
OVERLAPS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
MATCHED = 0.5  # intersection over union above which a default box has an object
SEEDS = {"reader": 0, "crop": 1, "flip": 2, "saturation": 3, "contrast": 4, "brightness": 5, "hue": 6}


def _files(part: Part, positions: np.ndarray) -> List[str]:
    return [part.files[position] for position in positions.tolist()]


def _seed(config: Config, ranks: Ranks, name: str) -> int:
    # Seed other crops and colours for each rank
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


def _resized(images: Any, config: Config, antialias: bool) -> Any:
    return fn.resize(images, resize_x=config.image_size, resize_y=config.image_size, **resampling(antialias))


def _decoder(config: Config) -> Dict[str, Any]:
    if config.device == "cpu" or config.decoder == "cpu":
        return {"device": "cpu", "output_type": types.RGB}
    options = {"device": "mixed", "output_type": types.RGB, "hw_decoder_load": config.dali_hw_decoder_load}
    # Not affine: DALI would tie the threads of each rank to the same cores.
    options["affine"] = False
    if config.dali_decoder_cache_mb:
        options.update(cache_size=config.dali_decoder_cache_mb, cache_type="threshold", cache_threshold=0)
    return options


def _moved(output: Any, config: Config) -> Any:
    return output.gpu() if config.device == "gpu" else output


def _decoded(jpegs: Any, crop: Optional[Tuple[Any, Any]], config: Config) -> Any:
    # Decode whole images, or only what is cropped unless a cache keeps whole ones
    options = _decoder(config)
    if crop is None or config.dali_decoder_cache_mb:
        images = _moved(fn.decoders.image(jpegs, **options), config)
        return images if crop is None else fn.slice(images, *crop)
    return _moved(fn.decoders.image_slice(jpegs, *crop, **options), config)


def _twisted(images: Any, config: Config, ranks: Ranks) -> Any:
    # Other colours, within the ranges of the submissions; the hue in degrees
    ranges = {"saturation": (0.5, 1.5), "contrast": (0.5, 1.5), "brightness": (0.875, 1.125), "hue": (-0.5, 0.5)}
    drawn = {name: fn.random.uniform(range=each, seed=_seed(config, ranks, name)) for name, each in ranges.items()}
    return fn.color_twist(images, **drawn)


def _read(config: Config, part: Part, ranks: Ranks) -> Any:
    # Read encoded images, boxes and labels of this rank's shard, which is another one in each epoch
    # DALI shuffles with a seed of its own, the same in every run: what it begins with is in the run's order.
    order = np.random.RandomState(config.seed % 2**32).permutation(part.with_objects)
    options: Dict[str, Any] = {"shuffle_after_epoch": True}
    if config.dali_decoder_cache_mb:
        # As submitted: the cache hits only if a rank has the same images in every epoch, and then needs no file.
        options = {"random_shuffle": True, "stick_to_shard": True, "skip_cached_images": True, "lazy_init": True}
    return fn.readers.coco(
        file_root=str(part.folder),
        annotations_file=str(part.boxes_json),
        images=_files(part, order),
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
    images = _resized(_decoded(jpegs, crop, config), config, config.antialias)
    images = _twisted(images, config, ranks) if config.colour else images
    offsets, labels = fn.box_encoder(
        _moved(boxes, config),
        _moved(labels, config),
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
        files=_files(part, part.with_objects),
        labels=part.with_objects.tolist(),
        shard_id=ranks.rank,
        num_shards=ranks.size,
        stick_to_shard=True,
        pad_last_batch=True,
        name="reader",
    )
    images = _moved(fn.decoders.image(jpegs, device="cpu", output_type=types.RGB), config)
    # All submissions evaluate on images that Pillow resized, which antialiases.
    return _normalize(_resized(images, config, antialias=True), config, 0), positions


def _build(definition: Any, config: Config, part: Part, ranks: Ranks, **options: Any) -> Any:
    pipeline = definition(
        config,
        part,
        ranks,
        num_threads=config.dali_threads,
        # Slurm may show each rank its own GPU alone, which is then number 0.
        device_id=(ranks.context.index or 0) if config.device == "gpu" else None,
        seed=config.seed + 1000 * ranks.rank,
        **EXECUTOR,
        **options,
    )
    pipeline.build()
    return pipeline


def training_pipeline(config: Config, part: Part, ranks: Ranks, checkpoint: Optional[bytes] = None) -> Any:
    """Build the endless training pipeline, or exactly resume a ``checkpoint`` of one."""
    return _build(
        _training,
        config,
        part,
        ranks,
        batch_size=config.batch_size * config.dali_batches,
        prefetch_queue_depth=config.dali_prefetch,
        enable_checkpointing=True,
        checkpoint=checkpoint,
    )


def evaluation_pipeline(config: Config, part: Part, ranks: Ranks) -> Any:
    """Build the evaluation pipeline; its outputs start over after each pass over the shard."""
    return _build(_evaluation, config, part, ranks, batch_size=config.eval_batch_size)


def shard_size(total: int, shard: int, shards: int) -> int:
    """Images in ``shard``, as DALI cuts ``total`` into ``shards``."""
    return total * (shard + 1) // shards - total * shard // shards
