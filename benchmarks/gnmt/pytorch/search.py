"""The submissions' beam search with GNMT's rules."""

from __future__ import annotations

from typing import Any, List

from benchmarks.gnmt.pytorch.config import Config
from benchmarks.translation.pytorch import beam
from benchmarks.translation.pytorch.batches import SourceBatch


def search(config: Config, vocabulary: int, batch: SourceBatch, state: Any, step: beam.Step) -> List[List[int]]:
    """Translate a batch by the submissions' beam search, whatever makes a ``step`` from a ``state``."""
    return beam.search(
        step,
        state,
        len(batch.source),
        beam=config.beam_size,
        longest=config.max_length_test - 1,  # BOS counts as submitted
        rules=search_rules(config, vocabulary),
        device=batch.source.device,
    )


def search_rules(config: Config, vocabulary: int) -> beam.Rules:
    """Return how the submissions search (seq2seq/inference/beam_search.py); a length counts BOS."""
    return beam.Rules(
        normalize=beam.length_penalty(config.length_penalty, config.length_constant + 1),
        coverage=beam.coverage_penalty(config.coverage_penalty) if config.coverage_penalty else None,
        ended_stay=True,
        attention_stays=True,
        vocabulary=vocabulary,
    )
