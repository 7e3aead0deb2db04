"""Detect evaluation samples in the training part by runs of equal tokens, if the articles are unknown.

A run is 16 consecutive tokens in one segment before masking. One in 16 runs is selected by its hash, so that the
same text has the same selected runs in all samples. A sample with all runs in the training part was most likely
trained on; a sentence that occurs in more than one article is not sufficient.
"""

from typing import List, Tuple

import numpy as np

from benchmarks.language.arrays import Samples
from benchmarks.language.vocabulary import Vocabulary

RUN = 16  # tokens
KEPT_BITS = 4  # one of 16 runs is kept
LEAST_RUNS = 8  # samples with fewer runs are not compared; about 150 tokens
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 1024  # samples per step


def runs_of(samples: Samples, vocabulary: Vocabulary) -> Tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the selected runs, uint64 [runs], and their samples, int64 [runs]."""
    parts = [_runs_of(samples, start, vocabulary) for start in range(0, max(1, len(samples)), _CHUNK)]
    return np.concatenate([hashes for hashes, _ in parts]), np.concatenate([owners for _, owners in parts])


def _runs_of(samples: Samples, start: int, vocabulary: Vocabulary) -> Tuple[np.ndarray, np.ndarray]:
    end = min(start + _CHUNK, len(samples))
    offsets, masked = samples.offsets[start : end + 1], samples.masked_offsets[start : end + 1]
    tokens = np.array(samples.tokens[offsets[0] : offsets[-1]], np.uint64)
    starts = np.repeat(offsets[:-1] - offsets[0], np.diff(masked))
    tokens[starts + samples.masked_places[masked[0] : masked[-1]]] = samples.masked_labels[masked[0] : masked[-1]]
    count = len(tokens) - RUN + 1
    if count <= 0:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    hashes = np.zeros(count, np.uint64)
    for offset in range(RUN):
        hashes = (hashes + tokens[offset : offset + count] + np.uint64(1)) * _FACTOR
    # Samples start and end with a mark, so runs without marks are in one segment.
    marks = np.concatenate(([0], np.cumsum((tokens == vocabulary.cls) | (tokens == vocabulary.sep))))
    selected = np.flatnonzero((hashes >> np.uint64(64 - KEPT_BITS) == 0) & (marks[RUN:] == marks[:-RUN]))
    return hashes[selected], np.searchsorted(offsets - offsets[0], selected, side="right") - 1 + start


def find(test: Samples, vocabulary: Vocabulary, test_hashes: np.ndarray, is_in_train: np.ndarray) -> List[str]:
    """Return the indices of evaluation samples with all runs in the training part."""
    hashes, owners = runs_of(test, vocabulary)
    runs = np.bincount(owners, minlength=len(test))
    common = np.bincount(owners[is_in_train[np.searchsorted(test_hashes, hashes)]], minlength=len(test))
    overlapping = np.flatnonzero((runs >= LEAST_RUNS) & (common == runs))
    return [f"sample {number:,}" for number in overlapping.tolist()]
