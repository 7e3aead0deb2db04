"""Synthetic data with the sizes of the real data set, to measure the step speed."""

from pathlib import Path
from typing import Dict

import numpy as np

from benchmarks.common.checks.selftest import write_manifest
from benchmarks.language import ARRAYS, VOCABULARY, vocabulary
from benchmarks.language.vocabulary import SPECIAL

SAMPLES = {"train": 1 << 13, "test": 512}
# Fraction of full-length samples; other lengths are uniform. With MLPerf's set, padded batches are half padding.
WHOLE_SHARE = 0.2


def sample_arrays(count: int, length: int, predictions: int, entries: int) -> Dict[str, np.ndarray]:
    # Return a part's arrays: random tokens, one in seven masked.
    random = np.random.RandomState(count)
    lengths = np.where(random.rand(count) < WHOLE_SHARE, length, random.randint(8, length + 1, count))
    masked = np.minimum(np.maximum(lengths // 7, 1), predictions)
    positions = [np.sort(random.permutation(n - 2)[:m] + 1) for n, m in zip(lengths, masked)]
    return {
        "tokens": random.randint(len(SPECIAL), entries, lengths.sum()),
        "offsets": np.concatenate(([0], np.cumsum(lengths))),
        "second": lengths // 2,
        "masked_places": np.concatenate(positions),
        "masked_labels": random.randint(len(SPECIAL), entries, masked.sum()),
        "masked_offsets": np.concatenate(([0], np.cumsum(masked))),
        "next": random.randint(0, 2, count),
    }


def write(folder: Path, entries: int = 30522, length: int = 512, predictions: int = 76) -> None:
    # Write samples of up to ``length`` tokens from a vocabulary with ``entries`` entries.
    for part, count in SAMPLES.items():
        for name, array in sample_arrays(count, length, predictions, entries).items():
            np.save(str(folder / f"{part}_{name}.npy"), array.astype(ARRAYS[name]))
    vocabulary.write(folder / VOCABULARY, (*SPECIAL, *(f"w{number}" for number in range(entries - len(SPECIAL)))))
    properties = {"vocabulary": entries, "sequence_length": length, "max_predictions": predictions}
    write_manifest(folder, "bert", SAMPLES, properties)
