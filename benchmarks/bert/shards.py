"""Temporary sample shards, and their concatenation to a part's arrays.

Samples are shuffled in memory within a shard. A global shuffle is not needed: training reads the samples in a random
order, new in every epoch (pytorch/data.py).
"""

from pathlib import Path
from typing import Dict, Iterable, Sequence

import numpy as np

from benchmarks.bert.masking import stream
from benchmarks.common.data.arrays import write_header
from benchmarks.common.data.files import in_one_step
from benchmarks.language import ARRAYS
from benchmarks.language.arrays import Samples

_SEED = 2  # after the seeds of the parts: shuffles


def shuffled(samples: Samples, seed: int, part: str, number: int = 0) -> Samples:
    # Return the samples of shard ``number`` in random order.
    return samples.take(stream(seed, _SEED, len(part), number).permutation(len(samples)))


def join(parts: Iterable[Samples]) -> Samples:
    # Concatenate samples.
    parts, joined = list(parts), []
    for name, kind in ARRAYS.items():
        arrays = [getattr(part, name) for part in parts]
        if "offsets" in name:
            counts = [np.zeros(1, kind), *(np.diff(array) for array in arrays)]
            joined.append(np.cumsum(np.concatenate(counts), dtype=np.int64))
        else:
            joined.append(np.concatenate([np.zeros(0, kind), *arrays]))
    return Samples(*joined)


def write(stem: str, samples: Samples) -> None:
    with in_one_step(Path(f"{stem}.npz")) as file:
        np.savez(file, **{name: getattr(samples, name).astype(kind) for name, kind in ARRAYS.items()})


def read(stem: str) -> Samples:
    with np.load(f"{stem}.npz") as arrays:
        return Samples(**arrays)


def write_part(part: str, stems: Sequence[str], folder: Path) -> Dict[str, int]:
    """Write a part's arrays from its shards; return the lengths, for offsets without the first."""
    counts = dict.fromkeys(ARRAYS, 0)
    for stem in stems:
        with np.load(f"{stem}.npz") as arrays:
            for name in ARRAYS:
                counts[name] += len(arrays[name]) - ("offsets" in name)
    for name, kind in ARRAYS.items():
        is_offsets, last = "offsets" in name, 0
        with in_one_step(folder / f"{part}_{name}.npy") as file:
            write_header(file, np.dtype(kind), counts[name] + is_offsets)
            file.write(np.zeros(int(is_offsets), kind).tobytes())
            for stem in stems:
                with np.load(f"{stem}.npz") as arrays:
                    values = arrays[name]
                if is_offsets:
                    values, last = values[1:] + last, last + int(values[-1])
                file.write(values.tobytes())
    return counts
