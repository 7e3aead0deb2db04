"""TensorFlow's checkpoints, read without TensorFlow: ``NAME.index`` and ``NAME.data-00000-of-00001``.

The index is a table of LevelDB (doc/table_format.md) with a BundleEntryProto of each tensor
(tensorflow/core/protobuf/tensor_bundle.proto): type, shape, place in the data files, CRC-32C. Every block of the index
and every tensor that is read is checked by its CRC.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem

MAGIC = 0xDB4775248B80FB57
FOOTER = 48
"""Bytes at the end of a table: two handles of blocks, filled up, and MAGIC."""
POLYNOMIAL = 0x82F63B78
"""Of CRC-32C (RFC 3720, B.4), its bits reversed."""
MASK = 0xA282EAD8
"""Added to a CRC that is stored (LevelDB, util/crc32c.h)."""
TYPES: Dict[int, Any] = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<i4"),
    9: np.dtype("<i8"),
    19: np.dtype("<f2"),
}
"""Those of DataType that a checkpoint of weights has."""
LANES = 1 << 14
"""Parts of a tensor whose CRCs are computed side by side."""


class Entry(NamedTuple):
    """Where a tensor is."""

    dtype: int
    shape: Tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int


class Bundle:
    """The tensors of a checkpoint by name; each is read when it is asked for."""

    def __init__(self, index: Path) -> None:
        """Read the index file. Raises Problem where it is none or is damaged."""
        self._index = index
        try:
            entries = dict(_table(index.read_bytes()))
            self._shards = next((value for number, value in _fields(entries.pop(b"")) if number == 1), 1)
            self.entries: Dict[str, Entry] = {name.decode(): _entry(value) for name, value in entries.items()}
        except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
            raise self._damaged(index, str(error)) from None

    def read(self, name: str) -> np.ndarray:
        """Return a tensor. Raises Problem where its bytes are not those that were written, or its type is unknown."""
        entry = self.entries[name]
        path = self._index.with_suffix(f".data-{entry.shard:05}-of-{self._shards:05}")
        if entry.dtype not in TYPES:
            raise Problem(f"{path}: {name} has type {entry.dtype}", f"one of {sorted(TYPES)}", "convert it")
        try:
            with path.open("rb") as file:
                file.seek(entry.offset)
                found = file.read(entry.size)
        except OSError as error:
            raise self._damaged(path, error.strerror or str(error)) from None
        if len(found) != entry.size or masked(crc32c(found)) != entry.crc:
            raise self._damaged(path, f"{name} differs from its checksum")
        return np.frombuffer(found, TYPES[entry.dtype]).reshape(entry.shape)

    def _damaged(self, path: Path, what: str) -> Problem:
        prefix = self._index.with_suffix("").name
        expected = f"a checkpoint of TensorFlow: {prefix}.index next to {prefix}.data-00000-of-00001"
        return Problem(f"{path}: {what}", expected, "copy all files of the checkpoint again")


# -- the table -----------------------------------------------------------------------------------------


def _table(content: bytes) -> Iterator[Tuple[bytes, bytes]]:
    """Yield keys and values in order."""
    if len(content) < FOOTER or struct.unpack("<Q", content[-8:])[0] != MAGIC:
        raise ValueError("not an index of a checkpoint")
    footer = content[-FOOTER:]
    _, at = _handle(footer, 0)  # of the block of metadata, which is empty
    handle, _ = _handle(footer, at)
    for _, value in _block(content, handle):
        yield from _block(content, _handle(value, 0)[0])


def _block(content: bytes, handle: Tuple[int, int]) -> Iterator[Tuple[bytes, bytes]]:
    offset, size = handle
    block, kind = content[offset : offset + size], content[offset + size]
    (crc,) = struct.unpack("<I", content[offset + size + 1 : offset + size + 5])
    if masked(crc32c(content[offset : offset + size + 1])) != crc:
        raise ValueError("differs from its checksum")
    if kind != 0:
        raise ValueError("is compressed")
    (restarts,) = struct.unpack("<I", block[-4:])
    at, end, key = 0, size - 4 * (restarts + 1), b""
    while at < end:
        shared, at = _varint(block, at)
        rest, at = _varint(block, at)
        length, at = _varint(block, at)
        key = key[:shared] + block[at : at + rest]
        at += rest
        yield key, block[at : at + length]
        at += length


def _handle(data: bytes, at: int) -> Tuple[Tuple[int, int], int]:
    offset, at = _varint(data, at)
    size, at = _varint(data, at)
    return (offset, size), at


def _varint(data: bytes, at: int) -> Tuple[int, int]:
    found = shift = 0
    while True:
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7


# -- protocol buffers ----------------------------------------------------------------------------------


def _fields(message: bytes) -> Iterator[Tuple[int, object]]:
    """Yield number and value of each field: an int, or the bytes of a string or message."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        value: object
        if tag & 7 == 0:
            value, at = _varint(message, at)
        elif tag & 7 == 2:
            length, at = _varint(message, at)
            value, at = message[at : at + length], at + length
        elif tag & 7 in (1, 5):
            width = 8 if tag & 7 == 1 else 4
            value, at = int.from_bytes(message[at : at + width], "little"), at + width
        else:
            raise ValueError("has fields of an unknown kind")
        yield tag >> 3, value


def _entry(message: bytes) -> Entry:
    fields = dict(_fields(message))
    if 7 in fields:
        raise ValueError("holds parts of tensors")
    dims: List[int] = []
    for number, dim in _fields(fields.get(2, b"")):  # type: ignore[arg-type]
        if number == 2:
            dims.append(dict(_fields(dim)).get(1, 0))  # type: ignore[arg-type]
    numbers = (fields.get(number, 0) for number in (3, 4, 5, 6))
    return Entry(fields.get(1, 0), tuple(dims), *numbers)  # type: ignore[arg-type]


# -- CRC-32C -------------------------------------------------------------------------------------------


def masked(crc: int) -> int:
    """Return a CRC as it is stored."""
    return (((crc >> 15) | (crc << 17)) + MASK) & 0xFFFFFFFF


@lru_cache(maxsize=None)
def _tables() -> Tuple[np.ndarray, np.ndarray]:
    """What a byte, and two bytes, do to a CRC."""
    one = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        one = (one >> np.uint32(1)) ^ (one & np.uint32(1)) * np.uint32(POLYNOMIAL)
    words = np.arange(1 << 16, dtype=np.uint32)
    two = one[words & 255] ^ (words >> np.uint32(8))
    return one, one[two & 255] ^ (two >> np.uint32(8))


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of ``data``."""
    lane = len(data) // LANES // 2 * 2
    if lane < 8:
        return _by_bytes(data, 0xFFFFFFFF) ^ 0xFFFFFFFF
    words = np.frombuffer(data, "<u2", lane // 2 * LANES).reshape(LANES, -1).T
    _, two = _tables()
    # A CRC is linear: each lane begins at 0 but the first.
    crcs = np.zeros(LANES, np.uint32)
    crcs[0] = 0xFFFFFFFF
    for row in np.ascontiguousarray(words):
        crcs = two[(crcs ^ row) & np.uint32(0xFFFF)] ^ (crcs >> np.uint32(16))
    shift = _zeros(lane)
    while len(crcs) > 1:
        crcs = _applied(shift, crcs[0::2]) ^ crcs[1::2]
        shift = _applied(shift, shift)
    return _by_bytes(data[lane * LANES :], int(crcs[0])) ^ 0xFFFFFFFF


def _by_bytes(data: bytes, crc: int) -> int:
    one = _tables()[0].tolist()
    for byte in data:
        crc = one[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc


def _zeros(count: int) -> np.ndarray:
    """What ``count`` bytes of 0 do to each bit of a CRC: 32 columns of a matrix over GF(2)."""
    one, _ = _tables()
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    square, found = one[bits & np.uint32(255)] ^ (bits >> np.uint32(8)), bits
    while count:
        if count & 1:
            found = _applied(square, found)
        square = _applied(square, square)
        count >>= 1
    return found


def _applied(matrix: np.ndarray, crcs: np.ndarray) -> np.ndarray:
    """Return the product of a matrix and each of ``crcs``."""
    found = np.zeros_like(crcs)
    for bit in range(32):
        found ^= ((crcs >> np.uint32(bit)) & np.uint32(1)) * matrix[bit]
    return found
