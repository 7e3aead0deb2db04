"""Reader and writer of MXNet's RecordIO files and their index; standard library only.

A ``.rec`` file is a sequence of records, each framed by a magic number and its length; the ``.idx`` file has one
line ``key<TAB>byte offset`` per record. Image records start with MXNet's ``IRHeader``: number of labels if there are
several (never written here), label, key and an unused number. PyTorch and TensorFlow images read and check the same
files without MXNet::

    with open("val.rec", "rb") as file:
        for key, offset in read_index(Path("val.idx")):
            label, jpeg = unpack(read_record(file, offset))
"""

import hashlib
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Mapping, Tuple, Union

from benchmarks.common.data.manifest import prepare_again
from benchmarks.common.data.problem import Problem

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
MAX_PART_BYTES = (1 << 29) - 1  # maximum part length: the length shares a 32-bit word with a 3-bit part flag

_FRAME = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")

# Part position in its record. A payload that contains the magic number on a 4-byte boundary is split there without
# the magic, so that readers that start anywhere find only real record starts.
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)


class RecordIOError(ValueError):
    """A ``.rec`` or ``.idx`` file that breaks the format at ``offset``, in bytes."""

    def __init__(self, path: Union[str, Path], offset: int, reason: str) -> None:
        super().__init__(f"{path}, byte {offset}: {reason}")
        self.offset = offset


# -- writing -------------------------------------------------------------------------------------------


def pack(label: float, key: int, image: bytes) -> bytes:
    return _HEADER.pack(0, label, key, 0) + image


def frame(payload: bytes) -> bytes:
    """Frame one record as dmlc-core writes it: split where the magic number is on a 4-byte boundary."""
    aligned = [match.start() for match in re.finditer(re.escape(MAGIC_BYTES), payload) if match.start() % 4 == 0]
    begins, ends = [0, *(offset + len(MAGIC_BYTES) for offset in aligned)], [*aligned, len(payload)]
    parts = [payload[start:end] for start, end in zip(begins, ends)]
    if max(map(len, parts)) > MAX_PART_BYTES:
        raise ValueError(f"a record of {len(payload)} bytes: RecordIO takes {MAX_PART_BYTES}")
    flags = [_FIRST, *[_MIDDLE] * (len(parts) - 2), _LAST] if aligned else [_WHOLE]
    framed = b"".join(_FRAME.pack(MAGIC, (flag << 29) | len(part)) + part for flag, part in zip(flags, parts))
    return framed + b"\0" * (-len(framed) % 4)


def index_line(key: int, offset: int) -> str:
    return f"{key}\t{offset}\n"


# -- reading -------------------------------------------------------------------------------------------


def unpack(record: bytes) -> Tuple[float, bytes]:
    """Split an image record into label and image bytes.

    Raises:
        ValueError: the record is shorter than a header, or has several labels.
    """
    if len(record) < _HEADER.size:
        raise ValueError(f"record of {len(record)} bytes without an image header")
    labels, label, key, _ = _HEADER.unpack_from(record)
    if labels:
        raise ValueError(f"the image header of record {key} announces {labels} labels, expected one")
    return label, record[_HEADER.size :]


def read_record(file: BinaryIO, offset: int) -> bytes:
    """Read the record at ``offset`` and leave ``file`` at its end.

    Raises:
        RecordIOError: no record starts at the offset, or the file ends within the record.
    """
    file.seek(offset)
    flag, payload = _read_part(file)
    if flag not in (_WHOLE, _FIRST):
        raise RecordIOError(file.name, offset, "the middle of a split record, not its start")
    parts = [payload]
    while flag not in (_WHOLE, _LAST):
        start = file.tell()
        flag, payload = _read_part(file)
        if flag not in (_MIDDLE, _LAST):
            raise RecordIOError(file.name, start, "a new record starts before the split one is complete")
        parts.append(payload)
    return MAGIC_BYTES.join(parts)


# Return flag and payload of the part at the current position.
def _read_part(file: BinaryIO) -> Tuple[int, bytes]:
    start = file.tell()
    header = file.read(_FRAME.size)
    if len(header) < _FRAME.size:
        raise RecordIOError(file.name, start, "end of file instead of the next frame")
    magic, word = _FRAME.unpack(header)
    if magic != MAGIC:
        raise RecordIOError(file.name, start, f"found {magic:#010x} where the magic {MAGIC:#010x} belongs")
    length = word & MAX_PART_BYTES
    padded = length + -length % 4
    payload = file.read(padded)
    if len(payload) < padded:
        raise RecordIOError(file.name, start, f"{len(payload)} bytes of {padded} are there")
    return word >> 29, payload[:length]


def read_index(path: Path) -> Iterator[Tuple[int, int]]:
    """Yield key and byte offset of every record from an ``.idx`` file.

    Raises:
        RecordIOError: a line is not two numbers.
    """
    position = 0
    with path.open("rb") as lines:
        for line in lines:
            if not re.fullmatch(rb"\s*\d+\s+\d+\s*\n", line):
                raise RecordIOError(path, position, "a line that is not a key and an offset")
            key, offset = map(int, line.split())
            yield key, offset
            position += len(line)


# -- data set splits -----------------------------------------------------------------------------------


def inspect(records: Path, index: Path) -> Tuple[int, Dict[str, Any], Dict[str, Any], int]:
    """Return the count, the manifest entries of the first and last record, and the end of the last one in bytes.

    Raises:
        RecordIOError: the index is empty or invalid, or does not point to records.
    """
    count = 0
    first = last = (0, 0)
    for count, last in enumerate(read_index(index), 1):
        if count == 1:
            first = last
    if count == 0:
        raise RecordIOError(index, 0, "no records")
    described = []
    with records.open("rb") as file:
        for key, offset in (first, last):
            label, image = unpack(read_record(file, offset))
            described.append({"key": key, "label": label, "sha256": hashlib.sha256(image).hexdigest()})
        return count, described[0], described[1], file.tell()


def check(directory: Path, split: Mapping[str, Any]) -> List[Problem]:
    """Compare a split's index, first and last record with its manifest; the files are records and index."""
    records, index = (directory / file["name"] for file in split["files"])
    again = prepare_again(directory)
    try:
        count, first, last, end = inspect(records, index)
    except (OSError, ValueError) as error:  # RecordIOError is a ValueError
        return [Problem(str(error), "whole records", again)]
    size = split["files"][0]["bytes"]
    pairs = [
        (f"{count:,} records in {index.name}", f"{split['count']:,}", count == split["count"]),
        (f"{records}: the first record is {first}", str(split["first"]), first == split["first"]),
        (f"{records}: the last record is {last}", str(split["last"]), last == split["last"]),
        (f"{records}: the last record ends at byte {end:,}", f"{size:,}", end == size),
    ]
    return [Problem(problem, expected, again) for problem, expected, is_same in pairs if not is_same]
