"""Llama 2 70B with its adapters merged, for a server: the logits of the next tokens, with keys and values.

$ python -m benchmarks.llama2_70b_lora.pytorch.export --experiment RUN/experiment_0 --data DATA -o DIR

The adapters by themselves are in the run's folder already: experiment_0/adapter.
"""

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Mapping

import numpy as np
import torch

from benchmarks.common.export import export
from benchmarks.common.export.export import Subject
from benchmarks.common.export.torch import TOOLS
from benchmarks.llama.pytorch import adapters, serving
from benchmarks.llama.pytorch.network import Network
from benchmarks.llama.pytorch.state import joined
from benchmarks.llama2_70b_lora.dataset import DataSet, open_data
from benchmarks.llama2_70b_lora.pytorch.config import Config
from benchmarks.llama2_70b_lora.pytorch.model import rule_of, set_base


def evaluate(data: DataSet, logits: Callable[[np.ndarray], np.ndarray]) -> Dict[str, float]:
    losses = []
    for tokens, counts in zip(data.test.tokens, data.test.counts):
        outputs = logits(tokens[None].astype(np.int64))
        chances = torch.from_numpy(outputs[0, :-1]).double().log_softmax(-1)
        log_probs = chances.gather(-1, torch.from_numpy(tokens[1:, None].astype(np.int64)))[:, 0]
        losses.append(-float(log_probs[torch.from_numpy(counts[1:].copy())].mean()))
    return {"eval_loss": sum(losses) / len(losses)}


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Subject:
    data = open_data(folder)
    shape = config.shape(data.padded_vocabulary(config.vocabulary_multiple))
    with torch.device("meta"):
        network = Network(shape).requires_grad_(False)
    set_base(network, config, data.base(config.base) if config.base else None, torch.device("cpu"))
    network.load_state_dict(adapters.merged(network.state_dict(), joined(saved), rule_of(config).scale))
    facts = {"tokenizer": "tokenizer.json of the base", "sequence_length": config.sequence_length}
    return serving.subject(network, partial(evaluate, data), data.test.tokens[0], facts)


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
