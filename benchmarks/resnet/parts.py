"""Unfinished data set: part files written by worker processes, and their concatenation into one file per split.

``parts/`` in the data folder contains ``plan.json`` (identifies the preparation), ``train-00000.rec`` and
``train-00000.json`` (metadata) per part, and later the growing ``train.rec``. A part is complete if its metadata
exist. Parts are deleted while they are joined, so the data set never needs twice its size.
"""

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

DEFAULT_QUALITY = 95  # JPEG quality (1 to 100) of re-encoded images, the default of im2rec

# Baseline, extended and progressive Huffman frames are supported by libjpeg-turbo, nvJPEG and the hardware decoder;
# lossless, hierarchical and arithmetic-coded frames are re-encoded.
_PLAIN_FRAMES = (0xC0, 0xC1, 0xC2)
_FRAMES = tuple(code for code in range(0xC0, 0xD0) if code not in (0xC4, 0xC8, 0xCC))
_WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD9))


class Encoding(NamedTuple):
    """Options of the encoding."""

    # Pixels of the short side; larger images are downscaled, smaller images are not changed
    resize: Optional[int] = None
    # JPEG quality, 1 to 100; None keeps the bytes of JPEGs that are not resized
    quality: Optional[int] = None
    trust: bool = False  # whether unchanged JPEGs are stored without a test decode


def encode(data: bytes, encoding: Encoding) -> bytes:
    """Return JPEG bytes for an image file in any format that Pillow reads.

    Plain JPEGs are not re-encoded, including CMYK, as in the published packings of ImageNet; DALI can decode them.
    The EXIF orientation is not applied, nor does DALI 1.35 apply it to unchanged files.

    Raises:
        CorruptImage: the bytes are not a complete image, or the range of pixel values is undefined.
    """
    is_kept = is_plain_jpeg(data)
    if is_kept and encoding.trust and encoding.resize is None and encoding.quality is None:
        return data
    with images.opened(data) as image:
        shrinks = encoding.resize is not None and min(image.size) > encoding.resize
        if is_kept and encoding.quality is None and not shrinks:
            # At one eighth of the size the decoder still walks through every coded bit.
            image.draft(None, (1, 1))
            image.load()
            return data
        return _save(image, encoding.resize if shrinks else None, encoding.quality or DEFAULT_QUALITY)


def _save(image: Image.Image, short_side: Optional[int], quality: int) -> bytes:
    rgb = images.to_rgb(image)
    if short_side is not None:
        scale = short_side / min(rgb.size)
        rgb = rgb.resize([max(1, round(length * scale)) for length in rgb.size], Image.BICUBIC)
    buffer = io.BytesIO()
    rgb.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def is_plain_jpeg(data: bytes) -> bool:
    """Whether all decoders support these bytes: 8 bits, Huffman-coded, sequential or progressive."""
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


# Images per part: about 110 MB and ten seconds on a core for ImageNet, the maximum loss per worker
PART_IMAGES = 1024


@dataclass(frozen=True)
class Part:
    """A part file's images and their encoding, for a worker process."""

    records: Path
    first_key: int  # position of the first image in the split; keys of skipped images are unused
    items: Tuple[Item, ...]
    labels: Dict[str, int]  # class name: class number
    encoding: Encoding

    @property
    def facts_path(self) -> Path:
        return self.records.with_suffix(".json")


@dataclass(frozen=True)
class Facts:
    bytes: int
    index: List[Tuple[int, int]]  # key and offset per record
    corrupt: List[Tuple[str, str]]  # name and error per image that could not be decoded
    keys: List[str]  # per record: key that is equal for equal images


PartFacts = Dict[Path, Facts]  # Metadata by record file, in the order of the split


def plan(source: Source, split: str, parts: Path, encoding: Encoding) -> List[Part]:
    labels, items = source.labels, source.images[split]
    return [
        Part(parts / f"{split}-{number:05}.rec", start, tuple(items[start : start + PART_IMAGES]), labels, encoding)
        for number, start in enumerate(range(0, len(items), PART_IMAGES))
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


def finished_parts(parts: Sequence[Part], joined: Path) -> PartFacts:
    """Return a split's completed parts: complete files, and parts that have been joined."""
    parts_done: PartFacts = {}
    size = joined.stat().st_size if joined.exists() else 0
    joined_bytes = 0  # bytes in the joined file from contiguous parts; -1 after a gap
    for part in parts:
        part_facts = None
        with suppress(FileNotFoundError, ValueError, TypeError):  # unfinished, or torn where the machine stopped
            part_facts = Facts(*read_facts(part.facts_path))
        is_there = part.records.exists()
        if part_facts and is_there and part.records.stat().st_size == part_facts.bytes:
            joined_bytes, parts_done[part.records] = -1, part_facts
        elif part_facts and not is_there and joined_bytes >= 0 and joined_bytes + part_facts.bytes <= size:
            joined_bytes, parts_done[part.records] = joined_bytes + part_facts.bytes, part_facts
        else:
            joined_bytes = -1
    return parts_done


def join(parts_done: PartFacts, joined: Path, report: Callable[[int], None]) -> Tuple[File, File]:
    """Append the parts to one file, delete each part after fsync, and write the index.

    An interrupted join is resumed; joined bytes are read again for the checksum. ``report`` is called with the
    number of bytes since the last call.
    """
    digest = hashlib.sha256()

    def count(chunk: bytes) -> None:
        digest.update(chunk)
        report(len(chunk))

    joined.touch()
    with joined.open("r+b") as output:
        output.truncate(sum(fact.bytes for path, fact in parts_done.items() if not path.exists()))
        for chunk in iter(partial(output.read, CHUNK), b""):
            count(chunk)
        for path in filter(Path.exists, parts_done):
            with path.open("rb") as part:
                for chunk in iter(partial(part.read, CHUNK), b""):
                    output.write(chunk)
                    count(chunk)
            output.flush()
            os.fsync(output.fileno())
            path.unlink()
        size = output.tell()
    index, part_start = joined.with_suffix(".idx"), 0
    with in_one_step(index, durable=True) as lines:
        for fact in parts_done.values():
            lines.writelines(index_line(key, part_start + offset).encode() for key, offset in fact.index)
            part_start += fact.bytes
    return {"name": joined.name, "bytes": size, "sha256": digest.hexdigest()}, describe_file(index)
