"""Input of ResNet in DALI, for CPU and GPU and all frameworks.

Training: read a RecordIO shard, decode a random crop (only the region of interest), resize, mirror, normalize.
Evaluation: resize the shorter side, crop the centre, normalize; every image exactly once.
"""

import sys
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple

from nvidia.dali import backend, fn, pipeline_def, types

from benchmarks.common.checks import bench
from benchmarks.common.data.dali import EXECUTOR, resampling
from benchmarks.common.run.mllog import samples
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.resnet import mlperf, schedule
from benchmarks.resnet.config import Hyperparameters
from benchmarks.resnet.flops import training_flops

# Mean and standard deviation of ImageNet's training images per colour, in 0..255. The means are from the v0.5 logs
# (input_mean_subtraction), the standard deviations are the usual 0.229, 0.224, 0.225.
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)


# Read encoded images and labels of the shard of this rank; labels are on the device of the images.
def _read(config: Hyperparameters, data: Path, split: str, ranks: Ranks, **options: Any) -> Tuple[Any, Any]:
    if config.dali_decoder_cache_mb:
        # As submitted: the cache hits only if a rank has the same images in every epoch, and then needs no file.
        options.update(stick_to_shard=True, skip_cached_images=True, lazy_init=True)
    jpegs, labels = fn.readers.mxnet(
        path=[str(data / f"{split}.rec")],
        index_path=[str(data / f"{split}.idx")],
        shard_id=ranks.rank,
        num_shards=ranks.size,
        dont_use_mmap=not config.dali_mmap,
        name="reader",
        **options,
    )
    return jpegs, labels.gpu() if config.device == "gpu" else labels


def _decoder(config: Hyperparameters) -> Dict[str, Any]:
    if config.device == "cpu":
        return {"device": "cpu", "output_type": types.RGB}
    padding = config.dali_nvjpeg_padding_mb * 1024 * 1024
    options = {"device": "mixed", "output_type": types.RGB, "hw_decoder_load": config.dali_hw_decoder_load}
    # With affinity, DALI would pin the threads of all ranks to the same cores.
    options.update(device_memory_padding=padding, host_memory_padding=padding, affine=False)
    options.update(preallocate_width_hint=config.dali_preallocate_width)
    options.update(preallocate_height_hint=config.dali_preallocate_height)
    if config.dali_decoder_cache_mb:
        options.update(cache_size=config.dali_decoder_cache_mb, cache_type="threshold", cache_threshold=0)
    if _reserves_outputs():
        options.update(_hint(config.dali_decoder_hint))
    return options


# Return whether DALI's decoder can reserve memory for outputs at the start. The decoder based on nvImageCodec fails
# with "Setting sample dim is not allowed when batch is already allocated" (DALI 2.4.0 on an H200). It is the default in
# DALI 1.39 and since 2.2, but not between, and is identified by an argument that only it has.
def _reserves_outputs() -> bool:
    return "adjust_orientation" not in backend.GetSchema("decoders__Image").GetArgumentNames()


# Sizes for which an operator reserves memory at the start; of 0 DALI is not informed.
def _hint(bytes_per_sample: int, temporary: int = 0) -> Dict[str, int]:
    hints = {"bytes_per_sample_hint": bytes_per_sample, "temp_buffer_hint": temporary}
    return {name: size for name, size in hints.items() if size}


def _resizing(config: Hyperparameters) -> Dict[str, Any]:
    return {**resampling(config.antialias), **_hint(config.dali_crop_hint, config.dali_temp_hint)}


def _normalize(images: Any, config: Hyperparameters, mirror: Any) -> Any:
    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT16 if config.precision == "fp16" else types.FLOAT,
        output_layout=config.layout.replace("N", ""),
        crop=(config.image_size, config.image_size),
        mean=list(MEAN),
        std=list(STD),
        mirror=mirror,
        pad_output=config.pad_channels,
        **_hint(config.dali_normalize_hint),
    )


# Crop and resize: decode only the region of interest, or full images if they are cached
def _random_crop(jpegs: Any, config: Hyperparameters, seed: int) -> Any:
    options, resizing = _decoder(config), _resizing(config)
    area, ratio, size = list(config.crop_area), list(config.crop_ratio), config.image_size
    crop = {"random_area": area, "random_aspect_ratio": ratio, "num_attempts": 100, "seed": seed}
    if config.dali_decoder_cache_mb:
        return fn.random_resized_crop(fn.decoders.image(jpegs, **options), size=(size, size), **crop, **resizing)
    return fn.resize(fn.decoders.image_random_crop(jpegs, **options, **crop), resize_x=size, resize_y=size, **resizing)


@pipeline_def
def _training(config: Hyperparameters, data: Path, ranks: Ranks) -> Any:
    seed, buffer = _seed(config, ranks), config.dali_shuffle_buffer
    jpegs, labels = _read(config, data, "train", ranks, random_shuffle=True, initial_fill=buffer, seed=seed)
    images = _random_crop(jpegs, config, seed + 1)
    mirror = fn.random.coin_flip(probability=0.5, seed=seed + 2) if config.mirror else 0
    return _normalize(images, config, mirror), labels


@pipeline_def
def _evaluation(config: Hyperparameters, data: Path, ranks: Ranks) -> Any:
    # Every evaluation sees the same shard, padded to the same number of batches on all ranks;
    # the padding is not counted.
    jpegs, labels = _read(config, data, "val", ranks, stick_to_shard=True, pad_last_batch=True)
    images = fn.decoders.image(jpegs, **_decoder(config))
    return _normalize(fn.resize(images, resize_shorter=config.eval_resize, **_resizing(config)), config, 0), labels


# Different crops on every rank. The order of images is not affected: the reader shards before it shuffles.
def _seed(config: Hyperparameters, ranks: Ranks) -> int:
    return config.seed + 1000 * ranks.rank


def _build(definition: Any, config: Hyperparameters, data: Path, ranks: Ranks, gpu: int, **options: Any) -> Any:
    pipeline = definition(
        config,
        data,
        ranks,
        num_threads=config.dali_threads,
        device_id=gpu if config.device == "gpu" else None,
        prefetch_queue_depth=config.dali_prefetch,
        seed=_seed(config, ranks),
        **EXECUTOR,
        **options,
    )
    pipeline.build()
    return pipeline


def training_pipeline(
    config: Hyperparameters, data: Path, ranks: Ranks, gpu: int = 0, checkpoint: Optional[bytes] = None
) -> Any:
    """Build the endless training pipeline for GPU number ``gpu``, or resume exactly from ``checkpoint``."""
    if config.device == "gpu" and config.dali_pinned_mb:
        backend.PreallocatePinnedMemory(config.dali_pinned_mb * 1024 * 1024)
    if config.device == "gpu" and config.dali_decoder_hint and not _reserves_outputs() and ranks.rank == 0:
        print("dali_decoder_hint is not used: the decoder of this DALI rejects it", file=sys.stderr)
    options = {"batch_size": config.batch_size, "enable_checkpointing": True, "checkpoint": checkpoint}
    return _build(_training, config, data, ranks, gpu, **options)


Call = Callable[..., Any]


def count_records(index: Path) -> int:
    """Number of records that a RecordIO index lists."""
    with open(index, "rb") as file:
        return sum(1 for _ in file)


def steps_per_epoch(train_images: int, config: Hyperparameters, ranks: Ranks) -> int:
    """Steps per epoch over the training images, with a padded last step."""
    return -(-train_images // (config.batch_size * ranks.size))


class Batches:
    """Pipeline batches as tensors on this rank's device: images in config.layout, labels (batch,).

    DALI reuses batch memory when the next batch is requested.
    """

    def __init__(self, tensors: Any, config: Hyperparameters, ranks: Ranks, source: Any) -> None:
        self._convert: Call = partial(tensors.convert, config, ranks)
        self._copied: Optional[Call] = partial(tensors.copied, config) if hasattr(tensors, "copied") else None
        self._source = source
        self._wait: Callable[[], Any] = lambda: None
        self._outputs: Any = None

    def next(self) -> Tuple[Any, Any]:
        """Return the next batch."""
        self._wait()
        self._outputs = self._source.run()  # kept until the copies are done
        batch: Tuple[Any, Any] = self._convert(*self._outputs)
        if self._copied is not None:
            self._wait = self._copied(batch)
        return batch

    def checkpoint(self) -> bytes:
        """State after the last batch handed out."""
        return self._source.checkpoint()


def training_input(
    tensors: Any, config: Hyperparameters, data: Path, ranks: Ranks, checkpoint: Optional[bytes] = None
) -> Batches:
    """Return the endless stream of training batches for a rank, which can resume exactly from a checkpoint."""
    return Batches(tensors, config, ranks, training_pipeline(config, data, ranks, tensors.gpu(ranks), checkpoint))


@contextmanager
def opened(run: Run, tensors: Any, saved: Mapping[str, Any]) -> Iterator[Tuple[Batches, "EvaluationInput", int]]:
    """Start the clock, open the data set, which is not read before, and log its size; resume the input from ``saved``.

    Yields training batches, evaluation input and steps per epoch.
    """
    config, ranks = run.config, run.ranks
    flops = partial(training_flops, config)
    train_images = lru_cache(None)(partial(count_records, run.data / "train.idx"))
    with run.timed(
        lambda: schedule.timeline(config, steps_per_epoch(train_images(), config, ranks)), flops
    ) as timeline:
        run.log(mlperf.hyperparameters(config, ranks.size, timeline.steps_per_epoch))
        batches = training_input(tensors, config, run.data, ranks, saved.get("input"))
        evaluation = EvaluationInput(tensors, config, run.data, ranks)
        run.log(samples(train_images(), evaluation.total))
        yield batches, evaluation, timeline.steps_per_epoch


class EvaluationInput:
    """Passes over the shard of validation images of this rank; every image counts exactly once."""

    def __init__(self, tensors: Any, config: Hyperparameters, data: Path, ranks: Ranks) -> None:
        self._batch_size = config.eval_batch_size or config.batch_size
        self.total = count_records(data / "val.idx")
        # The shards of DALI
        start, end = (self.total * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
        self._shard_size = end - start
        # All ranks run the number of batches of the largest shard, to stay synchronized.
        self.batches = -(-self.total // (ranks.size * self._batch_size))
        # The pipeline restarts after a pass over the shard.
        source = _build(_evaluation, config, data, ranks, tensors.gpu(ranks), batch_size=self._batch_size)
        self._batches = Batches(tensors, config, ranks, source)

    def one_pass(self) -> Iterator[Tuple[Any, Any, int]]:
        """Yield batches of images and labels with the number of valid images, which are at the start of the batch."""
        for number in range(self.batches):
            valid = max(0, min(self._batch_size, self._shard_size - number * self._batch_size))
            yield (*self._batches.next(), valid)


def bench_subject(
    framework: Any,
    tensors: Any,
    config: Hyperparameters,
    ranks: Ranks,
    data: Path,
    *,
    batch: Any,
    bare: Call,
    step: Call,
    evaluation: Call,
    titles: Tuple[str, str],
) -> bench.Subject:
    """Return the measurements of bench.py for all frameworks.

    ``bare`` and ``evaluation`` are called without arguments; ``step`` takes images and labels, synthetic (``batch``)
    or real. ``titles``: title of the measurement, name of the bare loop.
    """
    real = training_input(tensors, config, data, ranks)

    def training(next_batch: Callable[[], Any]) -> bench.Loop:
        return bench.training_loop(framework, config, ranks, lambda batch: step(*batch), next_batch)

    loops = {
        "bare": bench.repeated(bare),
        "synthetic": training(lambda: batch),
        "real": training(real.next),
        "input": bench.repeated(real.next),
        bench.EVALUATION: bench.repeated(evaluation),
    }
    samples = {bench.EVALUATION: config.eval_batch_size or config.batch_size}
    flops = dict.fromkeys(("bare", "synthetic", "real"), config.batch_size * training_flops(config))
    return bench.Subject(titles[0], config.batch_size, loops, {"bare": titles[1]}, samples, flops=flops)
