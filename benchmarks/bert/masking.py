"""Pretraining samples from tokenized documents: sentence pairs and masked tokens.

Same algorithm as create_pretraining_data.py of the MLPerf v0.7 submission: a sample is filled with complete
sentences from a document (up to a random shorter length in 10 % of a document's passes) and split into two segments at
a random sentence. In half of the samples, the second segment is from a random document. 15 % of the tokens are
predicted: 80 % become [MASK], 10 % a random entry, 10 % are unchanged. The random numbers differ: they are
generated for a full shard at a time, with one stream per shard and pass.
"""

from bisect import bisect_left
from typing import Callable, List, NamedTuple, Sequence, Tuple

import numpy as np

from benchmarks.language.arrays import Samples, within
from benchmarks.language.vocabulary import Vocabulary

MARKS = 3  # [CLS] and two [SEP]
MASKED = 0.15
SHORT = 0.1
RANDOM_NEXT = 0.5
# Random numbers below BECOMES_MASK select [MASK], below STAYS the original token, else a random entry.
BECOMES_MASK, STAYS = 0.8, 0.9
TRIES = 10  # attempts to find a document different from the current one


class Settings(NamedTuple):
    sequence_length: int  # maximum tokens per sample, including [CLS] and both [SEP]
    max_predictions: int  # maximum masked tokens per sample
    duplication: int  # passes over the documents


class Documents(NamedTuple):
    tokens: np.ndarray  # uint16 [tokens]: concatenated sentences
    sentences: List[int]  # start of the sentences in tokens, and the end of the last one; none is empty
    documents: List[int]  # first sentence of the documents, and the end of the last one; none is empty


class Pair(NamedTuple):
    # A sample's two segments as offsets in ``Documents.tokens``.

    first: int
    first_end: int
    second: int
    second_end: int
    is_random: int


def stream(seed: int, *key: int) -> np.random.RandomState:
    """Return the random numbers for a key. RandomState's stream is stable across NumPy versions, unlike Generator's."""
    return np.random.RandomState([seed % 2**32, seed >> 32, *key])


def pairs_of(documents: Documents, number: int, length: int, random: np.random.RandomState) -> List[Pair]:
    """Return the pairs from one pass over a document.

    ``length``: maximum tokens in both segments.
    """
    draw = random.random_sample
    target = 2 + int(draw() * (length - 1)) if draw() < SHORT else length
    sentences, last = documents.sentences, documents.documents[number + 1]
    start, pairs = documents.documents[number], []
    while start < last:
        # Sentences start..end - 1 reach the target length, or the document ends.
        end = min(last, bisect_left(sentences, sentences[start] + target, start + 1, last + 1))
        middle = start + 1 if end - start < 2 else start + 1 + int(draw() * (end - start - 1))
        first, first_end = sentences[start], sentences[middle]
        if end - start == 1 or draw() < RANDOM_NEXT:
            second, second_end = _random_text(documents, number, target - (first_end - first), draw)
            pairs.append(Pair(*_cut(first, first_end, second, second_end, length, random), 1))
            start = middle
        else:
            pairs.append(Pair(*_cut(first, first_end, first_end, sentences[end], length, random), 0))
            start = end
    return pairs


def _random_text(documents: Documents, number: int, length: int, draw: Callable[[], float]) -> Tuple[int, int]:
    # Return sentences from a random document with ``length`` tokens, or up to its end; at least one sentence.
    count = len(documents.documents) - 1
    for _ in range(TRIES):
        other = int(draw() * count)
        if other != number:
            break
    first, last = documents.documents[other], documents.documents[other + 1]
    start = first + int(draw() * (last - first))
    sentences = documents.sentences
    end = min(last, bisect_left(sentences, sentences[start] + length, start + 1, last + 1))
    return sentences[start], sentences[end]


def _cut(
    first: int, first_end: int, second: int, second_end: int, length: int, random: np.random.RandomState
) -> Tuple[int, int, int, int]:
    # Cut the longer segment, at either end by chance, until both have ``length`` tokens together.
    sizes = first_end - first, second_end - second
    excess = sum(sizes) - length
    if excess <= 0:
        return first, first_end, second, second_end
    # One by one from the longer one, from the second one where both are equal.
    difference = sizes[0] - sizes[1]
    from_longer = min(excess, abs(difference))
    rest = excess - from_longer
    from_first = rest // 2 + (from_longer if difference > 0 else 0)
    from_second = rest - rest // 2 + (from_longer if difference <= 0 else 0)
    cut_front, right = int(random.binomial(from_first, 0.5)), int(random.binomial(from_second, 0.5))
    return first + cut_front, first_end - (from_first - cut_front), second + right, second_end - (from_second - right)


def make_samples(
    documents: Documents,
    numbers: Sequence[int],
    settings: Settings,
    vocabulary: Vocabulary,
    random: np.random.RandomState,
) -> Samples:
    # Return the samples from one pass over the documents ``numbers``, in this order.
    length = settings.sequence_length - MARKS
    pairs = [pair for number in numbers for pair in pairs_of(documents, number, length, random)]
    pair_table = np.array(pairs, np.int64).reshape(-1, len(Pair._fields))
    sizes = pair_table[:, [1, 3]] - pair_table[:, [0, 2]]
    lengths = sizes.sum(axis=1) + MARKS
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.full(offsets[-1], vocabulary.sep, np.uint16)
    tokens[offsets[:-1]] = vocabulary.cls
    seconds = sizes[:, 0] + 2
    for begins, counts, starts in (
        (offsets[:-1] + 1, sizes[:, 0], pair_table[:, 0]),
        (offsets[:-1] + seconds, sizes[:, 1], pair_table[:, 2]),
    ):
        places_in = within(counts)
        tokens[np.repeat(begins, counts) + places_in] = documents.tokens[np.repeat(starts, counts) + places_in]
    masked, counts = _choose(offsets, seconds, settings, random)
    labels = tokens[masked]
    tokens[masked] = _replace(labels, vocabulary, random)
    return Samples(
        tokens,
        offsets,
        seconds.astype(np.uint16),
        (masked - np.repeat(offsets[:-1], counts)).astype(np.uint16),
        labels,
        np.concatenate(([0], np.cumsum(counts))),
        pair_table[:, 4].astype(np.uint8),
    )


def _choose(
    offsets: np.ndarray, seconds: np.ndarray, settings: Settings, random: np.random.RandomState
) -> Tuple[np.ndarray, np.ndarray]:
    # Return the masked positions in all tokens, ascending, and the number per sample.
    lengths = np.diff(offsets)
    counts = np.minimum(settings.max_predictions, np.maximum(1, np.rint(lengths * MASKED))).astype(np.int64)
    keys = random.random_sample(int(offsets[-1]))
    for marks in (offsets[:-1], offsets[:-1] + seconds - 1, offsets[1:] - 1):
        keys[marks] = 1.0  # larger than all random numbers: marks are never selected
    keys += 2 * np.repeat(np.arange(len(lengths)), lengths)
    order = np.argsort(keys, kind="stable")
    selected = order[np.repeat(offsets[:-1], counts) + within(counts)]
    selected.sort()
    return selected, counts


def _replace(labels: np.ndarray, vocabulary: Vocabulary, random: np.random.RandomState) -> np.ndarray:
    draws = random.random_sample(len(labels))
    replaced = np.where(draws < BECOMES_MASK, np.uint16(vocabulary.mask), labels)
    is_random = draws >= STAYS
    replaced[is_random] = random.randint(vocabulary.size, size=int(is_random.sum()))
    return replaced
