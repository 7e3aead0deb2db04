"""A source that is listed: the images of two splits with their labels, none of them read yet."""

from __future__ import annotations

import hashlib
import os
from typing import Callable, Dict, Iterable, List, NamedTuple, Sequence, Tuple

from benchmarks.common.data.problem import FAILED, Problem

Report = Callable[[int], None]


class Item(NamedTuple):
    """One image: a range of a container, or a file below it, or bytes that are in no file."""

    name: str  # class and file name, unique within its split
    label: int
    container: str  # path of the tar, or of the folder that ``name`` is relative to
    offset: int  # byte at which it begins in the container; -1 for a file of its own
    size: int  # bytes
    changed: int  # time of change of the file or the container, nanoseconds
    payload: bytes = b""


class Source(NamedTuple):
    """A listed source."""

    name: str
    classes: Tuple[str, ...]
    images: Dict[str, List[Item]]  # those of train and of val
    made: str  # description of it and of its split, for the passport
    left_out: int = 0  # files that are no images by their suffix

    @property
    def counts(self) -> Dict[str, int]:
        """Images of each split."""
        return {split: len(items) for split, items in self.images.items()}


def mixed(seed: int, name: str) -> bytes:
    """Sort key of a shuffle that depends on seed and names alone, on no version of a random generator."""
    return hashlib.sha256(f"{seed}:{name}".encode("utf-8", "surrogateescape")).digest()


def read_item(item: Item) -> bytes:
    """Return the bytes of an image, read where it is."""
    if item.payload:
        return item.payload
    is_file = item.offset < 0
    path = os.path.join(item.container, item.name) if is_file else item.container  # noqa: PTH118 - a million
    try:
        with open(path, "rb") as file:
            file.seek(0 if is_file else item.offset)
            data = file.read(-1 if is_file else item.size)
    except OSError as error:
        raise Problem(
            f"{item.name} cannot be read: {error.strerror or error}", "a readable image", "fix it", FAILED
        ) from None
    if len(data) != item.size:
        raise Problem(
            f"{item.name} changed while the data set was made: {len(data):,} bytes, it had {item.size:,}",
            "a source that stays as it is",
            "give the same command again when nothing writes to the source",
            FAILED,
        )
    return data


def by_label(items: Iterable[Item], seed: int) -> List[List[Item]]:
    """Group images by their label; a group is in the order in which images of it are held out, by seed and name."""
    groups: Dict[int, List[Item]] = {}
    for item in items:
        groups.setdefault(item.label, []).append(item)
    return [sorted(groups[label], key=lambda item: mixed(seed, "held out:" + item.name)) for label in sorted(groups)]


def check_classes(source: Source) -> None:
    """Refuse a source of one class, and one of which a class is missing in a split, by the name of the class."""
    if len(source.classes) == 1:
        raise Problem(
            f"all images are in one class folder, {source.classes[0]}",
            "two classes or more, a folder each",
            f"if {source.classes[0]} holds the class folders, name it as the raw data",
        )
    for split, items in source.images.items():
        labels = {item.label for item in items}
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
