"""The encoder as a server calls it: a table (B, L) of tokens with padding, where training has one row without.

The layers are the training's own; the attention looks at a mask in place of offsets.
"""

from __future__ import annotations

from typing import Tuple

import numpy as np
import torch
from torch.nn import functional

from benchmarks.language.pytorch.encoder import Encoder, Layer, Rows, rows_of

TOKENS = {"tokens": "WordPiece, lower case", "vocabulary": "vocabulary.txt of the data set"}
"""What a client does to its text, as facts."""


def hidden_states(encoder: Encoder, tokens: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (B, L, width) of tokens, segments and mask (B, L), int64; the mask is 1 where a token is."""
    places = encoder.places.weight[: tokens.shape[1]]
    hidden = encoder.norm(encoder.words(tokens) + places + encoder.segments(segments))
    there = mask[:, None, None] == 1
    for layer in encoder.layers:
        hidden = _layer(layer, hidden, there)
    return hidden


def _layer(layer: Layer, hidden: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    count, length, width = hidden.shape
    heads = layer.shape.heads
    q, k, v = layer.qkv(hidden).view(count, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=there)
    return layer.behind_attention(attended.transpose(1, 2).reshape(count, length, width), hidden, 0.0)


def table(rows: Rows, length: int) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, segments and mask (B, length), int64, of a batch as training has it."""
    count = len(rows.offsets) - 1
    owners = np.repeat(np.arange(count), np.diff(rows.offsets.numpy()))
    places = (owners, rows.positions.numpy())
    found = tuple(np.zeros((count, length), np.int64) for _ in range(3))
    for wide, values in zip(found, (rows.tokens.numpy(), rows.segments.numpy(), 1)):
        wide[places] = values
    return found[0], found[1], found[2]


def as_rows(tokens: np.ndarray, segments: np.ndarray, mask: np.ndarray) -> Rows:
    """Return a table as a batch as training has it."""
    lengths = mask.sum(1).tolist()
    parts = [
        [torch.from_numpy(np.ascontiguousarray(row[:length])) for row, length in zip(each, lengths)]
        for each in (tokens, segments)
    ]
    return rows_of(parts[0], parts[1])
