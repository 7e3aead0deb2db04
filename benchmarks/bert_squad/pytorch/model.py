"""BERT with the question answering head: two logits per token, for the first and the last token of the answer."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.bert_squad.pytorch.config import Config
from benchmarks.bert_squad.pytorch.data import Batch
from benchmarks.language.pytorch.encoder import DEVIATION, Encoder, Rows, draw_weights, shape_of


class Network(nn.Module):
    # Encoder and span head (arXiv 1810.04805, section 4.2).

    def __init__(self, config: Config, vocabulary: int, attention: str) -> None:
        super().__init__()
        self.encoder = Encoder(shape_of(config, vocabulary), attention, config.compile)
        self.span = nn.Linear(config.width, 2)
        self.span.apply(draw_weights)
        with torch.no_grad():
            for weight in (parameter for parameter in self.parameters() if parameter.dim() > 1):
                weight *= config.initializer_range / DEVIATION

    def forward(self, rows: Rows) -> torch.Tensor:
        # Logits (T, 2), fp32: that a token is the first, and the last one of the answer.
        return self.span(self.encoder(rows)).float()

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        # (): mean of the cross-entropies of first and last token over the window's tokens; summed over B.
        logits, count, longest = self(batch.rows), len(batch.start), batch.rows.longest
        # Both logits as (B, longest), padded with minus infinity; the last row is for padding.
        empty = logits.new_full((count * longest + 1, 2), float("-inf"))
        tables = empty.index_copy(0, batch.wide, logits)[:-1].view(count, longest, 2).unbind(2)
        first, last = (
            functional.cross_entropy(table, target, reduction="sum")
            for table, target in zip(tables, (batch.start, batch.end))
        )
        return (first + last) / 2
