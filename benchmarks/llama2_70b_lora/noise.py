"""Synthetic data with the sizes of the real data set, to measure the step speed."""

from pathlib import Path

import numpy as np

from benchmarks.common.checks.selftest import write_manifest
from benchmarks.llama2_70b_lora.dataset import PARTS

SAMPLES = {"train": 64, "test": 8}


def write(folder: Path, length: int = 8192, entries: int = 32000) -> None:
    # Write samples of random tokens. All tokens are included in the loss.
    random = np.random.RandomState(0)
    for part in PARTS:
        shape = (SAMPLES[part], length)
        np.save(str(folder / f"{part}_tokens.npy"), random.randint(entries, size=shape).astype(np.int32))
        np.save(str(folder / f"{part}_counts.npy"), np.ones(shape, bool))
    write_manifest(folder, "llama2-70b-lora", SAMPLES, {"vocabulary": entries, "sequence_length": length})
