"""On-disk format of pretraining data: concatenated samples without padding.

For ``train`` and ``test`` (MLPerf's evaluation set)::

    train_tokens.npy           uint16 [tokens]: [CLS] a [SEP] b [SEP] of all samples, masked tokens already replaced
    train_offsets.npy          int64 [samples + 1]
    train_second.npy           uint16 [samples]: start of segment b in the sample
    train_masked_places.npy    uint16 [masked]: masked positions in the sample, ascending
    train_masked_labels.npy    uint16 [masked]: the original tokens
    train_masked_offsets.npy   int64 [samples + 1]
    train_next.npy             uint8 [samples]: 1 if b is a random text, 0 if it follows a

``vocabulary.txt`` has one entry per line, as published. Arrays are read through memory maps::

    data = open_data(Path("data/bert"))
    print(data.vocabulary.text(data.train[0]))
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Tuple

import numpy as np

from benchmarks.common.data import manifest
from benchmarks.common.data.arrays import Sequences, check_sizes, mapped, opening
from benchmarks.language import ARRAYS, PARTS, VOCABULARY, vocabulary
from benchmarks.language.vocabulary import Vocabulary


def within(counts: np.ndarray) -> np.ndarray:
    # Concatenate the ranges 0 to count - 1.
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)


def ragged(offsets: np.ndarray, indices: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Return the indices of the values of samples ``indices``, concatenated, and the number of values per sample."""
    begins = offsets[indices]
    counts = offsets[indices + 1] - begins
    return np.repeat(begins, counts) + within(counts), counts


@dataclass(frozen=True)
class Samples(Sequences):
    # One part; the fields are as above. A length has [CLS] and both [SEP].

    second: np.ndarray
    masked_places: np.ndarray
    masked_labels: np.ndarray
    masked_offsets: np.ndarray
    next: np.ndarray

    def masked(self, index: int) -> Tuple[np.ndarray, np.ndarray]:
        """Return positions and labels of a sample's masked tokens, both uint16 [masked]."""
        part = slice(self.masked_offsets[index], self.masked_offsets[index + 1])
        return self.masked_places[part], self.masked_labels[part]

    def take(self, order: np.ndarray) -> Samples:
        # Return the samples ``order`` in that order.
        tokens, lengths = ragged(self.offsets, order)
        masked, counts = ragged(self.masked_offsets, order)
        return Samples(
            self.tokens[tokens],
            np.concatenate(([0], np.cumsum(lengths))),
            self.second[order],
            self.masked_places[masked],
            self.masked_labels[masked],
            np.concatenate(([0], np.cumsum(counts))),
            self.next[order],
        )

    def original(self, index: int) -> np.ndarray:
        """Return a sample's tokens before masking, uint16 [length]."""
        tokens = np.array(self[index])
        positions, labels = self.masked(index)
        tokens[positions] = labels
        return tokens


@dataclass(frozen=True)
class DataSet:
    train: Samples
    test: Samples
    vocabulary: Vocabulary
    manifest: Mapping[str, Any]
    folder: Path

    @property
    def sequence_length(self) -> int:
        return int(self.manifest["facts"]["sequence_length"])

    @property
    def max_predictions(self) -> int:
        return int(self.manifest["facts"]["max_predictions"])


def open_data(folder: Path) -> DataSet:
    """Open a prepared data set; reads the vocabulary and no samples, so it may be called before the clock starts.

    Raises:
        Problem: the data set is missing, incomplete, or does not match its manifest.
    """
    contents = manifest.read(folder)
    with opening(folder, "BERT"):
        train, test = (
            Samples(*(mapped(folder / f"{part}_{name}.npy", kind) for name, kind in ARRAYS.items())) for part in PARTS
        )
        data = DataSet(train, test, vocabulary.read(folder / VOCABULARY), contents, folder)
        # Without reading the arrays: the clock has not started.
        sizes = [
            (f"values in {part}_{name}", len(getattr(samples, name)), contents["splits"][part]["count"] + more)
            for part, samples in zip(PARTS, (train, test))
            for name, more in (("offsets", 1), ("second", 0), ("next", 0), ("masked_offsets", 1))
        ]
        entries = ("entries of the vocabulary", data.vocabulary.size, contents["facts"]["vocabulary"])
        check_sizes(folder, contents, [entries, *sizes])
    return data
