"""BERT as one would write it first, by PyTorch's own modules and with padding: what the benches compare with."""

from __future__ import annotations

from typing import Any, Tuple

import torch
from torch import nn

from benchmarks.language.pytorch.attention import pad
from benchmarks.language.pytorch.encoder import Rows
from benchmarks.language.pytorch.pieces import NORM_EPSILON


class PlainEncoder(nn.Module):
    # Embeddings and nn.TransformerEncoder of a benchmark's configuration.

    def __init__(self, config: Any, vocabulary: int) -> None:
        super().__init__()
        sizes = (vocabulary, config.positions, 2)
        self.words, self.places, self.segments = (nn.Embedding(size, config.width) for size in sizes)
        self.norm, self.dropout = nn.LayerNorm(config.width, NORM_EPSILON), nn.Dropout(config.dropout)
        layer = nn.TransformerEncoderLayer(
            config.width, config.heads, config.inner_width, config.dropout, "gelu", NORM_EPSILON, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """(B, length, width) of three (B, length); ``there`` is true where a token is."""
        places = self.places.weight[: tokens.shape[1]]
        embedded = self.dropout(self.norm(self.words(tokens) + places + self.segments(segments)))
        found: torch.Tensor = self.layers(embedded, src_key_padding_mask=~there)
        return found


def tables(rows: Rows, length: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens and segments (B, length) of a packed row, and where a token is."""
    lengths = (rows.offsets[1:] - rows.offsets[:-1]).long()
    there = torch.arange(length, device=lengths.device) < lengths[:, None]
    return pad(rows.tokens, there), pad(rows.segments, there), there
