"""Puts the images of a part into the data folder, each decoded once to see that it is whole."""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from PIL import Image, UnidentifiedImageError

from benchmarks.common.data.workers import Report
from benchmarks.detection.sources import Images, read_all
from benchmarks.detection.tables import Entry

Image.MAX_IMAGE_PIXELS = None
warnings.filterwarnings("ignore", module=r"PIL\.")

PART_IMAGES = 1024  # images of a task: about 170 MB and some ten seconds of one core for COCO, lost at most per worker


@dataclass(frozen=True)
class Pictures:
    """Some images of a part; crosses to a worker process."""

    images: Images
    entries: Tuple[Entry, ...]
    folder: Path  # where they go
    done_path: Path  # the file of the facts, which is written last


def plan(part: str, images: Images, entries: Sequence[Entry], scratch: Path, folder: str) -> List[Pictures]:
    """Cut the images of a part into tasks."""
    cuts = range(0, len(entries), PART_IMAGES)
    return [
        Pictures(
            images._replace(sizes={entry.name: images.sizes[entry.name] for entry in entries[cut : cut + PART_IMAGES]}),
            tuple(entries[cut : cut + PART_IMAGES]),
            scratch / folder,
            scratch / f"{part}-images-{number:05}.json",
        )
        for number, cut in enumerate(cuts)
    ]


def write_pictures(task: Pictures, report: Report) -> Tuple[int, int]:
    """Check and place the images of a task; a function of worker processes.

    The facts are, by name, bytes and sha256 or else what is wrong.
    """
    sizes = {entry.name: (entry.width, entry.height) for entry in task.entries}
    found: Dict[str, Any] = {}
    total = 0
    for name, data in read_all(task.images, list(sizes)):
        wrong = look_at(data, sizes[name])
        if wrong is None:
            _put(task, name, data)
        found[name] = wrong or [len(data), hashlib.sha256(data).hexdigest()]
        total += len(data)
        report(len(found), total)
    temporary = task.done_path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(found), encoding="utf-8")
    temporary.replace(task.done_path)
    return len(task.entries), total


def look_at(data: bytes, size: Tuple[int, int]) -> Optional[str]:
    """Return what is wrong with an image, or None; its EXIF orientation is not applied, as pycocotools does not."""
    if not data:
        return "damaged: no bytes"
    try:
        with Image.open(io.BytesIO(data)) as image:
            found = image.size
            # At one eighth of the size the decoder still walks through every coded bit.
            image.draft(None, (1, 1))
            image.load()
    except UnidentifiedImageError:
        return "damaged: no image of a format that Pillow reads"
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError) as error:
        # What Pillow's many decoders raise on bytes that break their format.
        return f"damaged: {error or type(error).__name__}"
    if found != size:
        return f"{found[0]} x {found[1]} pixels, its entry has {size[0]} x {size[1]}"
    return None


def _put(task: Pictures, name: str, data: bytes) -> None:
    # Place an image: as a hard link where its file system can, which takes no room, else as a copy
    path = task.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink() if path.exists() else None
    if not task.images.is_zip:
        with suppress(OSError):
            os.link(os.path.realpath(task.images.place(name).path), path)
            return
    temporary = task.done_path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)
