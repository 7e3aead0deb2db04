"""Whether evaluation samples were trained on, where articles are not known any more: by runs of equal tokens.

A run is 16 tokens in a row of one segment as they were before masking; one of 16 runs is kept, chosen by its hash, so
that the same text has the same ones in whatever sample it is. A sample all of whose runs are in the training part was
most likely trained on; a sentence that several articles have is not enough.
"""

from typing import List, Tuple

import numpy as np

from benchmarks.language.arrays import Samples
from benchmarks.language.vocabulary import Vocabulary

RUN = 16  # tokens
KEPT_BITS = 4  # one of 16 runs is kept
LEAST_RUNS = 8  # least runs of a sample that is compared: about 150 tokens
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 1024  # samples looked at at once


def runs_of(samples: Samples, vocabulary: Vocabulary) -> Tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the runs that are kept, uint64 [runs], and the sample of each, int64 [runs]."""
    parts = [_runs_of(samples, begin, vocabulary) for begin in range(0, len(samples), _CHUNK)]
    if not parts:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    return np.concatenate([hashes for hashes, _ in parts]), np.concatenate([owners for _, owners in parts])


def _runs_of(samples: Samples, begin: int, vocabulary: Vocabulary) -> Tuple[np.ndarray, np.ndarray]:
    end = min(begin + _CHUNK, len(samples))
    offsets, masked = samples.offsets[begin : end + 1], samples.masked_offsets[begin : end + 1]
    tokens = np.array(samples.tokens[offsets[0] : offsets[-1]], np.uint64)
    starts = np.repeat(offsets[:-1] - offsets[0], np.diff(masked))
    tokens[starts + samples.masked_places[masked[0] : masked[-1]]] = samples.masked_labels[masked[0] : masked[-1]]
    count = len(tokens) - RUN + 1
    if count <= 0:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    hashes = np.zeros(count, np.uint64)
    for place in range(RUN):
        hashes = (hashes + tokens[place : place + count] + np.uint64(1)) * _FACTOR
    # Every sample begins and ends with a mark, so that a run without marks is within one segment.
    marks = np.concatenate(([0], np.cumsum((tokens == vocabulary.cls) | (tokens == vocabulary.sep))))
    kept = np.flatnonzero((hashes >> np.uint64(64 - KEPT_BITS) == 0) & (marks[RUN:] == marks[:-RUN]))
    owners = np.searchsorted(offsets - offsets[0], kept, side="right") - 1 + begin
    return hashes[kept], owners


def mark_seen(seen: np.ndarray, wanted: np.ndarray, samples: Samples, vocabulary: Vocabulary) -> None:
    """Set ``seen`` where a hash of ``wanted``, which is sorted, is among the runs of the samples."""
    if not len(wanted):
        return
    hashes, _ = runs_of(samples, vocabulary)
    places = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
    seen[places[wanted[places] == hashes]] = True


def find(test: Samples, vocabulary: Vocabulary, wanted: np.ndarray, seen: np.ndarray) -> List[str]:
    """Return the evaluation samples, by their numbers, that have all of their runs in the training part."""
    hashes, owners = runs_of(test, vocabulary)
    known = seen[np.searchsorted(wanted, hashes)] if len(wanted) else np.zeros(0, bool)
    runs = np.bincount(owners, minlength=len(test))
    common = np.bincount(owners, weights=known, minlength=len(test))
    overlapping = np.flatnonzero((runs >= LEAST_RUNS) & (common == runs))
    return [f"sample {number:,}" for number in overlapping.tolist()]
