"""Batches of the DALI pipelines of one rank, for any framework.

``tensors`` is the framework's ``data.py``. Its ``convert(config, ranks, images, labels)`` takes what a pipeline puts
out (TensorListCPU or TensorListGPU, all samples of one shape) and returns tensors, labels of shape (batch,), that stay
valid when DALI reuses its memory. Where it only queues the copies, and DALI does not know of them, ``copied(config,
batch)`` returns what waits for them. Its ``gpu(ranks)`` is the number of this rank's GPU, as the process counts them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional, Tuple

from benchmarks.common.checks import bench
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet import pipeline
from benchmarks.resnet.config import Hyperparameters

Call = Callable[..., Any]


def count_records(index: Path) -> int:
    """Number of records that a RecordIO index lists."""
    with open(index, "rb") as file:
        return sum(1 for _ in file)


def steps_per_epoch(train_images: int, config: Hyperparameters, ranks: Ranks) -> int:
    """Steps of a pass over the training images; the last one is filled up."""
    return -(-train_images // (config.batch_size * ranks.size))


# The batches of a pipeline as tensors. DALI fills the memory of one again when it is asked for the next.
class _Batches:
    def __init__(self, tensors: Any, config: Hyperparameters, ranks: Ranks, source: Any) -> None:
        self._convert: Call = partial(tensors.convert, config, ranks)
        self._copied: Optional[Call] = partial(tensors.copied, config) if hasattr(tensors, "copied") else None
        self._source = source
        self._wait: Callable[[], Any] = lambda: None
        self._outputs: Any = None

    def next(self) -> Tuple[Any, Any]:
        self._wait()
        # Kept until the copies are done.
        self._outputs = self._source.run()
        batch: Tuple[Any, Any] = self._convert(*self._outputs)
        if self._copied is not None:
            self._wait = self._copied(batch)
        return batch


class TrainingInput:
    """An endless stream of training batches of one rank; images in config.layout, labels (batch,).

    It begins anew, or resumes exactly from the ``checkpoint`` of another one.
    """

    def __init__(
        self, tensors: Any, config: Hyperparameters, data: Path, ranks: Ranks, checkpoint: Optional[bytes] = None
    ) -> None:
        self._pipeline = pipeline.training_pipeline(config, data, ranks, tensors.gpu(ranks), checkpoint)
        self._batches = _Batches(tensors, config, ranks, self._pipeline)

    def next(self) -> Tuple[Any, Any]:
        """Return the next batch, on this rank's device."""
        return self._batches.next()

    def checkpoint(self) -> bytes:
        """State after the last batch handed out."""
        state: bytes = self._pipeline.checkpoint()
        return state


class EvaluationInput:
    """Passes over this rank's share of the validation images, each counted exactly once."""

    def __init__(self, tensors: Any, config: Hyperparameters, data: Path, ranks: Ranks) -> None:
        self._batch_size = config.eval_batch_size or config.batch_size
        self.total = count_records(data / "val.idx")
        self._mine = pipeline.shard_size(self.total, ranks.rank, ranks.size)
        # All ranks run as many batches as the largest shard needs, so that they stay together.
        largest = -(-self.total // ranks.size)
        self.batches = -(-largest // self._batch_size)
        source = pipeline.evaluation_pipeline(config, data, ranks, tensors.gpu(ranks), self._batch_size)
        self._batches = _Batches(tensors, config, ranks, source)

    def one_pass(self) -> Iterator[Tuple[Any, Any, int]]:
        """Yield batches of images and labels with the number of their first images that count."""
        for number in range(self.batches):
            valid = max(0, min(self._batch_size, self._mine - number * self._batch_size))
            images, labels = self._batches.next()
            yield images, labels, valid


def bench_subject(
    framework: Any,
    config: Hyperparameters,
    ranks: Ranks,
    calls: Mapping[str, Call],
    synthetic: Any,
    real: TrainingInput,
    title: str,
    bare_title: str,
) -> bench.Subject:
    """Return the measurements of every bench.py of ResNet.

    ``calls``: ``bare`` and ``evaluation`` without arguments, and ``step`` of images and labels, which one synthetic
    batch and real ones are given to.
    """
    step = calls["step"]

    def training(next_batch: Callable[[], Any]) -> bench.Loop:
        return bench.training_loop(framework, config, ranks, lambda batch: step(*batch), next_batch)

    loops = {
        "bare": bench.repeated(calls["bare"]),
        "synthetic": training(lambda: synthetic),
        "real": training(real.next),
        "input": bench.repeated(real.next),
        bench.EVALUATION: bench.repeated(calls["evaluation"]),
    }
    titles = {"bare": bare_title}
    samples = {bench.EVALUATION: config.eval_batch_size or config.batch_size}
    return bench.Subject(title, config.batch_size, loops, titles, samples)
