"""BERT with its two heads: which words stood at the masked places, and whether the second text follows the first.

The vocabulary is multiplied with at the masked places alone (dense_seq_output of NVIDIA's submission): 15 % of the
tokens at most, and none of the padding, which is not there.
"""

from __future__ import annotations

from typing import List, Tuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import NO_WORD, Part
from benchmarks.language.pytorch.encoder import Encoder, Pooler, Rows, Shape
from benchmarks.language.pytorch.pieces import NORM_EPSILON, bias_gelu, draw_weights


class Network(nn.Module):
    """Encoder, pooler and both heads; the masked-word head shares the table of words."""

    def __init__(self, shape: Shape, attention: str, compile: bool = False) -> None:
        super().__init__()
        width = shape.width
        self.encoder = Encoder(shape, attention, compile)
        self.pooler = Pooler(width)
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.words_bias = nn.Parameter(torch.zeros(shape.vocabulary))
        self.next = nn.Linear(width, 2)
        for module in (self.transform, self.next):
            draw_weights(module)

    def forward(self, rows: Rows, masked: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return logits (M, vocabulary) of the words at the places ``masked`` (M,) of the row, and (B, 2) of next."""
        hidden = self.encoder(rows)
        product = functional.linear(hidden.index_select(0, masked), self.transform.weight)
        words = self.transform_norm(bias_gelu(product, self.transform.bias, self.encoder.shape.gelu))
        logits = functional.linear(words, self.encoder.words.weight, self.words_bias)
        return logits, self.next(self.pooler(self.encoder.first(hidden, rows)))

    def losses(self, part: Part) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the cross-entropies of the masked words and of the next sentences, each summed over the part.

        Places without a word (data.NO_WORD) count nothing.
        """
        words, follows = self(part.rows, part.masked)
        return (
            functional.cross_entropy(words.float(), part.labels, reduction="sum"),
            functional.cross_entropy(follows.float(), part.next, reduction="sum"),
        )

    @torch.no_grad()
    def judge(self, part: Part) -> torch.Tensor:
        """Return, float64 (5,): right words, their loss, right next sentences, sequences, masked words."""
        words, follows = self(part.rows, part.masked)
        found = [
            (words.argmax(-1) == part.labels).sum(),
            functional.cross_entropy(words.float(), part.labels, reduction="sum"),
            (follows.argmax(-1) == part.next).sum(),
            torch.tensor(len(part.next), device=words.device),
            (part.labels != NO_WORD).sum(),
        ]
        return torch.stack([each.double() for each in found])


def decay_of(name: str, config: Config) -> float:
    """Return the weight decay of the parameter called ``name``: none of biases and of layer norms, as submitted.

    But where ``config`` says so: run_pretraining.py of v0.7 finds layer norms by the name LayerNorm, and those behind
    the fused attention are called layer_norm, so that their scales decay.
    """
    if name.endswith("attention_norm.weight") and config.attention_norm_decay:
        return config.weight_decay
    return 0.0 if name.endswith("bias") or "norm" in name else config.weight_decay


def parts_of(name: str) -> int:
    """Return how many tensors of the submission a parameter holds: queries, keys and values are one each."""
    return 3 if ".qkv." in name else 1


def named_parameters(network: nn.Module) -> List[Tuple[str, nn.Parameter]]:
    """Return the parameters in the order in which Updates puts them."""
    return list(network.named_parameters())
