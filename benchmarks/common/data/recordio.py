"""MXNet's RecordIO files and their index, with the standard library only.

A ``.rec`` file is a row of records, each framed by a magic number and its length; the ``.idx`` file
next to it has one line ``key<TAB>byte offset`` per record. Image records begin with a header that holds
the label. PyTorch and TensorFlow images read and check the same files without MXNet::

    with RecordReader("val.rec") as reader:
        for key, offset in read_index("val.idx"):
            header, jpeg = unpack(reader.read_at(offset))
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from benchmarks.common.data.problem import Problem

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
MAX_PART_BYTES = (1 << 29) - 1
"""Longest part of a record: the length shares its 32-bit word with a 3-bit part flag."""

_FRAME = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")

# Where a part stands in its record. A payload that contains the magic number on a 4-byte boundary is
# split there and the magic left out, so that a reader that starts anywhere finds only true beginnings.
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)

Label = Union[float, Tuple[float, ...]]
PathLike = Union[str, "os.PathLike[str]"]


class RecordIOError(ValueError):
    """A ``.rec`` or ``.idx`` file that breaks the format; ``offset`` in bytes tells where."""

    def __init__(self, path: PathLike, offset: int, reason: str) -> None:
        super().__init__(f"{os.fspath(path)}, byte {offset}: {reason}")
        self.path = Path(path)
        self.offset = offset
        self.reason = reason


class TruncatedRecord(RecordIOError):
    """The file ends in the middle of a record."""


class WrongMagic(RecordIOError):
    """No record begins at this offset."""


class ImageHeader(NamedTuple):
    """MXNet's ``IRHeader``: what stands before the image bytes in a record."""

    label: Label
    """Class index, or several numbers."""
    key: int
    """``id``, the number of the image."""
    key2: int = 0
    """``id2``, unused by MXNet's own tools."""


def pack(header: ImageHeader, image: bytes) -> bytes:
    """Puts the image header before the image bytes; ``flag`` counts the labels when there are several."""
    if isinstance(header.label, (int, float)):
        return _HEADER.pack(0, header.label, header.key, header.key2) + image
    labels = struct.pack(f"<{len(header.label)}f", *header.label)
    return _HEADER.pack(len(header.label), 0.0, header.key, header.key2) + labels + image


def unpack(record: bytes) -> Tuple[ImageHeader, bytes]:
    """Splits an image record into header and image bytes.

    Raises:
        ValueError: the record is shorter than the header says.
    """
    if len(record) < _HEADER.size:
        raise ValueError(f"a record of {len(record)} bytes has no image header")
    flag, number, key, key2 = _HEADER.unpack_from(record)
    end = _HEADER.size + 4 * flag
    if len(record) < end:
        raise ValueError(f"the image header announces {flag} labels, the record ends before them")
    label: Label = struct.unpack_from(f"<{flag}f", record, _HEADER.size) if flag else number
    return ImageHeader(label, key, key2), record[end:]


def frame(payload: bytes) -> bytes:
    """Frames one record as dmlc-core writes it: split where the magic number stands on a 4-byte boundary."""
    parts = _split(payload)
    if max(map(len, parts)) > MAX_PART_BYTES:
        raise ValueError(f"a record of {len(payload)} bytes: RecordIO takes {MAX_PART_BYTES}")
    framed = []
    for position, part in enumerate(parts):
        framed.append(_FRAME.pack(MAGIC, (_part_flag(position, len(parts)) << 29) | len(part)))
        framed.append(part)
    framed.append(b"\0" * (-len(parts[-1]) % 4))
    return b"".join(framed)


def _part_flag(position: int, count: int) -> int:
    if count == 1:
        return _WHOLE
    if position == 0:
        return _FIRST
    return _LAST if position == count - 1 else _MIDDLE


def _split(payload: bytes) -> Sequence[bytes]:
    parts = []
    begin = 0
    found = payload.find(MAGIC_BYTES)
    while found >= 0:
        if found % 4 == 0:
            parts.append(payload[begin:found])
            begin = found + 4
            found = payload.find(MAGIC_BYTES, begin)
        else:
            found = payload.find(MAGIC_BYTES, found + 1)
    parts.append(payload[begin:])
    return parts


class RecordWriter:
    """Writes records one after another and, when asked, their index."""

    def __init__(self, records: PathLike, index: Optional[PathLike] = None) -> None:
        self.offset = 0
        """Bytes written so far, which is where the next record begins."""
        self._records = Path(records).open("wb")  # noqa: SIM115 - closed by close()
        try:
            self._index = None if index is None else Path(index).open("w", encoding="ascii")  # noqa: SIM115
        except OSError:
            self._records.close()
            raise

    def write(self, key: int, payload: bytes) -> int:
        """Appends one record and returns the offset at which it begins."""
        begin = self.offset
        framed = frame(payload)
        self._records.write(framed)
        if self._index is not None:
            self._index.write(index_line(key, begin))
        self.offset += len(framed)
        return begin

    def close(self) -> None:
        """Writes everything through to the disk, so that a finished file survives a power cut."""
        try:
            self._records.flush()
            os.fsync(self._records.fileno())
        finally:
            self._records.close()
            if self._index is not None:
                self._index.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RecordReader:
    """Reads records in order or at an offset from the index."""

    def __init__(self, records: PathLike) -> None:
        self.path = Path(records)
        self._file: BinaryIO = self.path.open("rb")

    def read_at(self, offset: int) -> bytes:
        """Reads the record that begins at ``offset``.

        Raises:
            WrongMagic: no record begins there.
            TruncatedRecord: the file ends before the record does.
        """
        self._file.seek(offset)
        record = self._next(offset)
        if record is None:
            raise TruncatedRecord(self.path, offset, "the file ends here, a record was expected")
        return record

    def tell(self) -> int:
        """Offset at which the record after the last one read begins."""
        return self._file.tell()

    def __iter__(self) -> Iterator[bytes]:
        self._file.seek(0)
        while True:
            record = self._next(self._file.tell())
            if record is None:
                return
            yield record

    def _next(self, begin: int) -> Optional[bytes]:
        flag, payload = self._part(begin, first=True)
        if flag is None:
            return None
        if flag not in (_WHOLE, _FIRST):
            raise WrongMagic(self.path, begin, "the middle of a split record, not its beginning")
        parts = [payload]
        while flag not in (_WHOLE, _LAST):
            offset = self._file.tell()
            flag, payload = self._part(offset, first=False)
            if flag not in (_MIDDLE, _LAST):
                raise WrongMagic(self.path, offset, "a new record begins before the split one has ended")
            parts.append(payload)
        return MAGIC_BYTES.join(parts)

    def _part(self, offset: int, first: bool) -> Tuple[Optional[int], bytes]:
        frame_bytes = self._file.read(_FRAME.size)
        if first and not frame_bytes:
            return None, b""
        if len(frame_bytes) < _FRAME.size:
            raise TruncatedRecord(self.path, offset, "the file ends within the frame of a record")
        magic, word = _FRAME.unpack(frame_bytes)
        if magic != MAGIC:
            found = f"found {magic:#010x} where the magic {MAGIC:#010x} belongs"
            raise WrongMagic(self.path, offset, found)
        length = word & MAX_PART_BYTES
        padded = length + -length % 4
        payload = self._file.read(padded)
        if len(payload) < padded:
            raise TruncatedRecord(self.path, offset, f"{len(payload)} bytes of {padded} are there")
        return word >> 29, payload[:length]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> RecordReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def index_line(key: int, offset: int) -> str:
    """One line of the ``.idx`` file."""
    return f"{key}\t{offset}\n"


def read_index(path: PathLike) -> Iterator[Tuple[int, int]]:
    """Reads key and byte offset of every record from an ``.idx`` file.

    Raises:
        RecordIOError: a line is not two numbers.
    """
    position = 0
    with Path(path).open("rb") as lines:
        for line in lines:
            fields = line.split()
            if len(fields) != 2 or not all(field.isdigit() for field in fields) or line[-1:] != b"\n":
                raise RecordIOError(path, position, "a line that is not a key and an offset")
            yield int(fields[0]), int(fields[1])
            position += len(line)


def inspect(records: PathLike, index: PathLike) -> Tuple[int, Dict[str, Any], Dict[str, Any], int]:
    """Count, first and last record, and the byte at which the last one ends.

    Raises:
        RecordIOError: the index is empty or broken, or does not point at records.
    """
    count = 0
    begin = end = (0, 0)
    for count, end in enumerate(read_index(index), 1):
        if count == 1:
            begin = end
    if count == 0:
        raise RecordIOError(index, 0, "no records")
    with RecordReader(records) as reader:
        first, last = (_describe(key, reader.read_at(offset)) for key, offset in (begin, end))
        return count, first, last, reader.tell()


def _describe(key: int, record: bytes) -> Dict[str, Any]:
    """What a passport keeps of an image record: key, label, and the sha256 of the image behind the header."""
    header, image = unpack(record)
    if isinstance(header.label, tuple):
        raise ValueError(f"record {key} has {len(header.label)} labels, expected one")
    return {"key": key, "label": header.label, "sha256": hashlib.sha256(image).hexdigest()}


def check(directory: Path, split: Mapping[str, Any]) -> List[Problem]:
    """Compare the index and the end records of a split, whose files are records and index, with its passport."""
    records, index = (directory / file["name"] for file in split["files"])
    again = f"prepare it again: the same command with --to {directory} --overwrite"
    try:
        count, first, last, end = inspect(records, index)
    except (OSError, ValueError) as error:  # RecordIOError is a ValueError
        return [Problem(str(error), "whole records", again)]
    pairs = [
        (f"{count:,} records in {index.name}", f"{split['count']:,}", count == split["count"]),
        (f"{records}: the first record is {first}", str(split["first"]), first == split["first"]),
        (f"{records}: the last record is {last}", str(split["last"]), last == split["last"]),
    ]
    size = split["files"][0]["bytes"]
    pairs.append((f"{records}: the last record ends at byte {end:,}", f"{size:,}", end == size))
    return [Problem(found, expected, again) for found, expected, is_same in pairs if not is_same]
