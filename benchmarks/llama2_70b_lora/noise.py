"""A synthetic data set with the sizes of the real one, to measure the speed of a step; nothing of it can be learnt."""

from pathlib import Path

import numpy as np

from benchmarks.common.checks.selftest import write_manifest
from benchmarks.llama2_70b_lora.dataset import PARTS

SAMPLES = {"train": 64, "test": 8}


def write(folder: Path, length: int = 8192, entries: int = 32000) -> None:
    # Write samples of random tokens, all of which count.
    random = np.random.RandomState(0)
    for part in PARTS:
        shape = (SAMPLES[part], length)
        np.save(str(folder / f"{part}_tokens.npy"), random.randint(entries, size=shape).astype(np.int32))
        np.save(str(folder / f"{part}_counts.npy"), np.ones(shape, bool))
    write_manifest(folder, "llama2-70b-lora", SAMPLES, {"vocabulary": entries, "sequence_length": length})
