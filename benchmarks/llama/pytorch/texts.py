"""What a trained network makes of the begins of evaluation texts, for people to read: texts.jsonl.

Of a sample's begin each line has the ``text``, how it goes on there (``reference``), with the likeliest tokens
(``likeliest``) and with drawn ones (``drawn``).
"""

import json
from pathlib import Path
from typing import Any, List, Optional

import numpy as np
import torch

from benchmarks.common.data.files import in_one_step
from benchmarks.common.run import stopping
from benchmarks.common.run.ranks import Ranks
from benchmarks.llama import tokenization
from benchmarks.llama.pytorch.network import Network

FILE = "texts.jsonl"
TEXTS = 4
LENGTH = 96  # tokens of a text and of what follows, at most those of a sample
TEMPERATURE = 0.8  # of what is drawn: below 1 likely tokens are likelier


def continued(network: Network, begins: torch.Tensor, length: int, drawing: Optional[torch.Generator]) -> torch.Tensor:
    """Return texts (B, length) that begin with ``begins`` (B, L); ``drawing`` is the CPU's generator, None: likeliest.

    All ranks call this together, for the same texts: each computes with what it gathers, and holds no cache.
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
    """Let a network continue the first third of some evaluation ``samples``; rank 0 writes the file.

    Synthetic data have no tokenizer, and no text.
    """
    if not tokenizer.exists():
        return
    sample_tokens = torch.from_numpy(np.stack(samples)[:, :LENGTH].astype(np.int64)).to(ranks.context)
    length = sample_tokens.shape[1]
    prompt_length = max(1, length // 3)
    drawing = torch.Generator().manual_seed(seed)
    continuations = {
        "reference": sample_tokens,
        "likeliest": continued(network, sample_tokens[:, :prompt_length], length, None),
        "drawn": continued(network, sample_tokens[:, :prompt_length], length, drawing),
    }
    if ranks.rank:
        return
    read = tokenization.read(tokenizer)
    with in_one_step(output / FILE) as file:
        for number, text in enumerate(sample_tokens[:, :prompt_length].tolist()):
            ends = {
                name: read.decode(tokens[number, prompt_length:].tolist()) for name, tokens in continuations.items()
            }
            line: Any = {"text": read.decode(text), **ends}
            file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
