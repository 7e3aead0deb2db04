"""What a source is once it is listed: the images of two splits with their labels, none of them read yet."""

from __future__ import annotations

import hashlib
import os
from typing import Callable, List, NamedTuple, Sequence, Tuple

from benchmarks.common.data.problem import FAILED, Problem

Tell = Callable[[int], None]


class Item(NamedTuple):
    """One image: a range of a container, or a file below it, or bytes that lie in no file."""

    name: str
    """Class and file name, unique within its split."""
    label: int
    container: str
    """Path of the tar, or of the folder that ``name`` is relative to."""
    offset: int
    """Byte at which it begins in the container; -1 for a file of its own."""
    size: int
    """Bytes."""
    changed: int
    """Time of change of the file or the container, nanoseconds."""
    payload: bytes = b""


class Source(NamedTuple):
    """A listed source."""

    name: str
    classes: Tuple[str, ...]
    train: List[Item]
    val: List[Item]
    made: str
    """What it is and how it was split, for the passport."""
    left_out: int = 0
    """Files that are no images by their suffix."""

    @property
    def bytes(self) -> int:
        """Size of all images."""
        return sum(item.size for item in self.train) + sum(item.size for item in self.val)


def mixed(seed: int, name: str) -> bytes:
    """Sort key of a shuffle that depends on seed and names alone, on no version of a random generator."""
    return hashlib.sha256(f"{seed}:{name}".encode("utf-8", "surrogateescape")).digest()


def read_item(item: Item) -> bytes:
    """Bytes of an image, read from where it lies."""
    if item.payload:
        return item.payload
    try:
        if item.offset < 0:
            with open(os.path.join(item.container, item.name), "rb") as file:  # noqa: PTH118 - a million
                data = file.read()
        else:
            with open(item.container, "rb") as file:
                file.seek(item.offset)
                data = file.read(item.size)
    except OSError as error:
        raise Problem(
            f"{item.name} cannot be read: {error.strerror or error}", "a readable image", "mend it", FAILED
        ) from None
    if len(data) != item.size:
        raise Problem(
            f"{item.name} changed while the data set was made: {len(data):,} bytes, it had {item.size:,}",
            "a source that stays as it is",
            "give the same command again when nothing writes to the source",
            FAILED,
        )
    return data


def check_classes(source: Source) -> None:
    """Refuses a source of which a class is missing in a split, by the name of the class."""
    found = {"train": {item.label for item in source.train}, "val": {item.label for item in source.val}}
    for split, labels in found.items():
        absent = [name for label, name in enumerate(source.classes) if label not in labels]
        if absent:
            raise Problem(
                f"{split} has no image of {some(absent)}",
                "images of every class in both splits",
                "add images of it, or take the class out of the other split",
            )


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"
