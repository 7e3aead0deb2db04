"""The submissions' beam search with the Transformer's rules."""

from __future__ import annotations

from typing import Any, List

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.data import limit
from benchmarks.transformer.pytorch.model import Network, State
from benchmarks.translation.pytorch.beam import Rules, Step, length_penalty, search


@torch.no_grad()
def translate_batch(network: Network, source: torch.Tensor, lengths: torch.Tensor, words: int) -> List[List[int]]:
    """Translate sentences, int64 (sentences, S) with ``lengths``, EOS included; ``words``: entries to choose from."""
    config = network.config
    trains = network.training
    network.eval()
    with pytorch.autocast(source.device, config.precision):
        state = State.of(network, source, config.beam)
        found = search_best(
            config, words, lengths, state, lambda tokens, position, state: (network.next(tokens, position, state), None)
        )
    network.train(trains)
    return found


def search_best(config: Config, words: int, lengths: torch.Tensor, state: Any, step: Step) -> List[List[int]]:
    """Translate sentences of ``lengths`` by the submissions' search, whatever makes a ``step`` from a ``state``."""
    return search(
        step,
        state,
        len(lengths),
        beam=config.beam,
        longest=[limit(config, int(length)) for length in lengths.tolist()],
        rules=Rules(length_penalty(config.length_penalty, config.length_constant), shortest=1, vocabulary=words),
        device=lengths.device,
    )
