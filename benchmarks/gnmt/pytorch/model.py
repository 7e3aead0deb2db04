"""GNMT v2 as in NVIDIA's submissions: LSTMs with normalized Bahdanau attention, and the loss.

Sources: gnmt/implementations/pytorch/seq2seq/models of mlcommons/training_results_v0.6 and v0.7, and differences in
v0.5 (``dropout_at``, ``initial_weights``). Internal layout is sequence first: (S, B, width).
"""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Tuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.frameworks import pytorch
from benchmarks.gnmt.pytorch import attention
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.translation.pytorch import beam
from benchmarks.translation.pytorch.batches import Batch, SourceBatch
from benchmarks.translation.pytorch.loss import RowLoss, row_loss, smoothed_loss
from benchmarks.translation.vocabulary import PAD


class Encoded(NamedTuple):
    context: torch.Tensor  # (B, S, width): output of the encoder
    keys: torch.Tensor  # (B, S, width): projected context
    padding: torch.Tensor  # bool (B, S): True at padding positions


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.vector = nn.Parameter(torch.empty(width).uniform_(-(width**-0.5), width**-0.5))
        self.scale = nn.Parameter(torch.full((1,), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(width))
        self.weigh: attention.Weights = attention.chunked

    def encoded(self, context: torch.Tensor, padding: torch.Tensor) -> Encoded:
        # Project ``context`` (B, S, width) once for all target positions.
        return Encoded(context, self.key(context) + self.bias, padding)

    def forward(self, queries: torch.Tensor, encoded: Encoded) -> Tuple[torch.Tensor, torch.Tensor]:
        # Return the context (B, T, width) for ``queries`` (B, T, width), and the weights (B, T, S).
        projected = self.query(queries)
        vector = self.scale * self.vector / self.vector.norm()
        keys = encoded.keys.to(projected.dtype)
        weights = self.weigh(projected, keys, vector.to(projected.dtype), encoded.padding)
        return torch.bmm(weights.to(encoded.context.dtype), encoded.context), weights


class Encoder(nn.Module):
    # A bidirectional LSTM layer and unidirectional layers, with residual connections from the third on.

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        # Two layers, not bidirectional=True: that needs the lengths on the CPU and packed sequences, as submitted.
        self.forwards, self.backwards = nn.LSTM(width, width), nn.LSTM(width, width)
        self.layers = nn.ModuleList(nn.LSTM(width * (2 if n == 0 else 1), width) for n in range(layers - 1))

    def forward(self, embedded: torch.Tensor, lengths: torch.Tensor, dropout: Dropout) -> torch.Tensor:
        # (S, B, width) from ``embedded`` (S, B, width). Outputs at padding positions are independent of the sentence.
        x = dropout.of_embedding(embedded)
        # Not len(x), which would be a constant in an export.
        positions = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
        is_inside = positions < lengths
        # Reverse the sentences; padding stays at the end.
        order = torch.where(is_inside, lengths - 1 - positions, positions)
        both = run(self.forwards, x), reverse(run(self.backwards, reverse(x, order)), order)
        mask = is_inside.unsqueeze(2)
        x = run(self.layers[0], dropout(torch.cat([direction * mask for direction in both], 2)))
        for layer in self.layers[1:]:
            x = x + run(layer, dropout(x))
        return x


def run(layer: nn.LSTM, x: torch.Tensor) -> torch.Tensor:
    # (T, B, width): the outputs of ``layer`` for ``x`` (T, B, inputs), from a state of zeros.
    if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        # oneDNN supports fp16 and bf16 LSTMs on few CPUs, and fails on other CPUs.
        with torch.autocast("cpu", enabled=False):
            return layer(x.float())[0]
    return layer(x)[0]


def reverse(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    # (S, B, width) with the positions of all sentences in ``order`` (S, B).
    return x.gather(0, order.unsqueeze(2).expand_as(x))


class Dropout(nn.Module):
    # Dropout where the configuration enables it: inputs as since v0.6, or outputs as in v0.5.

    def __init__(self, share: float, site: str) -> None:
        super().__init__()
        self.share, self.at_inputs = share, site == "inputs"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Drop values of ``x`` in training.
        return functional.dropout(x, self.share, self.training) if self.share else x

    def of_embedding(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) if self.at_inputs else x

    def joined(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        # Concatenate a layer's input and the context, with dropout of both or of the first.
        if self.at_inputs:
            return self(torch.cat((x, context), 2))
        return torch.cat((self(x), context), 2)


class Decoder(nn.Module):
    # LSTM layers. The output of the first layer is the attention query; the other layers also get the context.

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.LSTM(width, width)
        self.attention = Attention(width)
        self.layers = nn.ModuleList(nn.LSTM(2 * width, width) for _ in range(layers - 1))

    def forward(self, embedded: torch.Tensor, encoded: Encoded, dropout: Dropout) -> torch.Tensor:
        # (T, B, width) from ``embedded`` (T, B, width), all positions at once.
        x = run(self.first, dropout.of_embedding(embedded))
        context = self.attention(x.transpose(0, 1), encoded)[0].transpose(0, 1)
        x = run(self.layers[0], dropout.joined(x, context))
        for layer in self.layers[1:]:
            x = x + run(layer, dropout.joined(x, context))
        return x


class GNMT(nn.Module):
    # Encoder, decoder, one table of embeddings for both, and the classifier.

    def __init__(self, config: Config, vocabulary: int) -> None:
        # ``vocabulary``: entries, padding included.
        super().__init__()
        self.config = config
        self.row_loss: RowLoss = row_loss
        self.embedding = nn.Embedding(vocabulary, config.width, padding_idx=PAD)
        self.encoder = Encoder(config.width, config.layers)
        self.decoder = Decoder(config.width, config.layers)
        self.classifier = nn.Linear(config.width, vocabulary)
        self.dropout = Dropout(config.dropout, config.dropout_at)
        if config.initial_weights:
            self._draw(config.initial_weights)

    @torch.no_grad()
    def _draw(self, limit: float) -> None:
        # Uniform within +- ``limit``, except the attention's norm and bias; one of the two LSTM biases is 0.
        for name, parameter in self.named_parameters():
            if name.split(".")[-1].startswith("bias_hh"):
                parameter.zero_()
            elif name not in ("decoder.attention.scale", "decoder.attention.bias"):
                parameter.uniform_(-limit, limit)

    def encode(self, source: torch.Tensor, lengths: torch.Tensor) -> Encoded:
        # Encode ``source`` int64 (B, S) with ``lengths`` (B,).
        output = self.encoder(self.embedding(source.t()), lengths, self.dropout).transpose(0, 1)
        padding = torch.arange(source.shape[1], device=source.device) >= lengths.unsqueeze(1)
        return self.decoder.attention.encoded(output.contiguous(), padding)

    def forward(self, source: torch.Tensor, lengths: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # (B, T, width): inputs of the classifier for ``target`` int64 (B, T).
        decoded = self.decoder(self.embedding(target.t()), self.encode(source, lengths), self.dropout)
        return decoded.transpose(0, 1)

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        config, classifier = self.config, self.classifier
        with pytorch.autocast(batch.source.device, config.precision):
            hidden = self(batch.source, batch.source_lengths, batch.target_in)  # (B, T, width)
            return smoothed_loss(
                hidden.reshape(-1, config.width),
                classifier.weight,
                classifier.bias,
                batch.target_out.view(-1),
                config.label_smoothing,
                config.loss_chunk or None,
                batch.rows,
                self.row_loss,
            )


State = Tuple[torch.Tensor, torch.Tensor]  # decoder layer's hidden state and cell (B, K, width)
Cell = Callable[[nn.LSTM, torch.Tensor, torch.Tensor, torch.Tensor], State]  # one layer step from this state


def fused_cell(layer: nn.LSTM, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor) -> State:
    # PyTorch's LSTM cell, on the hypotheses of all sentences as one batch axis.
    parameters = (layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0)
    hidden_and_cell = torch.lstm_cell(x.flatten(0, 1), (hidden.flatten(0, 1), cell.flatten(0, 1)), *parameters)
    return hidden_and_cell[0].view_as(hidden), hidden_and_cell[1].view_as(cell)


class Decoding:
    # Decoder state that advances by one token, for K hypotheses of B sentences.

    def __init__(self, network: GNMT, encoded: Encoded, states: List[State], cell: Cell = fused_cell) -> None:
        # ``states``: per layer.
        self._network, self._encoded, self.states, self._cell = network, encoded, states, cell

    @classmethod
    def of(cls, network: GNMT, encoded: Encoded, beam: int) -> Decoding:
        # Start with zeros.
        zeros = encoded.context.new_zeros(len(encoded.context), beam, encoded.context.shape[2])
        return cls(network, encoded, [(zeros, zeros)] * (1 + len(network.decoder.layers)))

    def select(self, rows: torch.Tensor) -> None:
        # Select the hypotheses ``rows`` int64, K per remaining sentence, in this order.
        sentences, beam, width = self.states[0][0].shape
        self.states = [
            (hidden.flatten(0, 1)[rows].view(-1, beam, width), cell.flatten(0, 1)[rows].view(-1, beam, width))
            for hidden, cell in self.states
        ]
        if len(rows) < sentences * beam:
            self._encoded = Encoded(*(tensor[rows[::beam] // beam] for tensor in self._encoded))

    def step(self, tokens: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        # Log-probabilities (B, K, V) of the token after ``tokens`` int64 (B, K), and attention weights (B, K, S).
        decoder = self._network.decoder
        x = self._advance(0, decoder.first, self._network.embedding(tokens))
        # A sentence's hypotheses share the keys: the attention treats them as target positions.
        context, weights = decoder.attention(x, self._encoded)
        for number, layer in enumerate(decoder.layers, 1):
            above = self._advance(number, layer, torch.cat((x, context), 2))
            x = above if number == 1 else x + above
        logits = self._network.classifier(x)
        # In float32 at least: probabilities must not be rounded to fp16.
        wide = torch.promote_types(logits.dtype, torch.float32)
        return functional.log_softmax(logits, dim=2, dtype=wide), weights

    def _advance(self, number: int, layer: nn.LSTM, x: torch.Tensor) -> torch.Tensor:
        self.states[number] = self._cell(layer, x, *self.states[number])
        return self.states[number][0]


# -- translation -----------------------------------------------------------------------------------------------


@torch.no_grad()
def decode(network: GNMT, vocabulary_size: int, batch: SourceBatch) -> List[List[int]]:
    # Translate a batch; ``vocabulary_size``: entries to choose from.
    config = network.config
    with pytorch.autocast(batch.source.device, config.precision):
        state = Decoding.of(network, network.encode(batch.source, batch.source_lengths), config.beam_size)
        return search(config, vocabulary_size, batch, state, step)


def step(tokens: torch.Tensor, position: int, state: Decoding) -> Tuple[torch.Tensor, torch.Tensor]:
    # One row per hypothesis, as the search expects.
    log_probabilities, weights = state.step(tokens.view(-1, state.states[0][0].shape[1]))
    return log_probabilities.flatten(0, 1), weights.flatten(0, 1)


def search(config: Config, vocabulary_size: int, batch: SourceBatch, state: Any, step: beam.Step) -> List[List[int]]:
    # Translate a batch as submitted (seq2seq/inference/beam_search.py), whatever makes a ``step`` from a ``state``.
    # A length counts BOS.
    rules = beam.Rules(
        normalize=beam.length_penalty(config.length_penalty, config.length_constant + 1),
        coverage=beam.coverage_penalty(config.coverage_penalty) if config.coverage_penalty else None,
        ended_stay=True,
        vocabulary=vocabulary_size,
    )
    return beam.search(step, state, batch, beam=config.beam_size, longest=config.max_length_test - 1, rules=rules)
