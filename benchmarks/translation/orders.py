"""Assign pairs to batches and ranks, as pure functions of lengths, seed, epoch and number of ranks.

Lengths are as in the arrays, without BOS and EOS. All epochs have the same number of steps, and all ranks the same
number of batches. In an epoch, a pair is in one batch or dropped; the dropped remainder changes between epochs.
"""

from dataclasses import dataclass
from typing import List

import numpy as np

from benchmarks.common.data.problem import Problem

BUCKETS = 5  # ``--num-buckets`` of GNMT's train.py (v0.5 to v0.7); the same in all configurations
# GNMT counts BOS and EOS where it compares a length with the longest (seq2seq/data/config.py, tokenizer.py).
GNMT_MARKS = 2
# class width of target lengths in ``by_shards``, so that source lengths within a batch are similar, too
WIDTH_CLASS = 8
MOST_PADDING = 0.4  # maximum fraction of padding in a batch of ``by_tokens``
MARKS = 1  # positions of EOS (source, target_out) or BOS (target_in) in a batch


@dataclass(frozen=True)
class Order:
    # An epoch's batches for all ranks, in order.

    sentences: np.ndarray  # int64: indices of pairs, batch after batch
    # int64 [steps * ranks + 1]: the batch of (step, rank) is from bounds[step * ranks + rank] to the next one.
    bounds: np.ndarray
    steps: int

    def batch(self, step: int, rank: int, ranks: int) -> np.ndarray:
        index = step * ranks + rank
        return self.sentences[self.bounds[index] : self.bounds[index + 1]]


def by_sentences(
    source: np.ndarray,
    target: np.ndarray,
    *,
    batch_size: int,
    ranks: int,
    seed: int,
    epoch: int,
    longest: int,
    buckets: int = BUCKETS,
) -> Order:
    """Return batches of ``batch_size`` pairs with similar lengths, like GNMT's BucketingSampler (sampler.py, v0.7).

    A pair's bucket follows from the longer side; all ranks use the same bucket in a step. Pairs are shuffled within
    the bucket, then the steps are shuffled. Pairs longer than ``longest``, including BOS and EOS, are dropped, as
    are pairs that do not fill a step in their bucket, which differ between epochs.

    Raises:
        Problem: no bucket fills a step.
    """
    random = _random(seed, epoch)
    longer = np.maximum(source, target).astype(np.int64) + GNMT_MARKS
    bucket_of = np.minimum(longer // -(-longest // buckets), buckets - 1)
    bucket_of[longer > longest] = -1
    step_size = batch_size * ranks
    selected = []
    for bucket in range(buckets):
        members = random.permutation(np.flatnonzero(bucket_of == bucket))
        selected.append(members[: len(members) // step_size * step_size])
    steps = np.concatenate(selected).reshape(-1, step_size)
    if not len(steps):
        raise Problem(
            f"no bucket of {len(source):,} pairs has the {step_size:,} of a step ({ranks} ranks of {batch_size})",
            "at least one step in an epoch",
            "use a smaller batch, fewer ranks, or more data",
        )
    sentences = steps[random.permutation(len(steps))].reshape(-1)
    return Order(sentences, np.arange(0, len(sentences) + 1, batch_size), len(steps))


def by_shards(
    source: np.ndarray,
    target: np.ndarray,
    *,
    batch_size: int,
    ranks: int,
    seed: int,
    epoch: int,
    longest: int,
    shard_size: int = 0,
) -> Order:
    """Return batches of ``batch_size`` pairs with similar lengths, as in GNMT's submission of v0.5 (sampler.py).

    All pairs are shuffled; every ``shard_size`` steps are sorted by the sum of both lengths; then the steps are
    shuffled. With ``shard_size`` 0, which no submission uses, the complete epoch is sorted by classes of WIDTH_CLASS
    target lengths, and within them by source length, alternately ascending and descending: this minimizes the
    padding of both sides. Pairs longer than ``longest``, including BOS and EOS, are dropped, as are pairs that do
    not fill a step.

    Raises:
        Problem: the pairs do not fill a step.
    """
    random = _random(seed, epoch)
    fitting = np.flatnonzero(np.maximum(source, target).astype(np.int64) + GNMT_MARKS <= longest)
    step_size = batch_size * ranks
    steps = len(fitting) // step_size
    if not steps:
        raise Problem(
            f"{len(fitting):,} pairs, fewer than the {step_size:,} of a step ({ranks} ranks of {batch_size})",
            "at least one step in an epoch",
            "use a smaller batch, fewer ranks, or more data",
        )
    shuffled = random.permutation(fitting)[: steps * step_size]
    if shard_size:
        keys = [source.astype(np.int64) + target]
    else:
        classes = target.astype(np.int64) // WIDTH_CLASS
        keys = [source * (1 - 2 * (classes % 2)), classes]  # the last key comes first
    for start in range(0, len(shuffled), (shard_size or steps) * step_size):
        shard = shuffled[start : start + (shard_size or steps) * step_size]
        shard[:] = shard[np.lexsort([key[shard] for key in keys])]
    sentences = shuffled.reshape(steps, step_size)[random.permutation(steps)].reshape(-1)
    return Order(sentences, np.arange(0, len(sentences) + 1, batch_size), steps)


def by_tokens(
    source: np.ndarray,
    target: np.ndarray,
    *,
    tokens: int,
    ranks: int,
    seed: int,
    epoch: int,
    longest: int,
    multiple: int = 8,
    length_multiple: int = 1,
) -> Order:
    """Return batches with up to ``tokens`` positions: number of pairs times the longest side, including EOS.

    As in the Transformer's submission, pairs sorted by source length, then target length, fill a batch; the number
    of pairs is then rounded down to ``multiple / length_multiple``, lengths up to ``length_multiple``
    (batching_scheme v0p5_better with seq_len_multiple 2 in v0.6 and v0.7, make_batches of v0.5 with 1). Batches are
    shuffled and distributed over the ranks. Differences: pairs of equal lengths are shuffled in every epoch, a batch
    also ends before padding exceeds MOST_PADDING, and incomplete sets of batches are dropped, where the submission
    uses empty batches.

    Pairs with a side longer than ``longest``, including EOS, are dropped; the configuration ensures that a batch holds
    the others.

    Raises:
        Problem: there are fewer batches than ranks.
    """
    random = _random(seed, epoch)
    longer = np.maximum(source, target).astype(np.int64) + MARKS
    indices = random.permutation(np.flatnonzero(longer <= longest))
    indices = indices[np.lexsort((target[indices], source[indices]))]
    begins = _fill(source[indices], target[indices], tokens, multiple // length_multiple, length_multiple)
    batches = np.split(indices, begins[1:-1])
    steps = len(batches) // ranks
    if not steps:
        raise Problem(
            f"{len(batches):,} batches of {tokens:,} positions for {ranks} ranks",
            "a batch for every rank",
            "use fewer tokens per batch, fewer ranks, or more data",
        )
    selected = [batches[index] for index in random.permutation(len(batches))[: steps * ranks]]
    return Order(np.concatenate(selected), np.cumsum([0, *map(len, selected)]), steps)


def _fill(source: np.ndarray, target: np.ndarray, tokens: int, multiple: int, length_multiple: int) -> List[int]:
    # Return the starts of the batches of sorted pairs, and the number of pairs at the end.
    sides = [side.astype(np.int64) + MARKS for side in (source, target)]
    longer = np.maximum(*sides)
    begins, count = [0], len(longer)
    while begins[-1] < count:
        start = begins[-1]
        window = slice(start, start + tokens // int(longer[start]) + 1)
        padded = -(-np.maximum.accumulate(longer[window]) // length_multiple) * length_multiple
        numbers = np.arange(1, len(padded) + 1)
        # Positions grow with the number of pairs, so the first pair that does not fit ends the batch.
        pairs = max(1, int(np.searchsorted(padded * numbers, tokens, side="right")))
        real = sum(np.cumsum(side[window]) for side in sides)
        positions = sum(np.maximum.accumulate(side[window]) for side in sides) * numbers
        spread = np.flatnonzero(real < (1 - MOST_PADDING) * positions)
        # A single pair needs no padding, so the batch keeps at least one.
        full = start + pairs < count
        if len(spread) and spread[0] < pairs:
            pairs, full = int(spread[0]), True
        if full and pairs > multiple:
            pairs -= pairs % multiple
        begins.append(start + pairs)
    return begins


def for_evaluation(lengths: np.ndarray, *, batch_size: int, ranks: int) -> Order:
    """Return all sentences exactly once, longest first, in batches of up to ``batch_size``.

    All ranks have the same number of batches, with sizes that differ by up to one sentence; with fewer sentences
    than batches some are empty.
    """
    steps = max(1, -(-len(lengths) // (batch_size * ranks)))
    sentences = np.argsort(-lengths.astype(np.int64), kind="stable")
    sizes = np.full(steps * ranks, len(lengths) // (steps * ranks))
    sizes[: len(lengths) % (steps * ranks)] += 1
    return Order(sentences, np.concatenate(([0], np.cumsum(sizes))), steps)


def _random(seed: int, epoch: int) -> np.random.RandomState:
    # RandomState's stream is frozen, a Generator's is not.
    return np.random.RandomState([seed % 2**32, seed >> 32, epoch])
