"""Synthetic data with a real data set's sizes, to measure step speed."""

from pathlib import Path

import numpy as np

from benchmarks.common.checks.selftest import write_manifest
from benchmarks.translation import CODES, REFERENCES, SIDES, SOURCES, VOCABULARY, vocabulary

PAIRS = 1 << 16
TESTED = 128
LONGEST = 50  # maximum tokens per sentence, uniform from 4: WMT's mean is 28


def write(folder: Path, benchmark: str, entries: int, pairs: int = PAIRS) -> None:
    # Write sentences of random tokens from a vocabulary with ``entries`` entries.
    random = np.random.RandomState(0)
    counts = {"train": pairs, "test": TESTED}
    for part, count in counts.items():
        for side in SIDES:
            offsets = np.concatenate(([0], np.cumsum(random.randint(4, LONGEST, count)))).astype(np.int64)
            np.save(str(folder / f"{part}_{side}_offsets.npy"), offsets)
            tokens = random.randint(vocabulary.EOS + 1, entries, offsets[-1])
            np.save(str(folder / f"{part}_{side}.npy"), tokens.astype(np.uint16))
    (folder / VOCABULARY).write_text("".join(f"w{n}\n" for n in range(entries - len(vocabulary.SPECIAL))))
    (folder / CODES).write_text("")
    for name in (SOURCES, REFERENCES):
        (folder / name).write_text("w1 w2\n" * counts["test"])
    facts = {"vocabulary": entries, "kind": vocabulary.BPE, "detokenized": False}
    write_manifest(folder, benchmark, counts, {**facts, "source_language": "qaa", "target_language": "qab"})
