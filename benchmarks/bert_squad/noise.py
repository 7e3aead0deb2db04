"""Synthetic data with the sizes of the real data set, to measure the step speed."""

import json
from pathlib import Path
from typing import Dict

import numpy as np

from benchmarks.bert_squad import ARRAYS, PARAGRAPHS, VOCABULARY
from benchmarks.common.checks.selftest import write_manifest
from benchmarks.language import vocabulary
from benchmarks.language.vocabulary import SPECIAL

WINDOWS = {"train": 1 << 13, "test": 512}
MEAN, SHAPE = 170, 6.0  # gamma distribution of SQuAD's window lengths at 384 tokens: mean and shape
QUESTION = 12  # tokens before the paragraph
SHORTEST = QUESTION + 8


def window_arrays(count: int, length: int, entries: int) -> Dict[str, np.ndarray]:
    """Return a part's arrays: random tokens, answers of three tokens, one question per window."""
    random = np.random.RandomState(count)
    lengths = np.clip(random.gamma(SHAPE, MEAN / SHAPE, count).astype(np.int64), SHORTEST, length)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    begins = np.maximum(positions - QUESTION, 0) * 2
    start = QUESTION + random.randint(0, SHORTEST - QUESTION - 3, count)
    return {
        "tokens": random.randint(len(SPECIAL), entries, offsets[-1]),
        "begins": begins,
        "ends": begins + (positions >= QUESTION),
        "best": positions >= QUESTION,
        "offsets": offsets,
        "second": np.full(count, QUESTION),
        "start": start,
        "end": start + 2,
        "question": np.arange(count),
    }


def write(folder: Path, entries: int = 30522, length: int = 384) -> None:
    # Write windows of up to ``length`` tokens from a vocabulary with ``entries`` entries.
    for part, count in WINDOWS.items():
        for name, array in window_arrays(count, length, entries).items():
            np.save(str(folder / f"{part}_{name}.npy"), array.astype(ARRAYS[name]))
    vocabulary.write(folder / VOCABULARY, (*SPECIAL, *(f"w{number}" for number in range(entries - len(SPECIAL)))))
    context = "w " * length
    questions = [{"id": str(number), "question": "w", "answers": ["w w w"]} for number in range(WINDOWS["test"])]
    (folder / PARAGRAPHS).write_text(json.dumps({"context": context, "questions": questions}) + "\n")
    facts = {"vocabulary": entries, "sequence_length": length, "questions": WINDOWS}
    write_manifest(folder, "bert-squad", WINDOWS, facts)
