"""Checks for typical preparation errors in samples of the finished data set, the same for all benchmarks.

A manifest shows that the files are unchanged, not that they are right. Complete but useless data sets in the history
of MLPerf: identical samples in all shards, so that BERT stayed at 0.62 (mlcommons/training_results_v2.1#10,
mlcommons/training#659), a wrong evaluation set (mlcommons/training_policies#354), vocabularies with a different size
(mlcommons/training#233), missing or truncated days (facebookresearch/dlrm#413).

``view(directory, manifest)`` in a benchmark's ``samples.py`` returns the splits as samples with keys and labels, and
adds benchmark-specific checks, for example that all tokens are in the vocabulary. Up to ``LOOKED_AT`` samples per
split are read: runs of neighbours, and evenly spaced single samples. Among N samples, they reveal:

- a repeated part in source order, if it contains one of ``RUNS`` runs of sqrt(N) neighbours, up to N = 150 million;
  larger sets have shorter runs, which may miss it;
- samples repeated f times on average in any order, if f is above 0.1 and f * LOOKED_AT ** 2 / 2 N above about 6: a
  duplicated set of up to 200 million samples, or Criteo's 4.2 billion rows if a day occurs 24 times;
- 1 % or more empty samples, and 10 % or more evaluation samples in the training data, by the same counts.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from benchmarks.common.data.manifest import prepare_again
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.source_checks import MOST_SHARE

LOOKED_AT = 50_000
RUNS = 4
LEAST = 1000  # minimum samples for a duplicate check: tiny sets are made by hand
NEIGHBOURS = 4  # run length of equal samples that cannot be accidental
LEAST_PAIRS = 3
MOST_EMPTY = 0.01
EXPECTED_OF_CLASS = 20  # expected samples per class from which a missing class cannot be accidental
FEW_CHANGES = 0.1  # fraction of the label changes in a shuffled order

Keys = Callable[[np.ndarray], Sequence[Optional[bytes]]]  # of the samples with these indices


@dataclass(frozen=True)
class Part:
    """One split."""

    count: int
    # Key for a sample's content: b"" for an empty sample, None for a sample that is too short to be distinctive.
    keys: Keys
    compared: Optional[Keys] = None  # Keys to compare evaluation with training data, if different
    labels: Optional[Callable[[np.ndarray], np.ndarray]] = None  # from 0 on


@dataclass(frozen=True)
class View:
    """A data set as samples."""

    parts: Mapping[str, Part]  # training and evaluation, in this order, by name in the manifest
    classes: int = 0  # number of classes; 0: unknown
    is_shuffled: bool = False  # whether neighbours in training have to be of mixed labels
    # Benchmark-specific checks: finding and expectation
    extra_checks: Callable[[], Iterator[Tuple[str, str]]] = lambda: iter(())


def key(content: np.ndarray, *extras: np.ndarray) -> bytes:
    """Return a sample's key; b"" if it is empty or has a single distinct value."""
    if not len(content) or (len(content) > 1 and (content == content[0]).all()):
        return b""
    digest = hashlib.blake2b(np.ascontiguousarray(content).tobytes(), digest_size=8)
    for array in extras:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def spread(count: int, limit: int = 0) -> np.ndarray:
    """Return up to ``limit`` (default LOOKED_AT) evenly spaced numbers from 0 to ``count`` - 1, including the last."""
    return np.unique(np.linspace(0, max(0, count - 1), min(count, limit or LOOKED_AT)).astype(np.int64))


def sample_indices(count: int) -> Tuple[np.ndarray, List[np.ndarray]]:
    """Return the sorted indices to read, and the runs of neighbours among them."""
    if count <= LOOKED_AT:
        return np.arange(count), [np.arange(count)]
    length = min(math.isqrt(count) + 1, LOOKED_AT // (2 * RUNS))
    begins = np.linspace(0, count - length, RUNS).astype(np.int64)
    runs = [np.arange(start, start + length) for start in begins]
    single = np.arange(0, count, max(length, -(-count // (LOOKED_AT // 2))))
    return np.unique(np.concatenate([single, *runs])), runs


def find(view: View, directory: Path, may_overlap: bool = False) -> List[Problem]:
    """Return errors in a data set; ``may_overlap``: evaluation samples in the training data were accepted."""
    findings: List[Tuple[str, str]] = []
    for name, part in view.parts.items():
        findings += _repeated(name, part)
        findings += _labels(name, part, view)
    if not may_overlap:
        findings += _evaluated(view)
    findings += view.extra_checks()
    return [Problem(*finding, f"check the source; {prepare_again(directory)}") for finding in findings]


def _repeated(name: str, part: Part) -> Iterator[Tuple[str, str]]:
    indices, _ = sample_indices(part.count)
    keys = part.keys(indices)
    empty = [int(index) for index, key in zip(indices, keys) if key == b""]
    if len(empty) > MOST_EMPTY * len(keys):
        yield f"{name}: {len(empty):,} of {len(keys):,} samples are empty, the first is {empty[0]:,}", "content"
    if part.count < LEAST:
        return
    of: Dict[bytes, int] = {}
    pairs = []
    for index, key in zip(indices.tolist(), keys):
        if key:
            if key in of:
                pairs.append((of[key], index))
            of.setdefault(key, index)
    for first, second in pairs[: LOOKED_AT // NEIGHBOURS]:
        after = np.arange(1, NEIGHBOURS)
        if second + NEIGHBOURS <= part.count and second - first >= NEIGHBOURS:
            following = part.keys(first + after)
            if all(following) and list(following) == list(part.keys(second + after)):
                yield f"{name}: a part is repeated: from sample {second:,} on come those from {first:,} on", "each once"
                return
    share = 2 * len(pairs) * part.count / len(keys) ** 2
    if len(pairs) >= LEAST_PAIRS and share > MOST_SHARE:
        first, second = pairs[0]
        message = f"{name}: {len(pairs):,} of {len(keys):,} samples repeat another sample: {second:,} equals {first:,}"
        yield f"{message}; estimated {share:.2f} per sample for all {part.count:,}", f"less than {MOST_SHARE}"


def _labels(name: str, part: Part, view: View) -> Iterator[Tuple[str, str]]:
    if part.labels is None:
        return
    labels = part.labels(spread(part.count)).astype(np.int64)
    least, top = int(labels.min(initial=0)), int(labels.max(initial=0))
    if least < 0 or (view.classes and top >= view.classes):
        yield f"{name}: labels from {int(labels.min())} to {top}", f"{view.classes:,} classes, from 0 on"
        return
    counts = np.bincount(labels, minlength=view.classes)
    missing = np.flatnonzero(counts == 0)
    if len(missing) and len(labels) >= EXPECTED_OF_CLASS * view.classes:
        message = f"{name}: {len(missing):,} of {view.classes:,} classes have no sample, the first is {missing[0]}"
        yield message, "samples of every class"
    if name != next(iter(view.parts)) or not view.is_shuffled:
        return
    # expected fraction of neighbours with different labels
    mixed = 1 - float(np.sum((counts / max(1, counts.sum())) ** 2))
    runs = [part.labels(run) for run in sample_indices(part.count)[1]]
    neighbours = sum(len(run) - 1 for run in runs)
    changes = sum(int(np.count_nonzero(np.diff(run))) for run in runs)
    if mixed * neighbours >= EXPECTED_OF_CLASS and changes < FEW_CHANGES * mixed * neighbours:
        yield (
            f"{name}: labels are sorted: of {neighbours:,} neighbours {changes:,} have different ones",
            f"about {mixed * neighbours:,.0f}, in a shuffled order",
        )


def _evaluated(view: View) -> Iterator[Tuple[str, str]]:
    (_, train), (name, test) = view.parts.items()
    if train.count < LEAST:
        return
    train_indices, test_indices = sample_indices(train.count)[0], sample_indices(test.count)[0]
    trained = set((train.compared or train.keys)(train_indices))
    keys = [(int(index), key) for index, key in zip(test_indices, (test.compared or test.keys)(test_indices)) if key]
    common = [index for index, key in keys if key in trained]
    share = len(common) * train.count / max(1, len(train_indices)) / max(1, len(keys))
    if len(common) >= LEAST_PAIRS and share > MOST_SHARE:
        message = f"{name}: about {min(share, 1):.0%} of the evaluation samples are in the training data as well"
        yield f"{message}, the first is {common[0]:,}", "samples that are not trained on"


def agreement(right: Mapping[int, bool], subject: str, expected: str, least: float) -> Iterator[Tuple[str, str]]:
    """Yield an error if less than the fraction ``least`` of the samples is right; ``right`` is by index."""
    wrong = [index for index, is_right in right.items() if not is_right]
    if right and len(wrong) > (1 - least) * len(right):
        yield f"{len(wrong):,} of {len(right):,} {subject}, the first is {wrong[0]:,}", expected
