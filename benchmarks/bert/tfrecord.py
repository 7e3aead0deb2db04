"""TensorFlow's record files without TensorFlow: framing, checksums, and integers of ``tf.train.Example``.

A record is its length (uint64), the masked CRC32C of the length, its bytes, and their masked CRC32C; see
tensorflow/core/lib/io/record_writer.h and tensorflow/core/example/example.proto.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem

MOST_BYTES = 1 << 24
"""Of a record; a sample of 512 tokens has about 3 kB."""
_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, bits reversed."""
_MASK = 0xA282EAD8
_HEAD, _FOOT = struct.Struct("<QI"), struct.Struct("<I")
VARINT, LENGTH_DELIMITED = 0, 2
"""Wire types of protocol buffers."""
REMEDY = "get the file again"


class Record(NamedTuple):
    """One record as it is in the file."""

    place: int
    """Byte at which it begins."""
    content: bytes
    checksum: int
    """Masked CRC32C that is stored with it."""


# -- checksums -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _table() -> np.ndarray:
    """Return the remainder of every 16 bits: uint32 [65536]."""
    table = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(16):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


def crc32c(contents: Sequence[bytes]) -> np.ndarray:
    """Return the CRC32C of each of many byte strings of at least 4 bytes: uint32 [strings].

    All are computed at once, column by column. Zeros in front change no remainder that begins with 0, and beginning
    with ones is the same as inverting the first 32 bits.
    """
    longest = max(map(len, contents))
    longest += longest % 2
    matrix = np.zeros((len(contents), longest), np.uint8)
    for row, content in zip(matrix, contents):
        begin = longest - len(content)
        row[begin:] = np.frombuffer(content, np.uint8)
        row[begin : begin + 4] ^= 0xFF
    table, remainder = _table(), np.zeros(len(contents), np.uint32)
    for column in np.ascontiguousarray(matrix.view("<u2").T):
        remainder = table[(remainder ^ column) & 0xFFFF] ^ (remainder >> np.uint32(16))
    return remainder ^ np.uint32(0xFFFFFFFF)


def masked(checksums: np.ndarray) -> np.ndarray:
    """Return checksums as record files store them: turned by 15 bits, plus a constant."""
    wide = checksums.astype(np.uint64)
    return (((wide >> np.uint64(15)) | (wide << np.uint64(17))) + np.uint64(_MASK)).astype(np.uint32)


# -- framing ---------------------------------------------------------------------------------------------------


def read(path: Path) -> Iterator[Record]:
    """Yield the records of a file, with the checksum of their lengths compared, not that of their content.

    Raises:
        Problem: the file is truncated or damaged.
    """
    place, number = 0, 0
    with path.open("rb") as file:
        while True:
            head = file.read(_HEAD.size)
            if not head:
                return
            where = f"{path}, record {number:,} at byte {place:,}"
            if len(head) < _HEAD.size:
                raise Problem(f"{where} is truncated", "whole records", REMEDY)
            size, checksum = _HEAD.unpack(head)
            if int(masked(crc32c([head[:8]]))[0]) != checksum or size > MOST_BYTES:
                raise Problem(f"{where} is damaged: its length has another checksum", "TFRecord", REMEDY)
            content, foot = file.read(size), file.read(_FOOT.size)
            if len(content) < size or len(foot) < _FOOT.size:
                raise Problem(f"{where} is truncated", f"{size:,} bytes", REMEDY)
            yield Record(place, content, _FOOT.unpack(foot)[0])
            place, number = place + size + _HEAD.size + _FOOT.size, number + 1


def check(path: Path, records: Sequence[Record], first: int) -> None:
    """Compare the checksums of records, of which the first one has the number ``first``.

    Raises:
        Problem: one has changed.
    """
    wrong = np.flatnonzero(masked(crc32c([each.content for each in records])) != [each.checksum for each in records])
    if len(wrong):
        record = records[wrong[0]]
        found = f"{path}, record {first + int(wrong[0]):,} at byte {record.place:,} is damaged: another checksum"
        raise Problem(found, "the bytes that were written", REMEDY)


def frame(content: bytes) -> bytes:
    """Return a record as a file has it."""
    size = struct.pack("<Q", len(content))
    checks = [_FOOT.pack(int(masked(crc32c([each]))[0])) for each in (size, content)]
    return size + checks[0] + content + checks[1]


# -- protocol buffers ------------------------------------------------------------------------------------------


def features(content: bytes) -> Dict[str, np.ndarray]:
    """Return the lists of integers of a ``tf.train.Example``: int64 each; floats are left out.

    Raises:
        ValueError: it is no such message.
    """
    found: Dict[str, np.ndarray] = {}
    for _, group in _fields(content, 1):
        for _, entry in _fields(group, 1):
            names = [bytes(value).decode("utf-8") for _, value in _fields(entry, 1)]
            lists = [value for _, feature in _fields(entry, 2) for _, value in _fields(feature, 3)]
            if names and lists:
                parts = [_varints(value) for _, value in _fields(lists[0], 1)]
                found[names[0]] = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    if not found:
        raise ValueError("no lists of integers")
    return found


def _fields(content: bytes, wanted: int) -> List[Tuple[int, bytes]]:
    """Return wire type and bytes of the fields with a number."""
    found, place = [], 0
    while place < len(content):
        tag, place = _varint(content, place)
        kind = tag & 7
        if kind == LENGTH_DELIMITED:
            size, place = _varint(content, place)
            end = place + size
        elif kind == VARINT:
            end = _varint(content, place)[1]
        else:
            raise ValueError(f"wire type {kind}")
        if end > len(content):
            raise ValueError("a field behind the end")
        if tag >> 3 == wanted:
            found.append((kind, content[place:end]))
        place = end
    return found


def _varint(content: bytes, place: int) -> Tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(content):
            raise ValueError("a number behind the end")
        byte = content[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


def _varints(content: bytes) -> np.ndarray:
    """Return all numbers of a packed list: int64."""
    raw = np.frombuffer(content, np.uint8)
    if not len(raw):
        return np.zeros(0, np.int64)
    if raw.max() < 128:
        return raw.astype(np.int64)
    last = np.flatnonzero(raw < 128)
    if not len(last) or last[-1] != len(raw) - 1:
        raise ValueError("a number without end")
    begins = np.concatenate(([0], last[:-1] + 1))
    within = np.arange(len(raw)) - np.repeat(begins, last - begins + 1)
    if within.max() > 9:
        raise ValueError("a number of over 64 bits")
    parts = (raw & 127).astype(np.uint64) << (7 * within).astype(np.uint64)
    return np.add.reduceat(parts, begins).astype(np.int64)
