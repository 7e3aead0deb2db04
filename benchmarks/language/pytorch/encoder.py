"""BERT encoder (Devlin et al. 2018, arXiv 1810.04805) for packed sequences, without padding.

A batch is one row of tokens; ``offsets`` are the starts of the sequences. GEMMs, GELU and layer norms process the
row, so that no work is done on padding; only attention depends on the sequences.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Tuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.language.arrays import ragged, within
from benchmarks.language.pytorch.attention import IMPLEMENTATIONS

NORM_EPSILON = 1e-12  # epsilon of every layer norm (google-research/bert, modeling.py)
DEVIATION = 0.02  # standard deviation of fresh weights (initializer_range of the published configuration)


def without_bias(linear: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    # GEMM without the bias, which is fused into GELU; ``fp8`` replaces this function.
    return functional.linear(hidden, linear.weight)


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    inner_width: int
    vocabulary: int  # rows of the word embedding, including padding
    positions: int = 512
    segments: int = 2
    dropout: float = 0.1  # dropout of the embeddings and of all block outputs
    attention_dropout: float = 0.1  # dropout of the attentions' weights
    gelu: str = "erf"  # ``erf`` as published, or ``tanh`` as in NVIDIA's submission (layers/fused_gelu.py)


def shape_of(config: Any, vocabulary: int) -> Shape:
    # Return the sizes in a benchmark's configuration; ``vocabulary`` counts rows of the table, padding included.
    names = (field.name for field in dataclasses.fields(Shape) if field.name not in ("vocabulary", "segments"))
    return Shape(vocabulary=vocabulary, **{name: getattr(config, name) for name in names})


@dataclass(frozen=True)
class Rows:
    tokens: torch.Tensor  # int64 (T,)
    segments: torch.Tensor  # int64 (T,): 0 or 1
    positions: torch.Tensor  # int64 (T,): position in the sequence
    offsets: torch.Tensor  # int32 (B + 1,), on the device: first tokens of the sequences, and T
    longest: int  # tokens of the longest sequence, or more
    padding: int = 0  # number of sequences at the end that are there to fill the row up; some may be empty
    # int64 (B, longest), for a server: 1 where a token is, in sequences that are all padded to one length.
    mask: Optional[torch.Tensor] = None


def lengths_of(rows: Rows) -> List[int]:
    # Return the sequence lengths without the padding sequences.
    return (rows.offsets[1:] - rows.offsets[:-1]).tolist()[: len(rows.offsets) - 1 - rows.padding]


def gather_rows(data: Any, indices: np.ndarray) -> Rows:
    # Return the samples ``indices`` as one row in main memory; ``data`` has tokens, offsets and second (arrays.py).
    token_indices, lengths = ragged(data.offsets, indices)
    positions = within(lengths)
    segments = positions >= np.repeat(data.second[indices].astype(np.int64), lengths)
    return Rows(
        torch.from_numpy(np.asarray(data.tokens)[token_indices].astype(np.int64)),
        torch.from_numpy(segments.astype(np.int64)),
        torch.from_numpy(positions),
        torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)),
        int(lengths.max(initial=0)),
    )


def fill_up(rows: Rows, tokens: int, pads: int, longest: int) -> Rows:
    """Pad rows to ``tokens`` tokens by appending ``pads`` sequences of padding.

    The number of padding sequences is fixed; each has up to ``longest`` tokens, some are empty: tensor shapes depend
    only on ``tokens`` and the number of samples. Padding does not affect other sequences. Raises ValueError if the
    padding does not fit.
    """
    there = len(rows.tokens)
    missing = tokens - there
    if not 0 <= missing <= pads * longest:
        raise ValueError(f"{missing} tokens of padding do not fit into {pads} sequences of {longest}")
    ends = [there + min(missing, longest * (number + 1)) for number in range(pads)]
    wide = [functional.pad(column, (0, missing)) for column in (rows.tokens, rows.segments, rows.positions)]
    offsets = torch.cat([rows.offsets, rows.offsets.new_tensor(ends)])
    return Rows(wide[0], wide[1], wide[2], offsets, longest, pads)


# -- batches: tuples of rows and of tensors on the same device ---------------------------------------------------

BatchT = TypeVar("BatchT", bound=Tuple[Any, ...])


def tensors_of(batch: Tuple[Any, ...]) -> List[torch.Tensor]:
    # Return all that is computed on.
    rows, *rest = batch
    return [rows.tokens, rows.segments, rows.positions, rows.offsets, *rest]


def with_tensors(batch: BatchT, tensors: Sequence[torch.Tensor]) -> BatchT:
    # Return the same batch with other ``tensors``.
    tokens, segments, positions, offsets, *rest = tensors
    rows = Rows(tokens, segments, positions, offsets, batch[0].longest, batch[0].padding)
    return type(batch)(rows, *rest)  # type: ignore[arg-type]


# -- layers ----------------------------------------------------------------------------------------------------


def bias_gelu(product: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
    """GELU of ``product + bias`` (arXiv 1606.08415): exact with ``erf``, approximate with ``tanh`` as in the
    submissions.

    Shapes (T, inner width) and (inner width,). The bias may have a wider type; the result has the type of the
    product.
    """
    return functional.gelu(product + bias.to(product.dtype), approximate="tanh" if kind == "tanh" else "none")


def add_norm(
    update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dropout: float
) -> torch.Tensor:
    """Layer norm of ``residual`` + dropout(``update``), both (T, width).

    Computed in the type of the weights. The result has the type of the update, which halves the memory traffic
    between layers in half precision, as in the submissions.
    """
    if dropout:
        update = functional.dropout(update, dropout)
    summed = (residual + update).to(weight.dtype)
    return functional.layer_norm(summed, weight.shape, weight, bias, NORM_EPSILON).to(update.dtype)


def draw_weights(module: nn.Module) -> None:
    """Initialize linear layer or embedding weights from a normal distribution, biases with 0
    (init_bert_weights).

    As in NVIDIA's submission; the paper's code truncates the distribution at two standard deviations.
    """
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=DEVIATION)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Layer(nn.Module):
    # Attention and two GEMMs, each followed by residual addition and layer norm.

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        # Queries, keys and values by one product.
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, shape.inner_width), nn.Linear(shape.inner_width, width)
        self.attention_norm, self.norm = (nn.LayerNorm(width, eps=NORM_EPSILON) for _ in range(2))
        self.product = without_bias

    def forward(self, hidden: torch.Tensor, offsets: torch.Tensor, longest: int, attention: str) -> torch.Tensor:
        # (T, width) to (T, width).
        shape, trains = self.shape, self.training
        dropout = shape.dropout if trains else 0.0
        parts = self.qkv(hidden).view(hidden.shape[0], 3, shape.heads, -1).unbind(1)
        attend = IMPLEMENTATIONS[attention]
        attended = attend(*parts, offsets, longest, shape.attention_dropout if trains else 0.0).flatten(1)
        norm = self.attention_norm
        hidden = add_norm(self.out(attended), hidden, norm.weight, norm.bias, dropout)
        inner = bias_gelu(self.product(self.inner, hidden), self.inner.bias, self.shape.gelu)
        return add_norm(self.outer(inner), hidden, self.norm.weight, self.norm.bias, dropout)


class Encoder(nn.Module):
    # Embeddings and layers; ``attention`` names an implementation of attention.py that this device has.

    def __init__(self, shape: Shape, attention: str = "grouped", compile: bool = False) -> None:
        # Initialize the weights; ``compile`` fuses the operations between GEMMs.
        super().__init__()
        self.shape, self.attention = shape, attention
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embeddings = nn.Embedding(shape.positions, shape.width)
        self.token_type_embeddings = nn.Embedding(shape.segments, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=NORM_EPSILON)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.apply(draw_weights)
        # Compiled for rows of any length.
        self._run = [torch.compile(layer, dynamic=True) if compile else layer for layer in self.layers]

    def forward(self, rows: Rows) -> torch.Tensor:
        # Return the hidden states (T, width) of all tokens.
        embedded = self.word_embeddings(rows.tokens) + self.position_embeddings(rows.positions)
        embedded = embedded + self.token_type_embeddings(rows.segments)
        hidden = functional.dropout(self.norm(embedded), self.shape.dropout, self.training)
        attention, offsets_or_mask = (self.attention, rows.offsets) if rows.mask is None else ("table", rows.mask)
        for layer in self._run:
            hidden = layer(hidden, offsets_or_mask, rows.longest, attention)
        return hidden

    def first(self, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        # Return the hidden state (B, width) of the [CLS] tokens, without padding sequences.
        return hidden.index_select(0, rows.offsets[: rows.offsets.shape[0] - 1 - rows.padding])
