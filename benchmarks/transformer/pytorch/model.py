"""The network with the loss: encoder, decoder, and the decoder's state for translation.

Tokens are (sentences, length) and hidden states (sentences, length, width), or (tokens, width) if packed: then only
attention uses padding. The embeddings of both languages and the output projection share one weight. The residual
stream has the type of ``precision``, as in NVIDIA's submissions with a complete fp16 model; weights are in fp32.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Iterator, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.frameworks import pytorch
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.packing import MAX_DENSITY, PackedAttention, Packing, padded
from benchmarks.translation.pytorch import beam
from benchmarks.translation.pytorch.batches import Batch, SourceBatch
from benchmarks.translation.pytorch.loss import RowLoss, row_loss, smoothed_loss
from benchmarks.translation.pytorch.operators import join, layer_norm
from benchmarks.translation.vocabulary import PAD

# First position of the sinusoids: after fairseq's padding index (modules/sinusoidal_positional_embedding.py).
FIRST_POSITION = 2
GROWTH = 32  # positions that a full cache grows by

# Booleans that broadcast to (sentences, heads, queries, keys): which keys are there; None: all.
Mask = Optional[torch.Tensor]
Keys = Union[Mask, Packing]  # mask of the keys, or their packing


def sinusoids(length: int, width: int, first: int = FIRST_POSITION) -> torch.Tensor:
    # (length, width): sines, then cosines, of wavelengths from 2 pi to 10,000 * 2 pi, as in tensor2tensor.
    half = width // 2
    rates = torch.exp(torch.arange(half) * (-math.log(10000) / max(1, half - 1)))
    angles = torch.arange(first, first + length).unsqueeze(1) * rates
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask, dropout: float, causal: bool
) -> torch.Tensor:
    """Scaled dot-product attention (arXiv 1706.03762, equation 1) with separate operators.

    Undefined for queries without keys, which do not occur: all sentences have an EOS.
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return functional.dropout(weights, dropout) @ value if dropout else weights @ value


class Attention(nn.Module):
    # Multi-head attention on projected queries, keys and values; projections of the same input are one GEMM.

    def __init__(self, config: Config, cross_attention: bool) -> None:
        # ``cross_attention``: queries come from the decoder, keys and values from the encoder.
        super().__init__()
        width, bias = config.width, config.attention_bias
        self.heads, self.dropout = config.heads, config.attention_dropout
        is_plain = config.attention == "plain"
        self.attend: Any = plain_attention if is_plain else functional.scaled_dot_product_attention
        self.attend_packed: PackedAttention = partial(padded, self.attend)
        if cross_attention:
            self.query, self.memory = linear(width, 1, bias, width), linear(width, 2, bias, width)
        else:
            self.joint = linear(width, 3, bias, width)
        self.output = linear(width, 1, bias, width)

    def split(self, projected: torch.Tensor, count: int) -> Tuple[torch.Tensor, ...]:
        # (sentences, length, count * width) as ``count`` tensors (sentences, heads, length, width / heads), or packed
        # (tokens, count * width) as (tokens, heads, width / heads).
        heads = projected.unflatten(-1, (count, self.heads, -1)).unbind(-3)
        return heads if projected.dim() == 2 else tuple(tensor.transpose(1, 2) for tensor in heads)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: Keys = None,
        causal: bool = False,
        packing: Optional[Packing] = None,
    ) -> torch.Tensor:
        # (sentences, length, width) from the outputs of ``split``; (tokens, width) with the queries' ``packing``.
        dropout = self.dropout if self.training else 0.0
        if packing is None:
            attn_out = self.attend(query, key, value, keys, dropout, causal).transpose(1, 2)
        else:
            attn_out = self.attend_packed(query, key, value, packing, keys, dropout, causal)
        return self.output(attn_out.flatten(-2))


def linear(width: int, parts: int, bias: bool, part_width: int) -> nn.Linear:
    # ``parts`` matrices (part_width, width) in one layer, initialized separately (Xavier uniform; biases 0).
    layer = nn.Linear(width, parts * part_width, bias=bias)
    bound = math.sqrt(6 / (width + part_width))
    nn.init.uniform_(layer.weight, -bound, bound)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class Norm(nn.LayerNorm):
    # Layer norm that preserves the input's type, with statistics in fp32.

    compute: Any = staticmethod(layer_norm)  # the implementations that a run has chosen
    compute_add_norm: Any = staticmethod(join)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        # (..., width).
        weight, bias = self.weight.to(values.dtype), self.bias.to(values.dtype)
        with torch.autocast(values.device.type, enabled=False):
            return self.compute(values, self.normalized_shape, weight, bias, self.eps)

    def add_norm(
        self, residual: torch.Tensor, update: torch.Tensor, dropout: float
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        # ``residual`` plus dropout(``update``) (..., width), and its norm.
        weight, bias = self.weight.to(residual.dtype), self.bias.to(residual.dtype)
        with torch.autocast(residual.device.type, enabled=False):
            return self.compute_add_norm(residual, update, weight, bias, self.eps, dropout)


class Stream(NamedTuple):
    values: torch.Tensor  # the residual stream (..., width)
    block_input: (
        torch.Tensor
    )  # input of the next block: the norm of ``values`` with pre-norm, ``values`` with post-norm


class Layer(nn.Module):
    # Self-attention, in the decoder attention to the encoder, and feed-forward: residual blocks with norms.

    def __init__(self, config: Config, decodes: bool) -> None:
        super().__init__()
        self.pre_norm, self.dropout, self.relu_dropout = config.norm == "pre", config.dropout, config.relu_dropout
        self.self_attention = Attention(config, cross_attention=False)
        self.cross_attention: Any = Attention(config, cross_attention=True) if decodes else None
        self.fc1 = linear(config.width, 1, True, config.inner_width)
        self.fc2 = linear(config.inner_width, 1, True, config.width)
        self.norms = nn.ModuleList(Norm(config.width) for _ in range(3 if decodes else 2))

    def norm_input(self, block: int, values: torch.Tensor) -> torch.Tensor:
        return self.norms[block](values) if self.pre_norm else values

    def add_and_norm(
        self, block: int, residual: torch.Tensor, update: torch.Tensor, after: Optional[Norm] = None
    ) -> Stream:
        """Return the residual stream after a block, and the input of the next block.

        Both are one fused operation, so a layer's last block needs the norm that comes ``after`` it.
        """
        norm = self.norms[block] if not self.pre_norm else after if after is not None else self.norms[block + 1]
        summed, normed = norm.add_norm(residual, update, self.dropout if self.training else 0.0)
        return Stream(summed if self.pre_norm else normed, normed)

    def feed_forward(self, stream: Stream, after: Optional[Norm]) -> Stream:
        hidden = functional.dropout(torch.relu(self.fc1(stream.block_input)), self.relu_dropout, self.training)
        return self.add_and_norm(len(self.norms) - 1, stream.values, self.fc2(hidden), after)

    def encode(self, stream: Stream, keys: Keys, after: Optional[Norm], packing: Optional[Packing] = None) -> Stream:
        heads = self.self_attention.split(self.self_attention.joint(stream.block_input), 3)
        return self.feed_forward(
            self.add_and_norm(0, stream.values, self.self_attention(*heads, keys, packing=packing)), after
        )

    def decode(
        self,
        stream: Stream,
        memory: Tuple[torch.Tensor, ...],
        keys: Keys,
        after: Optional[Norm],
        cache: Optional[Cache] = None,
        packing: Optional[Packing] = None,
    ) -> Stream:
        # A decoder layer, on complete sentences, or on the next position with a ``cache``.
        query, key, value = self.self_attention.split(self.self_attention.joint(stream.block_input), 3)
        if cache is None:
            attn_out = self.self_attention(query, key, value, packing, causal=True, packing=packing)
        else:
            # All hypotheses have the same length: no mask is needed.
            attn_out = self.self_attention(query, *cache.append(key, value))
        stream = self.add_and_norm(0, stream.values, attn_out)
        return self.feed_forward(
            self.add_and_norm(1, stream.values, self.attend_source(stream.block_input, memory, keys, packing)), after
        )

    def attend_source(
        self,
        values: torch.Tensor,
        memory: Tuple[torch.Tensor, ...],
        keys: Keys,
        packing: Optional[Packing] = None,
    ) -> torch.Tensor:
        # Cross-attention from all rows in a sentence to keys and values (sentences, heads, source, width / heads).
        attention = self.cross_attention
        rows = values if packing else values.reshape(memory[0].shape[0], -1, values.shape[-1])
        (query,) = attention.split(attention.query(rows), 1)
        return attention(query, *memory, keys, packing=packing).reshape(values.shape)


# Keys and values (sentences, heads, S, width / heads) of the source per decoder layer, or packed (tokens, heads,
# width / heads).
Memories = List[Tuple[torch.Tensor, ...]]


class Cache(NamedTuple):
    # One layer's KV cache: (2, rows, heads, positions, width / heads), partially filled.

    kv: torch.Tensor
    position: int

    def append(self, key: torch.Tensor, value: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        # Append the keys and values of the current position (rows, heads, 1, width / heads); return all so far.
        self.kv[0, :, :, self.position] = key[:, :, 0]
        self.kv[1, :, :, self.position] = value[:, :, 0]
        return self.kv[:, :, :, : self.position + 1].unbind(0)


class Network(nn.Module):
    def __init__(self, config: Config, vocabulary: int) -> None:
        # ``vocabulary``: entries, padding included.
        super().__init__()
        self.config = config
        self.row_loss: RowLoss = row_loss
        self.max_density = MAX_DENSITY
        self.scale = math.sqrt(config.width)
        self.dtype = pytorch.DTYPES[config.precision]
        self.table = nn.Embedding(vocabulary, config.width, padding_idx=PAD)
        nn.init.normal_(self.table.weight, std=config.width**-0.5)
        nn.init.zeros_(self.table.weight[PAD])
        self.positions: torch.Tensor
        trained = sinusoids(config.max_length + config.length_multiple, config.width)
        self.register_buffer("positions", trained, persistent=False)
        self.encoder = nn.ModuleList(Layer(config, decodes=False) for _ in range(config.layers))
        self.decoder = nn.ModuleList(Layer(config, decodes=True) for _ in range(config.layers))
        ends = [Norm(config.width) if config.norm == "pre" else nn.Identity() for _ in range(2)]
        self.encoder_norm, self.decoder_norm = ends

    def embed(self, tokens: torch.Tensor, first: int = 0, packing: Optional[Packing] = None) -> torch.Tensor:
        # Embeddings of int64 (rows, length) with positions counted from ``first``; packed if ``packing`` is given.
        if packing:
            return self.embed_at(tokens.flatten()[packing.indices], self.positions[packing.indices % packing.length])
        end = first + tokens.shape[1]
        if end > len(self.positions):
            # Translations may be longer than the training data; the training lengths are unknown before the clock
            # starts.
            self.positions = sinusoids(2 * end, self.config.width).to(self.positions)
        return self.embed_at(tokens, self.positions[first:end])

    def embed_at(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # Embeddings of int64 (rows, length) at ``positions``, sinusoids (length, width).
        values = self.table(tokens) * self.scale + positions
        return functional.dropout(values.to(self.dtype), self.config.dropout, self.training)

    def encode(self, source: torch.Tensor, mask: Mask) -> torch.Tensor:
        # (sentences, S, width) of int64 (sentences, S).
        return self.encode_embeddings(self.embed(source), mask)

    def encode_embeddings(self, values: torch.Tensor, keys: Keys, packing: Optional[Packing] = None) -> torch.Tensor:
        # (sentences, S, width) of embeddings of the same shape, or packed as these are.
        stream = self.norm_input(self.encoder, values)
        for layer, after in self.layers_with_norms(self.encoder, self.encoder_norm):
            stream = layer.encode(stream, keys, after, packing)
        return stream.block_input

    @staticmethod
    def norm_input(layers: Any, values: torch.Tensor) -> Stream:
        # Input for a layer stack.
        return Stream(values, layers[0].norm_input(0, values))

    @staticmethod
    def layers_with_norms(layers: Any, end: Any) -> Iterator[Tuple[Any, Any]]:
        # All layers with the norm that follows with pre-norm: the first norm of the next layer, or ``end``.
        return zip(layers, (*(layer.norms[0] for layer in layers[1:]), end))

    def memories(self, encoded: torch.Tensor) -> Memories:
        # Keys and values of the source per decoder layer.
        return [layer.cross_attention.split(layer.cross_attention.memory(encoded), 2) for layer in self.decoder]

    def forward(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        padded: bool = True,
        rows: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
    ) -> torch.Tensor:
        """Hidden states (sentences, T, width) before the output projection, for source (sentences, S) and target_in.

        Args:
            source: int64 (sentences, S).
            target: int64 (sentences, T).
            padded: whether the source has any PAD; without it attention needs no mask.
            rows: indices of the tokens of source and target, int64 (tokens,): only these are computed, and the result
                is (tokens of the target, width).
        """
        source_packing, target_packing = map(Packing.of, (source, target), rows) if rows else (None, None)
        keys = source_packing or (mask_of(source) if padded else None)
        encoded = self.encode_embeddings(self.embed(source, packing=source_packing), keys, source_packing)
        memories = self.memories(encoded)
        stream = self.norm_input(self.decoder, self.embed(target, packing=target_packing))
        for (layer, after), memory in zip(self.layers_with_norms(self.decoder, self.decoder_norm), memories):
            stream = layer.decode(stream, memory, keys, after, packing=target_packing)
        return stream.block_input

    def set_packed_attention(self, attend: PackedAttention) -> None:
        # Use an implementation that needs no padding, so that packing always saves time.
        self.max_density = 1.0
        for module in self.modules():
            if isinstance(module, Attention):
                module.attend_packed = attend

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        config = self.config
        rows = batch.source_rows, batch.rows
        filled = sum(map(len, rows)) / (batch.source.numel() + batch.target_in.numel())
        packed = rows if config.packed and filled <= self.max_density else None
        with pytorch.autocast(batch.source.device, config.precision):
            hidden = self(batch.source, batch.target_in, rows=packed).view(-1, config.width)
            targets = batch.target_out.flatten()
            smoothing, chunk = config.label_smoothing, config.loss_chunk or None
            return smoothed_loss(hidden, self.table.weight, None, targets, smoothing, chunk, batch.rows, self.row_loss)

    def next(self, tokens: torch.Tensor, position: int, state: State) -> torch.Tensor:
        # Log-probabilities (rows, vocabulary) after ``tokens``, int64 (rows,), at ``position``.
        stream = self.norm_input(self.decoder, self.embed(tokens.unsqueeze(1), position))
        layers = self.layers_with_norms(self.decoder, self.decoder_norm)
        for number, ((layer, after), memory) in enumerate(zip(layers, state.memories)):
            stream = layer.decode(stream, memory, state.mask, after, state.cache(number, position))
        return self.log_probabilities(stream.block_input.squeeze(1))

    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        # (..., vocabulary) of the decoder's last hidden states (..., width), normalized.
        return functional.log_softmax(functional.linear(hidden, self.table.weight).float(), dim=-1)


def mask_of(source: torch.Tensor) -> torch.Tensor:
    # (sentences, 1, 1, S): True for tokens of the source, False for padding.
    return (source != PAD)[:, None, None, :]


class State:
    """Beam search decoder state, with ``beam`` consecutive rows per sentence.

    Keys and values of the source are stored once per sentence: the sentence's rows are queries in the same GEMM.
    """

    def __init__(self, beam: int, mask: torch.Tensor, memories: Memories, past: torch.Tensor) -> None:
        # Continue from ``past``: (layers, 2, beam * sentences, heads, positions, width / heads).
        self.beam, self.mask, self.memories, self.kv = beam, mask, memories, past

    @classmethod
    def of(cls, network: Network, source: torch.Tensor, beam: int) -> State:
        # Encode ``source``, int64 (sentences, S).
        config, mask = network.config, mask_of(source)
        memories = network.memories(network.encode(source, mask))
        depth, rows, head = len(network.decoder), len(source) * beam, config.width // config.heads
        return cls(beam, mask, memories, memories[0][0].new_empty(depth, 2, rows, config.heads, 0, head))

    def cache(self, layer: int, position: int) -> Cache:
        # Return one layer's cache, with capacity for ``position``.
        if position >= self.kv.shape[-2]:
            grown = self.kv.new_empty(*self.kv.shape[:-2], position + GROWTH, self.kv.shape[-1])
            grown[..., : self.kv.shape[-2], :] = self.kv
            self.kv = grown
        return Cache(self.kv[layer], position)

    def select(self, rows: torch.Tensor) -> None:
        # Select ``rows``: drops finished sentences and reorders the hypotheses.
        self.kv = self.kv.index_select(2, rows)
        sentences = rows[:: self.beam] // self.beam
        if len(sentences) < len(self.mask):
            self.mask = self.mask.index_select(0, sentences)
            self.memories = [tuple(tensor.index_select(0, sentences) for tensor in memory) for memory in self.memories]


# -- translation -----------------------------------------------------------------------------------------------


@torch.no_grad()
def decode(network: Network, vocabulary_size: int, batch: SourceBatch) -> List[List[int]]:
    # Translate a batch; ``vocabulary_size``: entries to choose from.
    config = network.config
    with pytorch.autocast(batch.source.device, config.precision):
        state = State.of(network, batch.source, config.beam)
        return search(
            config,
            vocabulary_size,
            batch,
            state,
            lambda tokens, position, state: (network.next(tokens, position, state), None),
        )


def search(config: Config, vocabulary_size: int, batch: SourceBatch, state: Any, step: beam.Step) -> List[List[int]]:
    # Translate a batch as submitted, whatever makes a ``step`` from a ``state``.
    normalize = beam.length_penalty(config.length_penalty, config.length_constant)
    # In tokens, EOS included on both sides.
    longest = [int(config.longest_factor * length) + config.longest_offset for length in batch.source_lengths.tolist()]
    rules = beam.Rules(normalize, shortest=1, vocabulary=vocabulary_size)
    return beam.search(step, state, batch, beam=config.beam, longest=longest, rules=rules)
