"""Export BERT on SQuAD for a server: windows of question and context to start and end logits.

$ python -m benchmarks.bert_squad.pytorch.export --experiment RUN/experiment_0 --data DATA -o DIR
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Mapping, Tuple

import numpy as np
import torch

from benchmarks.bert_squad.arrays import DataSet, open_data
from benchmarks.bert_squad.pytorch.config import Config
from benchmarks.bert_squad.pytorch.data import Batch, evaluation_batches
from benchmarks.bert_squad.pytorch.evaluation import answer, quality
from benchmarks.bert_squad.pytorch.model import Network
from benchmarks.common.export import export
from benchmarks.common.export.export import Arrays, Infer, Subject, Value
from benchmarks.common.export.torch import ALONE, TOOLS, Served
from benchmarks.language.pytorch import serving

NOWHERE = -1e4  # logit of padding positions
INPUTS = (
    Value("tokens", "token ids of [CLS] question [SEP] context [SEP], padded with 0"),
    Value("segments", "1 for the context and the following [SEP], else 0"),
    Value("mask", "1 for tokens, 0 for padding"),
)
OUTPUTS = (Value("start", "logit of the answer's first token"), Value("end", "logit of the answer's last token"))


class Padded(Served):
    def forward(
        self, tokens: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        # Two (B, L) of three (B, L).
        logits = self.network(serving.packed(tokens, segments, mask)).view(*mask.shape, 2)
        first, last = logits.masked_fill(mask[:, :, None] == 0, NOWHERE).unbind(2)
        return first, last


def evaluate(config: Config, data: DataSet, infer: Infer) -> Dict[str, float]:
    # F1 and exact match over all questions.

    def logits(batch: Batch) -> torch.Tensor:
        tokens, segments, mask = serving.table(batch.rows, config.sequence_length)
        span_logits = np.stack(infer(tokens, segments, mask), axis=2)
        return torch.from_numpy(span_logits[mask == 1])

    run: Any = SimpleNamespace(ranks=ALONE, interrupted=False, interruptible=iter, total=lambda values, count: values)
    spans = answer(config, evaluation_batches(config, data.test, ALONE), data, logits, run)
    with tempfile.TemporaryDirectory() as folder:
        return quality(spans or [], data, ALONE, Path(folder))


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Subject:
    data = open_data(folder)
    network = Network(config, len(saved["network"]["encoder.word_embeddings.weight"]), "grouped")
    network.load_state_dict(saved["network"])
    network.eval()

    def original(tokens: np.ndarray, segments: np.ndarray, mask: np.ndarray) -> Arrays:
        with torch.no_grad():
            logits = network(serving.as_rows(tokens, segments, mask)).numpy()
        span_logits = np.full((*mask.shape, 2), NOWHERE, np.float32)
        span_logits[mask == 1] = logits
        return span_logits[:, :, 0], span_logits[:, :, 1]

    ones = np.ones((2, config.sequence_length), np.int64)
    return Subject(
        model=Padded(network).eval(),
        inputs=INPUTS,
        outputs=OUTPUTS,
        example=(ones, ones, ones),
        evaluate=lambda infer: evaluate(config, data, infer),
        preprocessing={
            **serving.TOKENS,
            "sequence_length": config.sequence_length,
            "longest_answer": config.longest_answer,
        },
        original=original,
    )


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
