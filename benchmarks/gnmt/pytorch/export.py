"""Export GNMT for a server: the encoder, and a decoder step, which a client's search calls for every token.

$ python -m benchmarks.gnmt.pytorch.export --experiment RUN/experiment_0 --data DATA -o DIR
"""

from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.export import export
from benchmarks.common.export.export import Arrays, Infer, Parts, Subject, Value
from benchmarks.common.export.torch import ALONE, TOOLS, Served, as_tensors, inferring
from benchmarks.gnmt.pytorch import attention
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.gnmt.pytorch.data import evaluation_input
from benchmarks.gnmt.pytorch.model import GNMT, Decoding, Encoded, State, search
from benchmarks.translation.arrays import DataSet, open_data
from benchmarks.translation.bleu import sacrebleu_score
from benchmarks.translation.pytorch import serving
from benchmarks.translation.pytorch.batches import SourceBatch
from benchmarks.translation.pytorch.evaluation import of_text
from benchmarks.translation.vocabulary import PAD

ENCODED = (
    Value("context", "encoder output at each source position"),
    Value("keys", "attention keys at each source position"),
)
STATE = (
    Value("hidden", "hidden state of each layer, initially 0"),
    Value("cell", "cell state of each layer, initially 0"),
)
STEP = (
    serving.LOG_PROBABILITIES,
    Value("attention", "attention weight of each source position, for the coverage penalty"),
    Value("next_hidden", "hidden state after this token"),
    Value("next_cell", "cell state after this token"),
)


class Encoder(Served):
    def forward(self, source: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        # Context and keys (B, S, width) of int64 (B, S).
        context, keys, _ = self.network.encode(source, (source != PAD).sum(1))
        return context, keys


class Step(Served):
    def forward(
        self,
        tokens: torch.Tensor,
        source: torch.Tensor,
        context: torch.Tensor,
        keys: torch.Tensor,
        hidden: torch.Tensor,
        cell: torch.Tensor,
    ) -> Tuple[torch.Tensor, ...]:
        """Log-probabilities (B, K, V), attention (B, K, S) and the next two (B, K, layers, width) of K hypotheses.

        Args:
            tokens: int64 (B, K).
            source: int64 (B, S).
            context: (B, S, width).
            keys: (B, S, width).
            hidden: (B, K, layers, width).
            cell: (B, K, layers, width).
        """
        states = list(zip(hidden.unbind(2), cell.unbind(2)))
        state = Decoding(self.network, Encoded(context, keys, source == PAD), states, cell_of_both_axes)
        return (*state.step(tokens), *(torch.stack(tensors, 2) for tensors in zip(*state.states)))


def cell_of_both_axes(layer: nn.LSTM, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor) -> State:
    """Return hidden state and cell (B, K, width) after ``x`` (B, K, inputs).

    PyTorch's cell flattens both axes. A shape computed from two others would be checked in every request, and K = 1
    would be specialized.
    """
    inputs = functional.linear(x, layer.weight_ih_l0, layer.bias_ih_l0)
    enter, keep, new, show = (inputs + functional.linear(hidden, layer.weight_hh_l0, layer.bias_hh_l0)).chunk(4, 2)
    cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(show) * torch.tanh(cell), cell


def training_step(network: GNMT) -> Infer:
    # Return the training code's way to the outputs of `Step`.

    def infer(*inputs: np.ndarray) -> Arrays:
        tokens, source, context, keys, *states = as_tensors(inputs)
        layers = list(zip(*(tensors.unbind(2) for tensors in states)))
        state = Decoding(network, Encoded(context, keys, source == PAD), layers)
        with torch.no_grad():
            outputs = state.step(tokens)
        return tuple(
            tensors.numpy() for tensors in (*outputs, *(torch.stack(tensors, 2) for tensors in zip(*state.states)))
        )

    return infer


def evaluate(config: Config, data: DataSet, infer: Mapping[str, Infer]) -> Dict[str, float]:
    def ask(tokens: torch.Tensor, position: int, state: serving.Hypotheses) -> Tuple[torch.Tensor, torch.Tensor]:
        log_probabilities, weights, *changing = state.ask(tokens)
        state.changing = tuple(changing)
        return serving.rows_of(log_probabilities), serving.rows_of(weights)

    def decode(batch: SourceBatch) -> List[List[int]]:
        source = batch.source.numpy()
        zeros = np.zeros((len(source), config.beam_size, config.layers, config.width), np.float32)
        state = serving.Hypotheses(
            infer["decoder"], config.beam_size, (source, *infer["encoder"](source)), (zeros, zeros)
        )
        return search(config, data.vocabulary.size, batch, state, ask)

    return serving.evaluate(evaluation_input(config, data, ALONE), data, decode, of_text(sacrebleu_score))


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Parts:
    data = open_data(folder)
    network = GNMT(config, data.vocabulary.padded(config.vocabulary_multiple)).eval()
    network.load_state_dict(saved["network"])
    encoder = serving.without(network, "classifier", "decoder.first", "decoder.layers")
    decoder = serving.without(network, "encoder")
    # Chunked attention is a loop: the length would be a constant in the export.
    decoder.decoder.attention.weigh = attention.plain
    encoding = Subject(
        model=Encoder(encoder).eval(),
        inputs=(serving.SOURCE,),
        outputs=ENCODED,
        example=(np.ones((2, 5), np.int64),),
        any_size={value.name: (1,) for value in (serving.SOURCE, *ENCODED)},
        preprocessing=serving.preprocessing(data, source_bos=True),
        original=inferring(Encoder(network)),
    )
    encoded = np.zeros((2, 5, config.width), np.float32)
    state = np.zeros((2, 3, config.layers, config.width), np.float32)
    inputs = (serving.TOKENS, serving.SOURCE, *ENCODED, *STATE)
    decoding = Subject(
        model=Step(decoder).eval(),
        inputs=inputs,
        outputs=STEP,
        example=(np.ones((2, 3), np.int64), np.ones((2, 5), np.int64), encoded, encoded, state, state),
        any_size={**{value.name: (1,) for value in (*inputs, *STEP)}, "attention": (1, 2)},
        preprocessing={
            "beam": config.beam_size,
            "longest": config.max_length_test - 1,
            "length_penalty": config.length_penalty,
            "length_constant": config.length_constant,
            "coverage_penalty": config.coverage_penalty,
            "score": "sum of log_probabilities / ((length_constant + 1 + tokens) / 6) ** length_penalty"
            " + coverage_penalty * sum over the source of log(min(1, sum of attention))",
            "ended": "a hypothesis keeps its place in the beam; the search ends when all have",
        },
        original=training_step(network),
        shown=serving.SHOWN_STEP,
    )
    return Parts({"encoder": encoding, "decoder": decoding}, lambda infer: evaluate(config, data, infer))


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
