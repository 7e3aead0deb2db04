"""Data set declaration of SSD and Mask R-CNN for ``prepare.py``."""

import argparse
from pathlib import Path
from typing import Any, Dict, List, Mapping

from benchmarks.common.data import prepare
from benchmarks.common.data.manifest import Add, compare, prepare_again
from benchmarks.common.data.problem import Problem
from benchmarks.detection.layout import ARRAYS, PARTS, array_file, images_folder

BENCHMARKS = ("ssd", "maskrcnn")  # Both read the same data set; dataset.json contains the first name
COCO = "coco2017"
# Counts of COCO 2017. SSD's submitted logs train and evaluate on the images with annotations
PUBLISHED = {
    "images in train": 118287,
    "images in val": 5000,
    "images with annotations in train": 117266,
    "images with annotations in val": 4952,
    "categories": 80,
}
SCENES = 1000  # scenes of the toy data set to train on


def add_options(options: argparse._ArgumentGroup) -> None:
    add = options.add_argument
    add("--skip-flawed", action="store_true", help="skip images and objects with errors; default: reject them")
    scenes = "scenes of the toy data set to train on; default: %(default)s"
    add("--scenes", type=prepare.number(8, 10**6), default=SCENES, metavar="N", help=scenes)


def check_counts(name: str, counts: Mapping[str, int]) -> List[Problem]:
    """Require the published counts for the name coco2017; other names may have any counts."""
    if name != COCO:
        return []
    hint = "complete the source, or give the data set another name with --name"
    return [
        Problem(f"{COCO} with {counts[key]:,} {key}", f"{expected:,}", hint)
        for key, expected in PUBLISHED.items()
        if counts[key] != expected
    ]


def check(directory: Path, manifest: Dict[str, Any]) -> List[Problem]:
    """Check the counts for this name, and the lengths of the arrays."""
    problems = list(prepare.opens("benchmarks.detection.annotations")(directory, manifest))
    return problems or check_counts(manifest["name"], manifest["facts"]["counts"])


def check_images(directory: Path, manifest: Dict[str, Any], quick: bool, add: Add) -> List[Problem]:
    """Compare all images with the arrays of sizes and checksums; report a problem per file."""
    from benchmarks.detection.annotations import Names, load

    problems: List[Problem] = []
    again = prepare_again(directory)
    for part in PARTS:
        names = Names(load(directory, part, "files"))
        sizes, checksums = (load(directory, part, array) for array in ("bytes", "checksums"))
        for name, size, checksum in zip(names, sizes, checksums):
            path = directory / images_folder(part) / name
            difference = compare(path, {"bytes": size, "sha256": checksum.tobytes().hex()}, quick, add)
            if difference is not None:
                problems.append(Problem(*difference, again))
    return problems


def data_set(benchmark: str) -> prepare.DataSet:
    return prepare.DataSet(
        benchmark=benchmark,
        source="folder of COCO 2017's train2017, val2017 and annotations, each a folder or the published zip",
        files=tuple(array_file(part, array) for part in PARTS for array in ARRAYS),
        folders=(*map(images_folder, PARTS), "annotations"),
        shared_with=BENCHMARKS,
        add_options=add_options,
        writer="benchmarks.detection.writer",
        samples="benchmarks.detection.samples",
        check=check,
        check_unlisted=check_images,
    )
