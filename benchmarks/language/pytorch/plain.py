"""Plain BERT with PyTorch's modules and padding: the baseline of the benches."""

from typing import Any, Callable, List

import torch
from torch import nn

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.language.pytorch.attention import table_places
from benchmarks.language.pytorch.encoder import NORM_EPSILON, Encoder, Rows, shape_of

NextBatch = Callable[[], List[Any]]  # returns a step's micro-batches


class PlainEncoder(nn.Module):
    # Embeddings and nn.TransformerEncoder, a replacement for ``Encoder``.

    def __init__(self, config: Any, vocabulary: int, longest: int = 0) -> None:
        # Pad to ``longest``; 0 pads to the longest sequence in the batch.
        super().__init__()
        self.shape, self.longest = shape_of(config, vocabulary), longest
        self.word_embeddings, self.position_embeddings, self.token_type_embeddings = (
            nn.Embedding(size, config.width) for size in (vocabulary, config.positions, 2)
        )
        self.norm, self.dropout = nn.LayerNorm(config.width, NORM_EPSILON), nn.Dropout(config.dropout)
        layer = nn.TransformerEncoderLayer(
            config.width, config.heads, config.inner_width, config.dropout, "gelu", NORM_EPSILON, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)

    first = Encoder.first

    def forward(self, rows: Rows) -> torch.Tensor:
        # Return the hidden states (T, width) of all tokens, computed in a table (B, longest).
        lengths, longest = (rows.offsets[1:] - rows.offsets[:-1]).long(), self.longest or rows.longest
        there = torch.arange(longest, device=lengths.device) < lengths[:, None]
        positions = table_places(len(rows.tokens), rows.offsets, longest)

        def table(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(there.numel()).index_copy(0, positions, values).view_as(there)

        embedded = self.word_embeddings(table(rows.tokens)) + self.position_embeddings.weight[:longest]
        embedded = embedded + self.token_type_embeddings(table(rows.segments))
        hidden: torch.Tensor = self.layers(self.dropout(self.norm(embedded)), src_key_padding_mask=~there)
        return hidden.flatten(0, 1).index_select(0, positions)


def plain_step(
    config: Any, network: nn.Module, loss: Callable[[Any], torch.Tensor], device: torch.device, next_batch: NextBatch
) -> Callable[[], None]:
    # Return a plain loop's step; ``loss`` computes a micro-batch's loss.
    network.to(device)
    optimizer = torch.optim.AdamW(network.parameters(), bench.RATE, (config.beta1, config.beta2), config.epsilon)

    def step() -> None:
        optimizer.zero_grad()
        for part in next_batch():
            with pytorch.autocast(device, config.precision):
                loss_sum = loss(part)
            loss_sum.backward()
        if config.gradient_clip:
            nn.utils.clip_grad_norm_(network.parameters(), config.gradient_clip)
        optimizer.step()

    return step
