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
from functools import partial
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from benchmarks.common.data import source_checks
from benchmarks.common.data.passport import CHUNK, File, describe_file
from benchmarks.common.data.recordio import frame, index_line, pack
from benchmarks.common.data.workers import Report
from benchmarks.resnet.images import CorruptImage, Encoding, encode
from benchmarks.resnet.sources.listing import Item, read_item

# Images in a part: about 110 MB and some ten seconds of one core for ImageNet, lost at most per worker.
PART_IMAGES = 1024


@dataclass(frozen=True)
class Part:
    """The images of one part file and how to store them; crosses to a worker process."""

    records: Path
    first_key: int  # place of its first image in the split; a skipped image leaves its key unused
    items: Tuple[Item, ...]
    encoding: Encoding

    @property
    def facts_path(self) -> Path:
        """Where the facts are, which are written last."""
        return self.records.with_suffix(".json")


@dataclass(frozen=True)
class Facts:
    """Facts about a finished part."""

    bytes: int
    index: List[Tuple[int, int]]  # key and offset of each record
    corrupt: List[Tuple[str, str]]  # name and reason of each image that could not be decoded
    keys: List[str]  # for each record, a key that equal images share


Finished = Dict[Path, Facts]  # facts of parts, by the path of their records, in the order of the split


def plan(items: Sequence[Item], split: str, parts: Path, encoding: Encoding) -> List[Part]:
    """Cut the images of a split into parts."""
    return [
        Part(parts / f"{split}-{number:05}.rec", begin, tuple(items[begin : begin + PART_IMAGES]), encoding)
        for number, begin in enumerate(range(0, len(items), PART_IMAGES))
    ]


def write_part(part: Part, report: Report) -> Tuple[int, int]:
    """Write one part; runs in a worker process."""
    temporary = part.records.with_suffix(f".{os.getpid()}")
    index: List[Tuple[int, int]] = []
    corrupt: List[Tuple[str, str]] = []
    keys: List[str] = []
    with temporary.open("wb") as file:
        for key, item in enumerate(part.items, part.first_key):
            try:
                image = encode(read_item(item), part.encoding)
            except CorruptImage as error:
                corrupt.append((item.name, str(error)))
            else:
                index.append((key, file.tell()))
                keys.append(source_checks.key(image))
                file.write(frame(pack(item.label, key, image)))
            report(key - part.first_key + 1, file.tell())
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    temporary.replace(part.records)
    temporary.write_text(json.dumps([size, index, corrupt, keys]), encoding="utf-8")
    temporary.replace(part.facts_path)
    return len(part.items), size


# Read the facts of a part, or None when it has not been finished.
def _read_facts(part: Part) -> Optional[Facts]:
    try:
        return Facts(*json.loads(part.facts_path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):  # the last one of a part that an older version wrote
        return None


def finished(parts: Sequence[Part], joined: Path) -> Finished:
    """The parts of a split, by their path, that need not be made again: whole files, and joined ones."""
    found: Finished = {}
    inside = 0  # bytes of the joined file that its parts account for, as long as they follow each other
    for part in parts:
        facts = _read_facts(part)
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


def join(facts: Finished, joined: Path, report: Callable[[int], None]) -> Tuple[File, File]:
    """Append the parts to one file, taking each away once it is safely there, and write the index.

    An interrupted joining is resumed: what is already joined is read again for its checksum. ``report``
    is called with the bytes dealt with since its last call.
    """
    digest = hashlib.sha256()

    def count(chunk: bytes) -> None:
        digest.update(chunk)
        report(len(chunk))

    joined.touch()
    with joined.open("r+b") as output:
        output.truncate(sum(fact.bytes for path, fact in facts.items() if not path.exists()))
        for chunk in iter(partial(output.read, CHUNK), b""):
            count(chunk)
        for path in filter(Path.exists, facts):
            with path.open("rb") as part:
                for chunk in iter(partial(part.read, CHUNK), b""):
                    output.write(chunk)
                    count(chunk)
            output.flush()
            os.fsync(output.fileno())
            path.unlink()
        size = output.tell()
    index = joined.with_suffix(".idx")
    with index.open("w", encoding="ascii") as lines:
        begin = 0
        for fact in facts.values():
            lines.writelines(index_line(key, begin + offset) for key, offset in fact.index)
            begin += fact.bytes
        lines.flush()
        os.fsync(lines.fileno())
    return {"name": joined.name, "bytes": size, "sha256": digest.hexdigest()}, describe_file(index)
