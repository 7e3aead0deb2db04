"""Batches: one synthetic batch again and again, or images of a RecordIO file, decoded by MXNet's own iterator."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

import mxnet as mx

from benchmarks.common.data.problem import Problem
from benchmarks.study.mxnet.config import Config
from benchmarks.study.mxnet.training import Batch, Place, dealt, synthetic


def batches(config: Config, place: Place) -> Callable[[], Batch]:
    """Return what gives the next batch of the devices of this process."""
    if not config.records:
        batch = synthetic(config, place)
        return lambda: batch
    if not Path(config.records).is_file():
        raise Problem(f"no file {config.records}", "a RecordIO file with images", "encore data prepare resnet")
    shape = (3, config.image, config.image)
    parts = {"num_parts": place.processes, "part_index": place.rank}
    count = config.batch_size * len(place.contexts)
    # 58.4: the mean spread of ImageNet's channels; the study needs no more than plausible numbers.
    scaling = {"mean_r": 123.7, "mean_g": 116.8, "mean_b": 103.9, "scale": 1 / 58.4}
    source = mx.io.ImageRecordIter(
        path_imgrec=config.records, data_shape=shape, batch_size=count, shuffle=True, resize=config.image,
        rand_crop=True, rand_mirror=True, seed=config.seed, **scaling, **parts,
    )  # fmt: skip
    alone = place._replace(rank=0)

    def following() -> Batch:
        try:
            batch = source.next()
        except StopIteration:
            source.reset()
            batch = source.next()
        return dealt(config, alone, batch.data[0], batch.label[0] % config.classes)

    return following
