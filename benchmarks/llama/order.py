"""Megatron's order of documents and samples, generated from a seed.

Same algorithm as GPTDataset of Megatron-LM (megatron/core/datasets/gpt_dataset.py): the documents of all epochs are
shuffled, concatenated and cut into sequences, and the sequences are shuffled. If less than 80 % of the last epoch is
needed, it is shuffled separately. A sequence has one token more than the network's input, which is also the first
token of the next sequence. Documents are not separated within a sequence.

The reference has a single prefix for its training split, so data sets are not blended, whatever the prefix weight
(BlendedMegatronDatasetBuilder, "Each split comes from a separate distribution").

The evaluation set is not shuffled according to README.md of the reference ("Test data order"). The code of the
reference and of the submissions shuffles it like the training set, with the samples of all evaluations of the schedule.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Tuple

import numpy as np

from benchmarks.common.data.arrays import write_array
from benchmarks.llama import compiled
from benchmarks.llama.megatron import Documents

CHUNK = 1 << 16  # documents that are cut at a time: 64-bit sums of all of them would need twice their memory
WHOLE = 0.8  # fraction of the last epoch from which it is shuffled together with the previous epochs
KEY = "key"
FILES = ("documents", "places", "offsets", "sequences")


@dataclass(frozen=True)
class Order:
    """Sequences of ``length`` + 1 tokens; the arrays may be memory maps."""

    length: int
    documents: np.ndarray  # int32: the shuffled documents
    # int32 [sequences]: index in ``documents`` of the first token, before the sequences are shuffled
    places: np.ndarray
    offsets: np.ndarray  # int32 [sequences]: token of that document
    sequences: np.ndarray  # uint32 [sequences]: the shuffled sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def tokens(self, source: Documents, number: int) -> np.ndarray:
        """Return the tokens of the sequence that comes as ``number``, int64 [length + 1]."""
        sequence = self.sequences[number]
        index, offset = int(self.places[sequence]), int(self.offsets[sequence])
        parts, missing = [], self.length + 1
        while missing:
            part = source.read(int(self.documents[index]), offset, missing)
            parts.append(part)
            missing, index, offset = missing - len(part), index + 1, 0
        return np.concatenate(parts).astype(np.int64)


def shuffled(lengths: np.ndarray, length: int, samples: int, seed: int) -> Order:
    """Return the order of at least ``samples`` training sequences of ``length`` tokens.

    Args:
        lengths: tokens per document.
        length: input tokens of the network.
        samples: sequences of the complete schedule; the order depends on it.
        seed: of the shuffles.
    """
    per_epoch = int(lengths.sum(dtype=np.int64))
    epochs = max(1, -(-(samples * length + 1) // per_epoch))
    full_sequences = ((epochs - 1) * per_epoch - 1) // length  # sequences of all epochs but the last
    count = (epochs * per_epoch - 1) // length
    apart = epochs > 1 and samples - full_sequences < int(WHOLE * ((per_epoch - 1) // length))
    random = np.random.RandomState(seed)
    documents = np.empty(epochs * len(lengths), np.int32)
    documents.reshape(epochs, -1)[:] = np.arange(len(lengths), dtype=np.int32)
    for part in np.split(documents, [(epochs - 1) * len(lengths)] if apart else []):
        compiled.shuffle(part, random)
    positions, offsets = cut(lengths, documents, length, count)
    sequences = np.arange(count, dtype=np.uint32)
    for numbers in np.split(sequences, [full_sequences] if apart else []):
        compiled.shuffle(numbers, random)
    return Order(length, documents, positions, offsets, sequences)


def in_order(lengths: np.ndarray, length: int, samples: int) -> Order:
    """Return the first ``samples`` sequences, or all if there are fewer, in document order."""
    count = min(samples, (int(lengths.sum(dtype=np.int64)) - 1) // length)
    documents = np.arange(len(lengths), dtype=np.int32)
    return Order(length, documents, *cut(lengths, documents, length, count), np.arange(count, dtype=np.uint32))


def shuffled_start(lengths: np.ndarray, length: int, samples: int, evaluations: int, seed: int) -> Order:
    """Return the first ``samples`` sequences of the order for all ``evaluations``."""
    order = shuffled(lengths, length, samples * evaluations, seed)
    return replace(order, sequences=order.sequences[:samples])


def cut(lengths: np.ndarray, documents: np.ndarray, length: int, count: int) -> Tuple[np.ndarray, np.ndarray]:
    """Return index in ``documents`` and token offset of the first token of ``count`` sequences, int32.

    ``lengths`` has the tokens per document.
    """
    arrays = compiled.cut(lengths, documents, length, count)
    if arrays is not None:
        return arrays
    indices, offsets = np.empty(count, np.int32), np.empty(count, np.int32)
    done, end = 0, 0
    for first in range(0, len(documents), CHUNK):
        counts = np.take(lengths, documents[first : first + CHUNK])
        bounds = np.concatenate(([end], counts)).cumsum()
        end = int(bounds[-1])
        starts = np.arange(done, min(count, -(-end // length)), dtype=np.int64) * length
        places = np.searchsorted(bounds, starts, side="right") - 1
        part = slice(done, done + len(starts))
        indices[part], offsets[part], done = first + places, starts - bounds[places], part.stop
    return indices, offsets


def key_of(lengths: np.ndarray, length: int, samples: int, seed: int) -> str:
    """Return a one-line key of the inputs that determine an order."""
    return f"{hashlib.sha256(lengths.data).hexdigest()} {length} {samples} {seed}"


def write(order: Order, folder: Path, key: str) -> None:
    """Write an order. The key is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / KEY).unlink(missing_ok=True)
    for name in FILES:
        write_array(folder / f"{name}.npy", getattr(order, name))
    (folder / KEY).write_text(key, encoding="ascii")


def is_there(folder: Path, key: str) -> bool:
    return (folder / KEY).is_file() and (folder / KEY).read_text(encoding="ascii") == key


def read(folder: Path, length: int) -> Order:
    """Return an order that was written, as memory maps."""
    return Order(length, *(np.load(str(folder / f"{name}.npy"), mmap_mode="r") for name in FILES))
