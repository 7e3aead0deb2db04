"""BERT with the heads for masked tokens and for next sentences.

Logits are computed only at masked positions (dense_seq_output in NVIDIA's submission), up to 15 % of the tokens.
"""

from collections import OrderedDict
from typing import Tuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import NO_WORD, MicroBatch
from benchmarks.language.pytorch.encoder import NORM_EPSILON, Encoder, Rows, Shape, bias_gelu, draw_weights


class Network(nn.Module):
    # Encoder, pooler and both heads; the MLM head shares the word embedding.

    def __init__(self, shape: Shape, attention: str, compile: bool = False) -> None:
        super().__init__()
        width = shape.width
        self.encoder = Encoder(shape, attention, compile)
        # Input of the next-sentence head: a product and tanh of [CLS].
        self.pooler = nn.Sequential(OrderedDict(dense=nn.Linear(width, width), tanh=nn.Tanh())).apply(draw_weights)
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.words_bias = nn.Parameter(torch.zeros(shape.vocabulary))
        self.next = nn.Linear(width, 2)
        for module in (self.transform, self.next):
            draw_weights(module)

    def forward(self, rows: Rows, masked: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        # Return the logits (M, vocabulary) at the positions ``masked`` (M,), and (B, 2) for the next sentence.
        hidden = self.encoder(rows)
        product = functional.linear(hidden.index_select(0, masked), self.transform.weight)
        transformed = self.transform_norm(bias_gelu(product, self.transform.bias, self.encoder.shape.gelu))
        logits = functional.linear(transformed, self.encoder.word_embeddings.weight, self.words_bias)
        return logits, self.next(self.pooler(self.encoder.first(hidden, rows)))

    def loss(self, batch: MicroBatch) -> torch.Tensor:
        """(), fp32: the micro-batch's part of the loss, mean over masked tokens plus mean over next sentences.

        ``batch.weights`` (2,) scale the parts so that they sum to the loss of the step over all micro-batches and
        ranks. Labels data.NO_WORD are ignored.
        """
        mlm_logits, follows = self(batch.rows, batch.masked)  # (M, vocabulary), (B, 2)
        masked = functional.cross_entropy(mlm_logits.float(), batch.labels, reduction="sum")
        pairs = functional.cross_entropy(follows.float(), batch.next, reduction="sum")
        return masked * batch.weights[0] + pairs * batch.weights[1]

    @torch.no_grad()
    def figures(self, batch: MicroBatch) -> torch.Tensor:
        # Return float64 (5,): correct tokens, their loss, correct next sentences, sequences, masked tokens.
        mlm_logits, follows = self(batch.rows, batch.masked)
        figures = [
            (mlm_logits.argmax(-1) == batch.labels).sum(),
            functional.cross_entropy(mlm_logits.float(), batch.labels, reduction="sum"),
            (follows.argmax(-1) == batch.next).sum(),
            batch.next.new_full((), len(batch.next)),
            (batch.labels != NO_WORD).sum(),
        ]
        return torch.stack([figure.double() for figure in figures])


def decay_of(name: str, config: Config) -> float:
    """Return a parameter's weight decay: 0 for biases and layer norms, as submitted.

    ``config`` can enable decay for the layer norms after the fused attention: run_pretraining.py of v0.7 excludes
    parameters named LayerNorm, but those are named layer_norm, so their scales decay.
    """
    if name.endswith("attention_norm.weight") and config.attention_norm_decay:
        return config.weight_decay
    return 0.0 if name.endswith("bias") or "norm" in name else config.weight_decay


def parts_of(name: str) -> int:
    # Return the number of tensors in the submission for a parameter: queries, keys and values are separate there.
    return 3 if ".qkv." in name else 1
