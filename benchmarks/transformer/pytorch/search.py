"""The submissions' beam search with the Transformer's rules."""

from __future__ import annotations

from typing import Any, List

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.model import Network, State
from benchmarks.translation.pytorch import beam
from benchmarks.translation.pytorch.batches import SourceBatch


@torch.no_grad()
def decode(network: Network, words: int, batch: SourceBatch) -> List[List[int]]:
    """Translate a batch; ``words``: entries to choose from."""
    config = network.config
    with pytorch.autocast(batch.source.device, config.precision):
        state = State.of(network, batch.source, config.beam)
        return search(
            config, words, batch, state, lambda tokens, position, state: (network.next(tokens, position, state), None)
        )


def search(config: Config, words: int, batch: SourceBatch, state: Any, step: beam.Step) -> List[List[int]]:
    """Translate a batch as submitted, whatever makes a ``step`` from a ``state``."""
    normalize = beam.length_penalty(config.length_penalty, config.length_constant)
    # In tokens, EOS included on both sides.
    longest = [int(config.longest_factor * length) + config.longest_offset for length in batch.source_lengths.tolist()]
    rules = beam.Rules(normalize, shortest=1, vocabulary=words)
    return beam.search(step, state, batch, beam=config.beam, longest=longest, rules=rules)
