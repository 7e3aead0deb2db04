"""Where ResNet's images come from: the toy data set, class folders, or ImageNet's official tars.

Every source is listed once, without reading an image. The label of a class is its place among the
sorted class names, which for ImageNet are WordNet ids.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Optional

from benchmarks.common.data.problem import Problem
from benchmarks.resnet.prepare import check_counts
from benchmarks.resnet.sources.digits import list_digits
from benchmarks.resnet.sources.folders import list_folders
from benchmarks.resnet.sources.imagenet import TRAIN_TAR, VAL_TAR, list_imagenet
from benchmarks.resnet.sources.listing import Report, Source, check_classes, mixed

WORDNET_ID = re.compile(r"n\d{8}")


def list_images(origin: Optional[Path], seed: int, fraction: float, report: Report) -> Source:
    """List the source at ``origin``; None is the toy data set. ``report`` is called with files found so far."""
    if origin is None:
        source = list_digits(seed)
    elif not origin.is_dir():
        expected = "a folder of images, or the folder that holds ImageNet's tars"
        raise Problem(f"{origin} is no folder", expected, "name that folder as the raw data")
    elif (origin / TRAIN_TAR).exists() or (origin / VAL_TAR).exists():
        source = list_imagenet(origin, report)
    else:
        source = list_folders(origin, seed, fraction, report)
    check_classes(source)
    # Class folders under any name are ImageNet by their classes' form and all of its counts.
    is_imagenet = not check_counts("imagenet", len(source.classes), source.counts)
    if is_imagenet and all(WORDNET_ID.fullmatch(name) for name in source.classes):
        source = source._replace(name="imagenet")
    # im2rec --shuffle does the same: a reader's shuffle buffer holds some thousand images, fewer than
    # ImageNet has in four classes, so the order on the disk must be mixed already.
    source.images["train"].sort(key=lambda item: mixed(seed, item.name))
    source.images["val"].sort(key=lambda item: item.name)
    return source
