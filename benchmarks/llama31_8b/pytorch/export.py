"""Llama 3.1 8B for a server: the logits of the next token behind each of some, with keys and values of those before.

$ python -m benchmarks.llama31_8b.pytorch.export --experiment RUN/experiment_0 --data DATA -o DIR
"""

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Mapping

import numpy as np
import torch

from benchmarks.common.export import export
from benchmarks.common.export.export import Subject
from benchmarks.common.export.torch import TOOLS
from benchmarks.llama import order
from benchmarks.llama.pytorch import serving
from benchmarks.llama.pytorch.network import Network
from benchmarks.llama.pytorch.state import joined
from benchmarks.llama31_8b.dataset import DataSet, open_data
from benchmarks.llama31_8b.pytorch.config import Config


def evaluate(config: Any, data: DataSet, logits: Callable[[np.ndarray], np.ndarray]) -> Dict[str, float]:
    samples = order.in_order(data.test.lengths, config.sequence_length, config.eval_samples)
    loss, size = 0.0, config.eval_batch_size
    for start in range(0, len(samples), size):
        numbers = range(start, min(start + size, len(samples)))
        tokens = np.stack([samples.tokens(data.test, number) for number in numbers])
        outputs = torch.from_numpy(logits(np.ascontiguousarray(tokens[:, :-1])))
        chances = outputs.double().log_softmax(-1)
        loss -= float(chances.gather(-1, torch.from_numpy(tokens[:, 1:, None])).sum())
    return {"log_perplexity": loss / (len(samples) * config.sequence_length)}


def prepare(config: Any, saved: Mapping[str, Any], folder: Path) -> Subject:
    data = open_data(folder)
    network = Network(config.shape(data.padded_vocabulary(config.vocabulary_multiple)))
    parts = [saved[f"rank_{rank}"]["parts"] for rank in range(sum(key.startswith("rank_") for key in saved))]
    network.load_state_dict(joined(parts))
    facts = {"tokenizer": "tokenizer.json of the data set", "sequence_length": config.sequence_length}
    return serving.subject(network, partial(evaluate, config, data), data.test.read(0, 0, serving.FROM), facts)


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
