"""Data set declaration of SSD and Mask R-CNN for ``prepare.py``."""

import argparse
from pathlib import Path
from typing import Any, Dict, List

from benchmarks.common.data import prepare
from benchmarks.common.data.manifest import Add, compare, prepare_again
from benchmarks.common.data.problem import Problem
from benchmarks.detection.layout import ARRAYS, PARTS, array_file, images_folder

BENCHMARKS = ("ssd", "maskrcnn")  # Both read the same data set; dataset.json contains the first name
COCO = "coco2017"
SCENES = 1000  # scenes of the toy data set to train on


def add_options(options: argparse._ArgumentGroup) -> None:
    add = options.add_argument
    add("--skip-flawed", action="store_true", help="skip images and objects with errors; default: reject them")
    scenes = "scenes of the toy data set to train on; default: %(default)s"
    add("--scenes", type=prepare.number(8, 10**6), default=SCENES, metavar="N", help=scenes)


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
        check=prepare.opens("benchmarks.detection.annotations"),
        check_unlisted=check_images,
    )
