"""Export BERT for a server: masked tokens, and the next-sentence prediction.

$ python -m benchmarks.bert.pytorch.export --experiment RUN/experiment_0 --data DATA -o DIR
"""

from pathlib import Path
from typing import Any, Dict, Mapping, Tuple

import numpy as np
import torch

from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import MicroBatch, evaluation_input
from benchmarks.bert.pytorch.model import Network
from benchmarks.common.export import export
from benchmarks.common.export.export import Arrays, Infer, Subject, Value
from benchmarks.common.export.torch import ALONE, TOOLS, Served
from benchmarks.language.arrays import DataSet, open_data
from benchmarks.language.pytorch import serving
from benchmarks.language.pytorch.encoder import shape_of

INPUTS = (
    Value("tokens", "token ids of [CLS] a [SEP] b [SEP], padded with 0"),
    Value("segments", "1 for b and the following [SEP], else 0"),
    Value("mask", "1 for tokens, 0 for padding"),
    Value("masked", "positions of the tokens to predict; any position as padding"),
)
OUTPUTS = (
    Value("words", "logits over the vocabulary at each position"),
    Value("next", "logits: b follows a, b is a random text"),
)


class Padded(Served):
    def forward(
        self, tokens: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor, masked: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        # (B, P, vocabulary) and (B, 2) from three (B, L) and positions (B, P).
        rows = serving.packed(tokens, segments, mask)
        mlm_logits, follows = self.network(rows, (masked + rows.offsets[:-1, None]).flatten())
        return mlm_logits.view(*masked.shape, -1), follows


def published_tensors(part: MicroBatch, width: int) -> Tuple[np.ndarray, np.ndarray]:
    # Return the masked positions of the samples, and a mask for padding positions, both (B, width).
    offsets = part.rows.offsets.numpy()
    flat = part.masked.numpy()
    owners = np.searchsorted(offsets, flat, side="right") - 1
    counts = np.bincount(owners, minlength=len(offsets) - 1)
    there = np.arange(width) < counts[:, None]
    positions = np.zeros(there.shape, np.int64)
    positions[there] = flat - offsets[owners]
    return positions, there


def evaluate(config: Config, data: DataSet, infer: Infer) -> Dict[str, float]:
    right = 0
    for part in evaluation_input(config, data.test, ALONE):
        if part is not None:
            positions, there = published_tensors(part, data.max_predictions)
            mlm_logits, _ = infer(*serving.table(part.rows, data.sequence_length), positions)
            right += int((mlm_logits.argmax(2)[there] == part.labels.numpy()).sum())
    return {"masked_accuracy": right / len(data.test.masked_labels)}


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Subject:
    data = open_data(folder)
    network = Network(shape_of(config, len(saved["network"]["encoder.word_embeddings.weight"])), "grouped")
    network.load_state_dict(saved["network"])
    network.eval()

    def original(tokens: np.ndarray, segments: np.ndarray, mask: np.ndarray, masked: np.ndarray) -> Arrays:
        rows = serving.as_rows(tokens, segments, mask)
        flat = torch.from_numpy(masked) + rows.offsets[:-1, None]
        with torch.no_grad():
            mlm_logits, follows = network(rows, flat.reshape(-1))
        return mlm_logits.reshape(*masked.shape, -1).numpy(), follows.numpy()

    ones = np.ones((2, data.sequence_length), np.int64)
    return Subject(
        model=Padded(network).eval(),
        inputs=INPUTS,
        outputs=OUTPUTS,
        example=(ones, ones, ones, np.zeros((2, data.max_predictions), np.int64)),
        evaluate=lambda infer: evaluate(config, data, infer),
        preprocessing={
            **serving.TOKENS,
            "sequence_length": data.sequence_length,
            "max_predictions": data.max_predictions,
        },
        original=original,
    )


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
