"""Masked sequences and the vocabulary, for benchmarks/common/data/sample_checks.py."""

from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Tuple

import numpy as np

from benchmarks.common.data import sample_checks
from benchmarks.language.arrays import Samples, open_data
from benchmarks.language.vocabulary import Vocabulary
from benchmarks.language.wordpiece import Tokenizer

LEAST_MASKED = 0.5  # minimum fraction of [MASK] at the masked positions; 0.8 in BERT
MOST_UNKNOWN = 0.1
RETOKENIZED = 100  # sequences to tokenize again
LEAST_SAME = 0.8  # minimum fraction with the same tokens


def _original(samples: Samples, index: int) -> np.ndarray:
    # The tokens before masking. Unchanged if the masks belong to a different sample; another check reports that.
    fits = int(samples.masked(index)[0].max(initial=0)) < len(samples[index])
    return samples.original(index) if fits else np.asarray(samples[index])


def words(name: str, tokens: List[np.ndarray], vocabulary: Vocabulary) -> Iterator[Tuple[str, str]]:
    """Yield evidence that sequences were not tokenized with the vocabulary."""
    all_ids = np.concatenate(tokens)
    if int(all_ids.max()) >= vocabulary.size:
        yield f"{name}: tokens up to {int(all_ids.max()):,}", f"{vocabulary.size:,} entries of the vocabulary"
        return
    unknown = float((all_ids == vocabulary.unk).mean())
    if unknown > MOST_UNKNOWN:
        yield f"{name}: {unknown:.0%} of the tokens are unknown", "the vocabulary that made them"
    tokenizer = Tokenizer(vocabulary)
    right: Dict[int, bool] = {}
    continues = {index for index, entry in enumerate(vocabulary.entries) if entry.startswith("##")}
    for number, ids_of_text in enumerate(tokens[:: max(1, len(tokens) // RETOKENIZED)]):
        for ids in np.split(ids_of_text, np.flatnonzero(np.isin(ids_of_text, (vocabulary.cls, vocabulary.sep)))):
            # Truncated text may start within a word: skip to the next word.
            start = next((index for index, id in enumerate(ids) if index and id not in continues), len(ids))
            if vocabulary.unk not in ids and start < len(ids):
                again = tokenizer.encode(vocabulary.text(ids[start:])).ids == ids[start:].tolist()
                right[number] = right.get(number, True) and again
    problem = f"sequences of {name} are other tokens when their text is tokenized again"
    yield from sample_checks.agreement(right, problem, "tokens by the vocabulary of the data set", LEAST_SAME)


def view(directory: Path, manifest: Mapping[str, Any]) -> sample_checks.View:
    data = open_data(directory)
    parts = {"train": data.train, "test": data.test}

    def checks() -> Iterator[Tuple[str, str]]:
        for name, samples in parts.items():
            sample_indices = sample_checks.spread(len(samples), 2000).tolist()
            originals = [_original(samples, index) for index in sample_indices if len(samples[index])]
            if not originals:
                continue
            yield from words(name, originals, data.vocabulary)
            masked = [
                np.append(samples[index], 0)[samples.masked(index)[0].clip(0, len(samples[index]))]
                for index in sample_indices
            ]
            share = float((np.concatenate(masked) == data.vocabulary.mask).mean())
            if share < LEAST_MASKED:
                found = f"{name}: [MASK] is at {share:.0%} of the places to predict"
                yield f"{found}: they may be those of other samples", f"at least {LEAST_MASKED:.0%}"

    def part(samples: Samples) -> sample_checks.Part:
        return sample_checks.Part(
            len(samples),
            # With the masks: duplication repeats sequences with different masks.
            lambda indices: [sample_checks.key(samples[index], *samples.masked(index)) for index in indices.tolist()],
            lambda indices: [sample_checks.key(_original(samples, index)) for index in indices.tolist()],
            labels=lambda indices: np.asarray(samples.next[indices]).astype(np.int64),
        )

    return sample_checks.View(
        {name: part(samples) for name, samples in parts.items()}, classes=2, is_shuffled=True, extra_checks=checks
    )
