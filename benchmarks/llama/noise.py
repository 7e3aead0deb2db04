"""Synthetic data with the sizes of the real data set, to measure the step speed."""

from pathlib import Path

import numpy as np

from benchmarks.common.checks.selftest import write_manifest
from benchmarks.llama.dataset import PARTS
from benchmarks.llama.megatron import type_for, write_index

DOCUMENTS = {"train": 2000, "test": 200}
TOKENS = 500  # mean tokens per document, similar to C4


def write(folder: Path, entries: int = 128256) -> None:
    # Write documents of random tokens from a vocabulary with ``entries`` entries.
    random, kind = np.random.RandomState(0), type_for(entries)
    tokens = {}
    for part in PARTS:
        lengths = random.randint(1, 2 * TOKENS, DOCUMENTS[part])
        tokens[part] = int(lengths.sum())
        random.randint(entries, size=tokens[part]).astype(kind).tofile(str(folder / f"{part}.bin"))
        with (folder / f"{part}.idx").open("wb") as file:
            write_index(file, lengths.tolist(), kind)
    write_manifest(folder, "llama31-8b", DOCUMENTS, {"vocabulary": entries, "tokens": tokens, "documents": DOCUMENTS})
