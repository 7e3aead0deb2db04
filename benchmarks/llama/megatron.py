"""Megatron's indexed data sets: token ids of all documents in NAME.bin, offsets in NAME.idx.

The index is little-endian: ``MMIDIDX`` and two zeros, a version (uint64, 1), the token type (uint8), the number of
sequences and of document boundaries (uint64), then the sequence lengths in tokens (int32), their offsets in NAME.bin
in bytes (int64) and the document boundaries (int64), see _IndexReader of Megatron-LM
(megatron/core/datasets/indexed_dataset.py).

Only files with one sequence per document are supported, as Megatron's text preprocessing writes them.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Callable, Sequence

import numpy as np

from benchmarks.common.data.problem import Problem

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Token types by code (DType of indexed_dataset.py).
TYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
CHUNK = 1 << 24  # tokens compared at a time
MOST_UINT16 = 65500  # vocabulary size from which Megatron stores int32 (DType.optimal_dtype)


@dataclass(frozen=True)
class Documents:
    """A data set's documents, concatenated."""

    tokens: np.ndarray  # a memory map
    lengths: np.ndarray  # int32, a memory map: tokens per document
    begins: np.ndarray  # int64, a memory map: offset per document in bytes
    end_token: int = -1  # the label after this token is excluded from the loss; -1: no label is

    def read(self, document: int, start: int, count: int) -> np.ndarray:
        """Return up to ``count`` tokens from a document, starting at token ``start``."""
        first = int(self.begins[document]) // self.tokens.itemsize + start
        return self.tokens[first : first + min(count, int(self.lengths[document]) - start)]


def type_for(entries: int) -> "np.dtype[np.generic]":
    return np.dtype("<u2" if entries < MOST_UINT16 else "<i4")


def open_documents(stem: Path) -> Documents:
    """Open ``stem``.idx and ``stem``.bin; reads only the header of the index.

    Raises:
        Problem: the index is invalid, or the files do not match.
        OSError: a file cannot be read.
    """
    index = stem.with_name(f"{stem.name}.idx")
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    magic, version, code, count, boundaries = HEADER.unpack(head) if len(head) == HEADER.size else (b"", 0, 0, 0, 0)
    if magic != MAGIC or version != 1 or code not in TYPES:
        problem = f"{index} begins with {head[:9]!r}, version {version:,}, token type {code}"
        expected = f"an index of Megatron's, version 1, token type {', '.join(map(str, TYPES))}"
        raise Problem(problem, expected, "create it with Megatron's preprocess_data.py, or copy it again")
    kind = np.dtype(TYPES[code])
    expected_size = HEADER.size + count * 12 + boundaries * 8
    tokens = stem.with_name(f"{stem.name}.bin")
    index_bytes = index.stat().st_size
    if not count or boundaries != count + 1 or index_bytes != expected_size:
        raise Problem(
            f"{index} has {count:,} sequences, {boundaries:,} boundaries and {index_bytes:,} bytes",
            "one sequence per document",
            "create it with Megatron's preprocess_data.py without --split-sentences, or copy it again",
        )
    lengths = np.memmap(index, "<i4", "r", HEADER.size, (count,))
    begins = np.memmap(index, "<i8", "r", HEADER.size + 4 * count, (count,))
    size, end = tokens.stat().st_size, int(begins[-1]) + int(lengths[-1]) * kind.itemsize
    if size != end or not size:
        expected = f"{end:,}, as {index} has it" if end > 0 else "tokens"
        raise Problem(f"{tokens} has {size:,} bytes", expected, "copy both files again")
    return Documents(np.memmap(tokens, kind, "r"), lengths, begins)


def check_index(stem: Path) -> None:
    """Check all lengths, pointers and document boundaries.

    Raises:
        Problem: the documents are not contiguous in ``stem``.bin.
    """
    documents = open_documents(stem)
    index, count = stem.with_name(f"{stem.name}.idx"), len(documents.lengths)
    boundaries = np.memmap(index, "<i8", "r", HEADER.size + 12 * count, (count + 1,))
    lengths, begins = np.asarray(documents.lengths, np.int64), np.asarray(documents.begins)
    ends = begins + lengths * documents.tokens.itemsize
    rules = (
        ("length", lengths, np.maximum(lengths, 0), "at least"),
        ("pointer", begins, np.concatenate(([0], ends[:-1])), "the end of the document before it,"),
        ("boundary", boundaries, np.arange(count + 1), "one sequence per document,"),
    )
    for field, values, expected, rule in rules:
        wrong = np.flatnonzero(values != expected)
        if len(wrong):
            first = int(wrong[0])
            raise Problem(
                f"{index}: document {first:,} (from 0) has the {field} {int(values[first]):,}",
                f"{rule} {int(expected[first]):,}",
                "create both files with Megatron's preprocess_data.py, or copy them again",
            )


def check_tokens(stem: Path, entries: int, add: Callable[[int], None] = lambda size: None) -> None:
    """Check that all token ids are in the vocabulary; ids beyond it would be read outside of the embedding table.

    Raises:
        Problem: one is not.
    """
    documents = open_documents(stem)
    tokens = documents.tokens
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        wrong = np.flatnonzero((chunk < 0) | (chunk >= entries))
        if len(wrong):
            index = start + int(wrong[0])
            document = int(np.searchsorted(documents.begins, index * tokens.itemsize, "right")) - 1
            raise Problem(
                f"{stem}.bin: document {document:,} (from 0) has the token {int(tokens[index]):,}",
                f"0 to {entries - 1:,}, the ids of the tokenizer",
                "pass the tokenizer of these files with --tokenizer",
            )
        add(chunk.nbytes)


def write_index(file: BinaryIO, lengths: Sequence[int], kind: "np.dtype[np.generic]") -> None:
    """Write the index of contiguous documents with ``lengths`` tokens."""
    counts = np.asarray(lengths, "<i4")
    begins = np.concatenate(([0], np.cumsum(counts[:-1], dtype="<i8") * kind.itemsize)).astype("<i8")
    code = next(code for code, name in TYPES.items() if np.dtype(name) == kind)
    file.write(HEADER.pack(MAGIC, 1, code, len(counts), len(counts) + 1))
    for values in (counts, begins, np.arange(len(counts) + 1, dtype="<i8")):
        file.write(values.tobytes())
