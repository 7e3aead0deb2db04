"""The network as a server calls it: on a table (B, L) of tokens with padding, where training has one row without.

The forward pass is the training's own; the attention looks at a mask in place of offsets.
"""

from typing import Tuple

import numpy as np
import torch

from benchmarks.language.arrays import within
from benchmarks.language.pytorch.encoder import Rows

# The preprocessing of a client, as facts.
TOKENS = {"tokens": "WordPiece, lower case", "vocabulary": "vocabulary.txt of the data set"}


def packed(tokens: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor) -> Rows:
    # Return tokens, segments and mask (B, L), int64, as one row of B * L tokens; the mask is 1 where a token is.
    count, length = mask.shape
    positions = torch.arange(length, device=mask.device).repeat(count)
    offsets = torch.arange(count + 1, device=mask.device) * length
    return Rows(tokens.flatten(), segments.flatten(), positions, offsets, length, mask=mask)


def table(rows: Rows, length: int) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    # Return tokens, segments and mask (B, length), int64, of a batch as training has it.
    count = len(rows.offsets) - 1
    owners = np.repeat(np.arange(count), np.diff(rows.offsets.numpy()))
    positions = (owners, rows.positions.numpy())
    tables = tuple(np.zeros((count, length), np.int64) for _ in range(3))
    for wide, values in zip(tables, (rows.tokens.numpy(), rows.segments.numpy(), 1)):
        wide[positions] = values
    return tables[0], tables[1], tables[2]


def as_rows(tokens: np.ndarray, segments: np.ndarray, mask: np.ndarray) -> Rows:
    # Return what ``table`` makes such a table of, without padding.
    there, lengths = mask == 1, mask.sum(1)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    columns = (torch.from_numpy(column) for column in (tokens[there], segments[there], within(lengths), offsets))
    row, of_segments, positions, begins = columns
    return Rows(row, of_segments, positions, begins, int(lengths.max()))
