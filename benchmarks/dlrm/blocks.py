"""On-disk format: rows of clicks in blocks of columns, read through a memory map.

A file has ``ceil(rows / BLOCK_ROWS)`` blocks. A block has BLOCK_ROWS four-byte little-endian words per column: the
label (int32, 0 or 1), 13 numbers (float32, log(1 + max(0, x))), 26 table rows (int32). A rank reads only the columns
for its tables, and any range of rows needs only a few long reads. The last block is padded with zeros.
"""

from pathlib import Path

import numpy as np

from benchmarks.common.data.files import allocate

NUMBERS = 13  # integer features per row
TABLES = 26  # categorical features per row, with an embedding table each
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
    """Open the file as an array (blocks, COLUMNS, BLOCK_ROWS).

    Raises:
        ValueError: the file size does not match ``rows``.
    """
    size = path.stat().st_size
    if size != file_bytes(rows):
        raise ValueError(f"{path} has {size:,} bytes, {rows:,} rows need {file_bytes(rows):,}")
    shape = (size // BLOCK_BYTES, COLUMNS, BLOCK_ROWS)
    return np.memmap(path, dtype=WORD, mode="r+" if writable else "r", shape=shape)


def write_column(blocks: np.ndarray, column: int, first_row: int, values: np.ndarray) -> None:
    """Put four-byte ``values`` into a column from ``first_row`` on."""
    encoded = values.view(WORD)
    done = 0
    while done < len(encoded):
        block, lane = divmod(first_row + done, BLOCK_ROWS)
        count = min(BLOCK_ROWS - lane, len(encoded) - done)
        blocks[block, column, lane : lane + count] = encoded[done : done + count]
        done += count
