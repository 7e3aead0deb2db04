"""The vocabulary of a data set: the one that is given, or one learnt from the words of its training text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Optional

from benchmarks.bert import stages
from benchmarks.bert.evaluation import Chosen
from benchmarks.common.data.progress import Progress
from benchmarks.language import VOCABULARY, learning, vocabulary, wordpiece

# Whose words are counted, spread over the text: more words would not fit into bounded memory, nor change much.
MOST_SHARDS = 32


def write_vocabulary(given: Optional[Path], size: int, chosen: Chosen, scratch: Path, progress: Progress) -> None:
    """Write the vocabulary; one that is there already is kept."""
    path = scratch / VOCABULARY
    if path.exists():
        return
    if given is not None:
        entries = list(vocabulary.read(given).entries)
    else:
        entries = learning.learn(
            _count(chosen, progress), size, lambda done: progress.update("learn", done, size, unit="entries")
        )
    partial = scratch / f"{VOCABULARY}.learnt"
    vocabulary.write(partial, entries)
    partial.replace(path)


def _count(chosen: Chosen, progress: Progress) -> "Counter[str]":
    stems = [stem for stem, _ in chosen.train][:: -(-len(chosen.train) // MOST_SHARDS)]
    found: Counter[str] = Counter()
    for number, stem in enumerate(stems):
        progress.update("count", number, len(stems), unit="shards")
        left_out = set(chosen.left_out.get(stem, ()))
        for place, document in enumerate(stages.read_shard(stem)):
            if place not in left_out:
                for sentence in document:
                    found.update(wordpiece.words(sentence))
    return found
