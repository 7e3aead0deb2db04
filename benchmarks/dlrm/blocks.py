"""The on-disk format: rows of clicks in blocks of columns, read through a memory map.

A file holds ``ceil(rows / BLOCK_ROWS)`` blocks. A block has one line of BLOCK_ROWS four-byte little-endian words
per column: the label (int32, 0 or 1), 13 numbers (float32, log(1 + max(0, x))), 26 table rows (int32). So a
rank that owns some tables reads their columns alone, and any range of rows is a few long reads. What is behind
the last row of the last block is zero.
"""

from pathlib import Path

import numpy as np

from benchmarks.common.data.files import allocate

NUMBERS = 13  # integer features of a row
TABLES = 26  # categorical features of a row, each with its embedding table
COLUMNS = 1 + NUMBERS + TABLES
FIRST_TABLE = 1 + NUMBERS  # column of the first table
BLOCK_ROWS = 1024  # divides the submitted global batch of 55,296
WORD = np.dtype("<i4")
ROW_BYTES = COLUMNS * WORD.itemsize
BLOCK_BYTES = BLOCK_ROWS * ROW_BYTES


def file_bytes(rows: int) -> int:
    return -(-rows // BLOCK_ROWS) * BLOCK_BYTES


def create(path: Path, rows: int) -> None:
    """Make a file of zeros, as large as ``rows`` need, for which the disk has room."""
    path.write_bytes(b"")
    allocate(path, file_bytes(rows))


def open_blocks(path: Path, rows: int, writable: bool = False) -> np.memmap:
    """Open the file as an array (blocks, COLUMNS, BLOCK_ROWS) of words.

    Raises:
        ValueError: it has another size than ``rows`` ask for.
    """
    size = path.stat().st_size
    if size != file_bytes(rows):
        raise ValueError(f"{path} has {size:,} bytes, {rows:,} rows need {file_bytes(rows):,}")
    shape = (size // BLOCK_BYTES, COLUMNS, BLOCK_ROWS)
    return np.memmap(path, dtype=WORD, mode="r+" if writable else "r", shape=shape)


def write_column(blocks: np.ndarray, column: int, first_row: int, values: np.ndarray) -> None:
    """Put four-byte ``values`` into a column from ``first_row`` on."""
    words = values.view(WORD)
    done = 0
    while done < len(words):
        block, lane = divmod(first_row + done, BLOCK_ROWS)
        count = min(BLOCK_ROWS - lane, len(words) - done)
        blocks[block, column, lane : lane + count] = words[done : done + count]
        done += count
