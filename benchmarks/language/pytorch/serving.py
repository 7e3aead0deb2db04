"""The network as a server calls it: a padded table (B, L) of tokens instead of packed tokens.

Same forward pass as in training; attention uses a mask instead of offsets.
"""

from typing import Tuple

import numpy as np
import torch

from benchmarks.language.arrays import within
from benchmarks.language.pytorch.encoder import Rows

# Preprocessing that a client must apply.
TOKENS = {"tokens": "WordPiece, lower case", "vocabulary": "vocabulary.txt of the data set"}


def packed(tokens: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor) -> Rows:
    # Return tokens, segments and mask (B, L), int64, as one row of B * L tokens; the mask is 1 where a token is.
    count, length = mask.shape
    positions = torch.arange(length, device=mask.device).repeat(count)
    offsets = torch.arange(count + 1, device=mask.device) * length
    return Rows(tokens.flatten(), segments.flatten(), positions, offsets, length, mask=mask)


def table(rows: Rows, length: int) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    # Convert a packed batch to tokens, segments and mask (B, length), int64.
    count = len(rows.offsets) - 1
    owners = np.repeat(np.arange(count), np.diff(rows.offsets.numpy()))
    positions = (owners, rows.positions.numpy())
    tables = tuple(np.zeros((count, length), np.int64) for _ in range(3))
    for wide, values in zip(tables, (rows.tokens.numpy(), rows.segments.numpy(), 1)):
        wide[positions] = values
    return tables[0], tables[1], tables[2]


def as_rows(tokens: np.ndarray, segments: np.ndarray, mask: np.ndarray) -> Rows:
    # Inverse of ``table``: pack the tokens without padding.
    there, lengths = mask == 1, mask.sum(1)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    row, of_segments, positions, begins = map(
        torch.from_numpy, (tokens[there], segments[there], within(lengths), offsets)
    )
    return Rows(row, of_segments, positions, begins, int(lengths.max()))
