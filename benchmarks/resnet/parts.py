"""The unfinished data set: parts that worker processes write, and their joining into one file per split.

``parts/`` in the data folder holds ``plan.json`` (which preparation this is), ``train-00000.rec`` with
its facts ``train-00000.json`` per part, and later the growing ``train.rec``. A part exists once its facts
do. Joining takes parts away as it goes, so the data set never needs its size twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Callable, Dict, List, Optional, Sequence, Tuple

from benchmarks.common.data.passport import CHUNK, File, describe_file
from benchmarks.common.data.recordio import frame, index_line, pack
from benchmarks.common.data.workers import Report
from benchmarks.resnet.images import CorruptImage, Encoding, encode
from benchmarks.resnet.sources.listing import Item, read_item

PART_IMAGES = 1024
"""Images in a part: about 110 MB and some ten seconds of one core for ImageNet, lost at most per worker."""


@dataclass(frozen=True)
class Part:
    """The images of one part file and how to store them; crosses to a worker process."""

    records: Path
    first_key: int
    """Place of its first image in the split; a skipped image leaves its key unused."""
    items: Tuple[Item, ...]
    encoding: Encoding

    @property
    def facts_path(self) -> Path:
        """Where the facts lie, which are written last."""
        return self.records.with_suffix(".json")


@dataclass(frozen=True)
class Facts:
    """What is known about a finished part."""

    bytes: int
    index: List[Tuple[int, int]]
    """Key and offset of each record."""
    corrupt: List[Tuple[str, str]]
    """Name and reason of each image that could not be decoded."""


def plan(items: Sequence[Item], split: str, parts: Path, encoding: Encoding) -> List[Part]:
    """Cuts the images of a split into parts."""
    return [
        Part(parts / f"{split}-{number:05}.rec", begin, tuple(items[begin : begin + PART_IMAGES]), encoding)
        for number, begin in enumerate(range(0, len(items), PART_IMAGES))
    ]


def write_part(part: Part, report: Report) -> Tuple[int, int]:
    """Writes one part; runs in a worker process."""
    temporary = part.records.with_suffix(f".{os.getpid()}")
    facts = _write_records(part, temporary, report)
    temporary.replace(part.records)
    temporary.write_text(json.dumps([facts.bytes, facts.index, facts.corrupt]), encoding="utf-8")
    temporary.replace(part.facts_path)
    return len(part.items), facts.bytes


def _write_records(part: Part, path: Path, report: Report) -> Facts:
    index: List[Tuple[int, int]] = []
    corrupt: List[Tuple[str, str]] = []
    with path.open("wb") as file:
        for place, item in enumerate(part.items):
            try:
                image = encode(read_item(item), part.encoding)
            except CorruptImage as error:
                corrupt.append((item.name, str(error)))
            else:
                key = part.first_key + place
                index.append((key, file.tell()))
                file.write(frame(pack(item.label, key, image)))
            report(place + 1, file.tell())
        file.flush()
        os.fsync(file.fileno())
        return Facts(file.tell(), index, corrupt)


def read_facts(part: Part) -> Optional[Facts]:
    """Facts of a part, or None when it has not been finished."""
    try:
        size, index, corrupt = json.loads(part.facts_path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return Facts(size, [(key, offset) for key, offset in index], [(name, why) for name, why in corrupt])


def finished(parts: Sequence[Part], joined: Path) -> Dict[Path, Facts]:
    """The parts of a split, by their path, that need not be made again: whole files, and joined ones."""
    found: Dict[Path, Facts] = {}
    inside = 0  # bytes of the joined file that its parts account for, as long as they follow each other
    for part in parts:
        facts = read_facts(part)
        if facts is None:
            inside = -1
            continue
        if _size(part.records) == facts.bytes:
            inside = -1
            found[part.records] = facts
        elif inside >= 0 and not part.records.exists() and inside + facts.bytes <= _size(joined):
            inside += facts.bytes
            found[part.records] = facts
    return found


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def join(parts: Sequence[Part], joined: Path, tell: Callable[[int], None]) -> Tuple[File, File]:
    """Appends the parts to one file, taking each away once it is safely there, and writes the index.

    An interrupted joining goes on: what is already joined is read again for its checksum. ``tell`` is
    called with the bytes dealt with since its last call.
    """
    facts = finished(parts, joined)
    digest = hashlib.sha256()
    joined.touch()
    with joined.open("r+b") as output:
        inside = sum(facts[part.records].bytes for part in parts if not part.records.exists())
        _hash(output, inside, digest.update, tell)
        output.truncate(inside)
        output.seek(inside)
        for part in parts:
            if part.records.exists():
                _append(part.records, output, digest.update, tell)
        size = output.tell()
    index = joined.with_suffix(".idx")
    with index.open("w", encoding="ascii") as lines:
        begin = 0
        for part in parts:
            lines.writelines(index_line(key, begin + offset) for key, offset in facts[part.records].index)
            begin += facts[part.records].bytes
        lines.flush()
        os.fsync(lines.fileno())
    records = {"name": joined.name, "bytes": size, "sha256": digest.hexdigest()}
    return records, describe_file(index)


def _hash(file: BinaryIO, size: int, update: Callable[[bytes], object], tell: Callable[[int], None]) -> None:
    while size > 0:
        chunk = file.read(min(CHUNK, size))
        if not chunk:
            return
        update(chunk)
        tell(len(chunk))
        size -= len(chunk)


def _append(path: Path, output: BinaryIO, update: Callable[[bytes], object], tell: Callable[[int], None]) -> None:
    with path.open("rb") as part:
        for chunk in iter(lambda: part.read(CHUNK), b""):
            output.write(chunk)
            update(chunk)
            tell(len(chunk))
    output.flush()
    os.fsync(output.fileno())
    path.unlink()
