"""Sample continuations of evaluation texts by the trained network, for people to read: texts.jsonl.

Keys: ``text`` (prompt), ``reference`` (original continuation), ``likeliest`` (greedy), ``drawn`` (sampled).
"""

import json
from pathlib import Path
from typing import List, Optional

import numpy as np
import torch

from benchmarks.common.data.files import in_one_step
from benchmarks.common.run import stopping
from benchmarks.common.run.ranks import Ranks
from benchmarks.llama import tokenization
from benchmarks.llama.pytorch.network import Network

FILE = "texts.jsonl"
TEXTS = 4
LENGTH = 96  # tokens of prompt and continuation, limited by the sample length
TEMPERATURE = 0.8  # sampling temperature; below 1 favors likely tokens


def continued(network: Network, begins: torch.Tensor, length: int, drawing: Optional[torch.Generator]) -> torch.Tensor:
    """Continue prompts (B, L) to (B, length), greedily if ``drawing`` (a CPU generator) is None.

    A collective call with the same texts on all ranks: weights are gathered for each token, without a KV cache.
    """
    tokens = begins
    while tokens.shape[1] < length:
        logits = network(tokens)[:, -1].float()
        if drawing is None:
            next_ones = logits.argmax(-1, keepdim=True)
        else:
            chances = (logits / TEMPERATURE).softmax(-1).cpu()
            next_ones = torch.multinomial(chances, 1, generator=drawing).to(tokens.device)
        tokens = torch.cat((tokens, next_ones), 1)
        stopping.progress()
    return tokens


@torch.no_grad()
def write(network: Network, samples: List[np.ndarray], tokenizer: Path, ranks: Ranks, seed: int, output: Path) -> None:
    """Continue the first third of some evaluation ``samples`` with the network; rank 0 writes the file.

    Skipped for synthetic data, which lack a tokenizer.
    """
    if not tokenizer.exists():
        return
    sample_tokens = torch.from_numpy(np.stack(samples)[:, :LENGTH].astype(np.int64)).to(ranks.context)
    length = sample_tokens.shape[1]
    prompt_length = max(1, length // 3)
    # Compiled layers have static shapes, and would be compiled for each length.
    with torch.compiler.set_stance("force_eager"):
        continuations = {
            "reference": sample_tokens,
            "likeliest": continued(network, sample_tokens[:, :prompt_length], length, None),
            "drawn": continued(network, sample_tokens[:, :prompt_length], length, torch.Generator().manual_seed(seed)),
        }
    if ranks.rank:
        return
    read = tokenization.read(tokenizer)
    with in_one_step(output / FILE) as file:
        for number, text in enumerate(sample_tokens[:, :prompt_length].tolist()):
            ends = {
                name: read.decode(tokens[number, prompt_length:].tolist()) for name, tokens in continuations.items()
            }
            file.write((json.dumps({"text": read.decode(text), **ends}, ensure_ascii=False) + "\n").encode())
