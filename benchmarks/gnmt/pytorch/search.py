"""The submissions' beam search with GNMT's rules."""

from __future__ import annotations

from typing import Any, List

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.gnmt.pytorch.model import GNMT, Decoding
from benchmarks.translation.pytorch import beam
from benchmarks.translation.pytorch.batches import SourceBatch


@torch.no_grad()
def decode(network: GNMT, words: int, batch: SourceBatch) -> List[List[int]]:
    """Translate a batch; ``words``: entries to choose from."""
    config = network.config
    with pytorch.autocast(batch.source.device, config.precision):
        state = Decoding(network, network.encode(batch.source, batch.source_lengths), config.beam_size)
        return search(config, words, batch, state, lambda tokens, position, state: state.step(tokens))


def search(config: Config, words: int, batch: SourceBatch, state: Any, step: beam.Step) -> List[List[int]]:
    """Translate a batch as submitted (seq2seq/inference/beam_search.py), whatever makes a ``step`` from a ``state``."""
    # A length counts BOS.
    rules = beam.Rules(
        normalize=beam.length_penalty(config.length_penalty, config.length_constant + 1),
        coverage=beam.coverage_penalty(config.coverage_penalty) if config.coverage_penalty else None,
        ended_stay=True,
        attention_stays=True,
        vocabulary=words,
    )
    return beam.search(step, state, batch, beam=config.beam_size, longest=config.max_length_test - 1, rules=rules)
