"""The unfinished data set: parts that worker processes write, and their joining into one file per split.

``parts/`` in the data folder holds ``plan.json`` (which preparation this is), ``train-00000.rec`` with
its facts ``train-00000.json`` per part, and later the growing ``train.rec``. A part exists once its facts
do. Joining takes parts away as it goes, so the data set never needs its size twice."""

import hashlib
import io
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from PIL import Image

from benchmarks.common.data import images, source_checks
from benchmarks.common.data.files import in_one_step, read_facts, write_facts
from benchmarks.common.data.images import CorruptImage
from benchmarks.common.data.manifest import CHUNK, File, describe_file
from benchmarks.common.data.recordio import frame, index_line, pack
from benchmarks.common.data.workers import Report
from benchmarks.resnet.sources import Item, Source, read_item

DEFAULT_QUALITY = 95  # JPEG quality (1 to 100) of what has to be re-encoded, im2rec's default

# Baseline, extended and progressive Huffman frames are what libjpeg-turbo, nvJPEG and the hardware
# decoder share; lossless, hierarchical and arithmetic-coded ones are re-encoded.
_PLAIN_FRAMES = (0xC0, 0xC1, 0xC2)
_FRAMES = tuple(code for code in range(0xC0, 0xD0) if code not in (0xC4, 0xC8, 0xCC))
_WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD9))


class Encoding(NamedTuple):
    """Options of the encoding."""

    # Pixels of the short side; larger images are reduced to it, smaller ones are left alone.
    resize: Optional[int] = None
    # JPEG quality, 1 to 100; None keeps the original bytes of JPEGs that need no resizing.
    quality: Optional[int] = None
    trust: bool = False  # whether JPEGs whose bytes are kept are not decoded to see that they can be


def encode(data: bytes, encoding: Encoding) -> bytes:
    """JPEG bytes of an image file of any format that Pillow reads.

    A plain JPEG keeps its bytes, CMYK ones too, as the published packings of ImageNet do; DALI decodes
    them. The EXIF orientation is not applied, and DALI 1.35 does not apply it to kept bytes either.

    Raises:
        CorruptImage: the bytes are not a complete image, or its pixels have no defined range.
    """
    kept = is_plain_jpeg(data)
    if kept and encoding.trust and encoding.resize is None and encoding.quality is None:
        return data
    with images.opened(data) as image:
        shrinks = encoding.resize is not None and min(image.size) > encoding.resize
        if kept and encoding.quality is None and not shrinks:
            # At one eighth of the size the decoder still walks through every coded bit.
            image.draft(None, (1, 1))
            image.load()
            return data
        return _save(image, encoding.resize if shrinks else None, encoding.quality or DEFAULT_QUALITY)


def _save(image: Image.Image, short_side: Optional[int], quality: int) -> bytes:
    rgb = images.to_rgb(image)
    if short_side is not None:
        scale = short_side / min(rgb.size)
        rgb = rgb.resize([max(1, round(side * scale)) for side in rgb.size], Image.BICUBIC)
    buffer = io.BytesIO()
    rgb.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def is_plain_jpeg(data: bytes) -> bool:
    """Whether every decoder takes these bytes: 8 bits, Huffman-coded, sequential or progressive."""
    if data[:2] != b"\xff\xd8":
        return False
    position = 2
    while position + 9 < len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker in _FRAMES:
            return marker in _PLAIN_FRAMES and data[position + 4] == 8
        if marker == 0xFF or marker in _WITHOUT_LENGTH:
            position += 1 if marker == 0xFF else 2
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return False


# Images in a part: about 110 MB and some ten seconds of one core for ImageNet, lost at most per worker.
PART_IMAGES = 1024


@dataclass(frozen=True)
class Part:
    """The images of one part file and how to store them; crosses to a worker process."""

    records: Path
    first_key: int  # place of its first image in the split; a skipped image leaves its key unused
    items: Tuple[Item, ...]
    labels: Dict[str, int]  # number of each class
    encoding: Encoding

    @property
    def facts_path(self) -> Path:
        return self.records.with_suffix(".json")


@dataclass(frozen=True)
class Facts:
    bytes: int
    index: List[Tuple[int, int]]  # key and offset of each record
    corrupt: List[Tuple[str, str]]  # name and reason of each image that could not be decoded
    keys: List[str]  # for each record, a key that equal images share


Finished = Dict[Path, Facts]  # facts of parts, by the path of their records, in the order of the split


def plan(source: Source, split: str, parts: Path, encoding: Encoding) -> List[Part]:
    labels, items = source.labels, source.images[split]
    return [
        Part(parts / f"{split}-{number:05}.rec", begin, tuple(items[begin : begin + PART_IMAGES]), labels, encoding)
        for number, begin in enumerate(range(0, len(items), PART_IMAGES))
    ]


def write_part(part: Part, report: Report) -> Tuple[int, int]:
    index: List[Tuple[int, int]] = []
    corrupt: List[Tuple[str, str]] = []
    keys: List[str] = []
    with in_one_step(part.records, durable=True) as file:
        for key, item in enumerate(part.items, part.first_key):
            try:
                image = encode(read_item(item), part.encoding)
            except CorruptImage as error:
                corrupt.append((item.name, str(error)))
            else:
                index.append((key, file.tell()))
                keys.append(source_checks.key(image))
                file.write(frame(pack(part.labels[item.kind], key, image)))
            report(key - part.first_key + 1, file.tell())
        size = file.tell()
    write_facts(part.facts_path, [size, index, corrupt, keys])
    return len(part.items), size


def finished(parts: Sequence[Part], joined: Path) -> Finished:
    """The parts of a split, by their path, that need not be made again: whole files, and joined ones."""
    found: Finished = {}
    size = joined.stat().st_size if joined.exists() else 0
    inside = 0  # bytes of the joined file that its parts account for, as long as they follow each other
    for part in parts:
        facts = None
        with suppress(FileNotFoundError, ValueError, TypeError):  # unfinished, or torn where the machine stopped
            facts = Facts(*read_facts(part.facts_path))
        is_there = part.records.exists()
        if facts and is_there and part.records.stat().st_size == facts.bytes:
            inside, found[part.records] = -1, facts
        elif facts and not is_there and inside >= 0 and inside + facts.bytes <= size:
            inside, found[part.records] = inside + facts.bytes, facts
        else:
            inside = -1
    return found


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
    index, begin = joined.with_suffix(".idx"), 0
    with in_one_step(index, durable=True) as lines:
        for fact in facts.values():
            lines.writelines(index_line(key, begin + offset).encode() for key, offset in fact.index)
            begin += fact.bytes
    return {"name": joined.name, "bytes": size, "sha256": digest.hexdigest()}, describe_file(index)
