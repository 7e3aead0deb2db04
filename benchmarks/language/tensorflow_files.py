"""Read TensorFlow records (``*.tfrecord``) and checkpoints (``NAME.index``, ``NAME.data-*``) without TensorFlow.

A record is its length (uint64), the masked CRC-32C of the length, the content, and the masked CRC-32C of the content
(tensorflow/core/lib/io/record_writer.h). The content is a ``tf.train.Example``
(tensorflow/core/example/example.proto). A checkpoint's index is a LevelDB table (doc/table_format.md) with a
BundleEntryProto per tensor (tensorflow/core/protobuf/tensor_bundle.proto): type, shape, offset in the data files,
CRC-32C. All CRCs of records, index blocks and tensors are checked.
"""

import struct
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple, Union

import numpy as np

from benchmarks.common.data.problem import Problem

MOST_BYTES = 1 << 24  # largest record; a sample of 512 tokens has about 3 kB
HINT = "get the file again"
_MASK = 0xA282EAD8  # added to a CRC that is stored (LevelDB, util/crc32c.h)
_HEAD, _FOOT = struct.Struct("<QI"), struct.Struct("<I")


def masked_crc(content: bytes) -> int:
    # Return the CRC-32C (RFC 3720, B.4) of bytes as it is stored.
    # Imported here: a training without TensorFlow's files needs no such package.
    try:
        import google_crc32c
    except ImportError:
        missing, hint = "google_crc32c is not installed in this Python", "pip install google-crc32c"
        raise Problem(missing, "a package that verifies CRC-32C", hint) from None
    crc = google_crc32c.value(content)
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF


# -- records -----------------------------------------------------------------------------------------------


def is_record(head: bytes) -> bool:
    # Return whether a file's first 12 bytes are a record header.
    return len(head) == _HEAD.size and masked_crc(head[:8]) == _HEAD.unpack(head)[1]


def frame(content: bytes) -> bytes:
    size = struct.pack("<Q", len(content))
    return size + _FOOT.pack(masked_crc(size)) + content + _FOOT.pack(masked_crc(content))


def records(path: Path) -> Iterator[bytes]:
    """Yield the content of the records in a file.

    Raises:
        Problem: a record is truncated or damaged.
    """
    number = 0
    with path.open("rb") as file:
        while True:
            location = f"{path}, record {number:,} at byte {file.tell():,}"
            head = file.read(_HEAD.size)
            if not head:
                return
            if len(head) == _HEAD.size and (not is_record(head) or _HEAD.unpack(head)[0] > MOST_BYTES):
                raise Problem(f"{location} is damaged: the checksum of its length is wrong", "TFRecord", HINT)
            size = _HEAD.unpack(head)[0] if len(head) == _HEAD.size else 0
            content, foot = file.read(size), file.read(_FOOT.size)
            if len(foot) < _FOOT.size:
                raise Problem(f"{location} is truncated", "whole records", HINT)
            if masked_crc(content) != _FOOT.unpack(foot)[0]:
                raise Problem(f"{location} is damaged: wrong checksum", "an unmodified file", HINT)
            yield content
            number += 1


def features(content: bytes) -> Dict[str, np.ndarray]:
    """Return the integer lists in a ``tf.train.Example``, as int64; other lists are empty.

    Raises:
        ValueError: the message is invalid.
    """
    arrays: Dict[str, np.ndarray] = {}
    for group in _all(content, 1):
        for entry in _all(group, 1):
            lists = [value_list for feature in _all(entry, 2) for value_list in _all(feature, 3)]
            packed = [_integers(value_list) for numbers in lists for value_list in _all(numbers, 1)]
            arrays[_all(entry, 1)[0].decode("utf-8")] = np.concatenate([np.zeros(0, np.int64), *packed])
    return arrays


# -- checkpoints -------------------------------------------------------------------------------------------

MAGIC = 0xDB4775248B80FB57
FOOTER = 48  # bytes at a table's end: two padded block handles, and MAGIC
# Values of DataType that occur in checkpoints.
TYPES: Dict[int, Any] = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 19: "<f2"}


class Bundle:
    # A checkpoint's tensors by name, read on demand.

    def __init__(self, index: Path) -> None:
        # Read the index file. Raises Problem where it is none or is damaged.
        self._index = index
        try:
            entries = dict(_table(index.read_bytes()))
            self._shards = dict(_fields(entries.pop(b""))).get(1, 1)
            # By name: the fields of BundleEntryProto by number.
            self.entries: Dict[str, Dict[int, Any]] = {key.decode(): dict(_fields(it)) for key, it in entries.items()}
            if any(7 in fields for fields in self.entries.values()):
                raise ValueError("contains partitioned tensors")
        except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
            raise self._damaged(index, str(error)) from None

    def read(self, name: str) -> np.ndarray:
        """Return a tensor. Raises Problem if it is damaged or its type is unknown."""
        fields = self.entries[name]
        dtype, shard, offset, size, crc = (fields.get(number, 0) for number in (1, 3, 4, 5, 6))
        path = self._index.with_suffix(f".data-{shard:05}-of-{self._shards:05}")
        if dtype not in TYPES:
            raise Problem(f"{path}: {name} has type {dtype}", f"one of {sorted(TYPES)}", "convert it")
        try:
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read(size)
        except OSError as error:
            raise self._damaged(path, error.strerror or str(error)) from None
        if len(content) != size or masked_crc(content) != crc:
            raise self._damaged(path, f"{name} differs from its checksum")
        try:
            shape = [dict(_fields(dim)).get(1, 0) for dim in _all(fields.get(2, b""), 2)]
            return np.frombuffer(content, TYPES[dtype]).reshape(shape)
        except ValueError as error:
            raise self._damaged(path, str(error)) from None

    def _damaged(self, path: Path, problem: str) -> Problem:
        prefix = self._index.with_suffix("").name
        return Problem(
            f"{path}: {problem}",
            f"a checkpoint of TensorFlow: {prefix}.index next to {prefix}.data-00000-of-00001",
            "copy all files of the checkpoint again",
        )


def _table(content: bytes) -> Iterator[Tuple[bytes, bytes]]:
    # Yield keys and values in order.
    if len(content) < FOOTER or struct.unpack("<Q", content[-8:])[0] != MAGIC:
        raise ValueError("not an index of a checkpoint")
    footer = content[-FOOTER:]
    _, _, offset = _handle(footer, 0)  # of the block of metadata, which is empty
    for _, value in _block(content, footer, offset):
        yield from _block(content, value, 0)


def _block(content: bytes, handle: bytes, position: int) -> Iterator[Tuple[bytes, bytes]]:
    offset, size, _ = _handle(handle, position)
    block, kind = content[offset : offset + size], content[offset + size]
    (crc,) = struct.unpack("<I", content[offset + size + 1 : offset + size + 5])
    if masked_crc(content[offset : offset + size + 1]) != crc:
        raise ValueError("differs from its checksum")
    if kind != 0:
        raise ValueError("is compressed")
    (restarts,) = struct.unpack("<I", block[-4:])
    position, key = 0, b""
    while position < size - 4 * (restarts + 1):
        shared, position = _varint(block, position)
        rest, position = _varint(block, position)
        length, position = _varint(block, position)
        key = key[:shared] + block[position : position + rest]
        position += rest
        yield key, block[position : position + length]
        position += length


def _handle(data: bytes, position: int) -> Tuple[int, int, int]:
    # Return a block's offset and size, and the position after the handle.
    offset, position = _varint(data, position)
    size, position = _varint(data, position)
    return offset, size, position


# -- protocol buffers --------------------------------------------------------------------------------------


def _fields(message: bytes) -> Iterator[Tuple[int, Any]]:
    # Yield number and value of all fields: an int, or bytes for a string or message.
    offset = 0
    while offset < len(message):
        tag, offset = _varint(message, offset)
        kind = tag & 7
        value: Union[int, bytes]
        if kind == 0:
            value, offset = _varint(message, offset)
        elif kind in (1, 2, 5):
            size = {1: 8, 5: 4}.get(kind, 0)
            if kind == 2:
                size, offset = _varint(message, offset)
            if offset + size > len(message):
                raise ValueError("a field beyond the end")
            value = message[offset : offset + size]
            if kind != 2:
                value = int.from_bytes(value, "little")
            offset += size
        else:
            raise ValueError("has fields of an unknown kind")
        yield tag >> 3, value


def _all(message: bytes, number: int) -> List[bytes]:
    # Return the strings or messages of the fields with a number.
    return [value for field, value in _fields(message) if field == number]


def _varint(data: bytes, offset: int) -> Tuple[int, int]:
    value = shift = 0
    while True:
        if offset >= len(data):
            raise ValueError("a number beyond the end")
        byte = data[offset]
        offset += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, offset
        shift += 7


def _integers(content: bytes) -> np.ndarray:
    # Return a packed list as int64. Raises ValueError if the last number is truncated.
    raw = np.frombuffer(content, np.uint8)
    last = np.flatnonzero(raw < 128)
    if len(last) == len(raw):
        return raw.astype(np.int64)
    begins = np.concatenate(([0], last[:-1] + 1))
    within = np.arange(len(raw)) - np.repeat(begins, last - begins + 1)
    parts = (raw & 127).astype(np.uint64) << (7 * within).astype(np.uint64)
    return np.add.reduceat(parts, begins).astype(np.int64)
