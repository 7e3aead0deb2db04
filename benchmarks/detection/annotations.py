"""On-disk format: COCO's images and JSON files as published, with the objects as arrays.

A prepared folder has ``train2017/``, ``val2017/``, ``annotations/{instances,boxes}_{train,val}2017.json`` and, for
``train`` and ``val``, one ``.npy`` file per name in ARRAYS, such as ``train_boxes.npy``. Arrays are read through
memory maps::

    data = open_data(Path("data/ssd"))
    print(data.train.path(0), data.train.boxes[data.train.offsets[0] : data.train.offsets[1]])
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

import numpy as np

from benchmarks.common.data import manifest
from benchmarks.common.data.arrays import check_sizes, opening
from benchmarks.common.data.manifest import prepare_again
from benchmarks.common.data.problem import Problem
from benchmarks.detection.layout import ARRAYS, PARTS, array_file, boxes_file, images_folder, json_file


class Category(NamedTuple):
    id: int  # as in the JSON files; COCO's 80 ids are in 1 to 90
    name: str


@dataclass(frozen=True)
class Names(Sequence[str]):
    """File names as text, from an array of bytes."""

    encoded: np.ndarray  # S (N,), a memory map

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, position: Any) -> Any:
        encoded = self.encoded[position]
        return [name.decode() for name in encoded] if isinstance(position, slice) else encoded.decode()


@dataclass(frozen=True)
class Part:
    """Train or val: N images in ascending order of ids, with A objects. Arrays are memory maps."""

    folder: Path  # of the images
    json: Path  # the annotations as published
    # Boxes in COCO's JSON format, for DALI's reader, which parses the file after the clock has started
    boxes_json: Path
    image_ids: np.ndarray  # int64 (N,)
    files: Sequence[str]  # N names in ``folder``
    sizes: np.ndarray  # int32 (N, 2): width and height in pixels
    offsets: np.ndarray  # int64 (N + 1,): the objects of image i are offsets[i] to offsets[i + 1] - 1
    # float32 (A, 4): x, y, width and height in pixels as in COCO, width and height above 0; published boxes may extend
    # beyond the image
    boxes: np.ndarray
    labels: np.ndarray  # int16 (A,): 1 to C, in the order of the category ids; 0 is the background
    areas: np.ndarray  # float32 (A,): of the masks, in pixels
    crowds: np.ndarray  # bool (A,)
    # int64 (A + 1,): the polygons of object a; none for an RLE, which is only in the JSON file
    polygon_offsets: np.ndarray
    # int64 (P + 1,): the numbers of polygon p are points[point_offsets[p] : point_offsets[p + 1]]
    point_offsets: np.ndarray
    points: np.ndarray  # float32: x, y, x, y and so on, in pixels

    def __len__(self) -> int:
        return len(self.image_ids)

    def path(self, position: int) -> Path:
        return self.folder / self.files[position]

    @cached_property
    def with_objects(self) -> np.ndarray:
        """int32: positions of the images that have an object (117,266 of COCO's 118,287)."""
        return np.flatnonzero(np.diff(self.offsets)).astype(np.int32)

    def polygons(self, number: int) -> List[np.ndarray]:
        """Return an object's polygons as float32 (points, 2)."""
        first, last = int(self.polygon_offsets[number]), int(self.polygon_offsets[number + 1])
        bounds = self.point_offsets[first : last + 1]
        return [np.asarray(self.points[bounds[p] : bounds[p + 1]]).reshape(-1, 2) for p in range(last - first)]


@dataclass(frozen=True)
class DataSet:
    train: Part
    val: Part
    categories: Sequence[Category]  # in ascending order of ids: label = position + 1
    manifest: Mapping[str, Any]
    folder: Path


def open_data(folder: Path) -> DataSet:
    """Open a prepared data set without reading arrays or images, so that it can be opened before the clock starts.

    Raises:
        Problem: the data set is missing, incomplete, or does not match dataset.json.
    """
    content = manifest.read(folder)
    with opening(folder, "detection"):
        parts = {part: _open_part(folder, part) for part in PARTS}
        expected = []
        for name, part in parts.items():
            if not part.boxes_json.exists():
                raise Problem(f"{part.boxes_json} is missing", "SSD's boxes", prepare_again(folder))
            count, objects = content["splits"][name]["count"], len(part.boxes)
            lengths = {"files": count, "sizes": count, "image_ids": count, "offsets": count + 1}
            lengths.update({"labels": objects, "areas": objects, "crowds": objects, "polygon_offsets": objects + 1})
            expected += [
                (f"entries in {array_file(name, array)}", len(getattr(part, array)), length)
                for array, length in lengths.items()
            ]
        check_sizes(folder, content, expected)
        categories = tuple(Category(int(number), str(name)) for number, name in content["facts"]["categories"])
        return DataSet(parts["train"], parts["val"], categories, content, folder)


def load(folder: Path, part: str, array: str) -> np.ndarray:
    return np.load(str(folder / array_file(part, array)), mmap_mode="r")


def _open_part(folder: Path, part: str) -> Part:
    arrays: Dict[str, Any] = {name: load(folder, part, name) for name in ARRAYS if name not in ("bytes", "checksums")}
    arrays["files"] = Names(arrays["files"])
    return Part(folder / images_folder(part), folder / json_file(part), folder / boxes_file(part), **arrays)
