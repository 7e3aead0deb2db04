"""The shuffle of all samples by external passes: each sample draws a bucket, each bucket is shuffled in memory.

A shard's samples are written grouped by bucket. A bucket's worker reads its slice of every shard, permutes them and
writes them to their place in the arrays of the whole part, whose sizes are known by then.
"""

from __future__ import annotations

from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from benchmarks.bert.masking import stream
from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.files import allocate, in_one_step
from benchmarks.common.data.workers import Report
from benchmarks.language import ARRAYS
from benchmarks.language.arrays import Samples

SIZES = ("samples", "tokens", "masked")
# The count that is each array's length.
_UNIT = {
    "tokens": "tokens",
    "offsets": "samples",
    "second": "samples",
    "masked_places": "masked",
    "masked_labels": "masked",
    "masked_offsets": "samples",
    "next": "samples",
}
_SEED = 2  # behind those of the parts: the bucket's own random numbers


class Bucket(NamedTuple):
    """One bucket of a part."""

    number: int
    part: str
    shards: Tuple[str, ...]  # stems of the files of all shards
    begins: Tuple[int, ...]  # samples, tokens and masked words of the buckets before it
    samples: int
    folder: str
    seed: int

    @property
    def done_path(self) -> Path:
        """The file of its facts, which marks it as done."""
        return Path(self.folder) / f"{self.part}-{self.number:05}.bucket.json"


def join(parts: Sequence[Samples]) -> Samples:
    """Return the samples of all parts, one after the other."""
    joined = []
    for name, kind in ARRAYS.items():
        arrays = [getattr(part, name) for part in parts]
        if "offsets" in name:
            counts = [np.zeros(1, kind), *(np.diff(each) for each in arrays)]
            joined.append(np.cumsum(np.concatenate(counts), dtype=np.int64))
        else:
            joined.append(np.concatenate([np.zeros(0, kind), *arrays]))
    return Samples(*joined)


# -- what a shard leaves ---------------------------------------------------------------------------------------


def write_grouped(stem: str, samples: Samples, bucket_of: np.ndarray, buckets: int) -> None:
    """Write the samples of a shard in the order of their buckets, and where each bucket begins."""
    ordered = samples.take(np.argsort(bucket_of, kind="stable"))
    firsts = np.searchsorted(np.sort(bucket_of), np.arange(buckets + 1))
    table = np.stack([firsts, ordered.offsets[firsts], ordered.masked_offsets[firsts]]).astype("<i8")
    with in_one_step(Path(f"{stem}.table")) as file:
        file.write(table.tobytes())
    for name, kind in ARRAYS.items():
        values = getattr(ordered, name)
        counted = np.diff(values) if "offsets" in name else values
        with in_one_step(Path(f"{stem}.{name}")) as file:
            file.write(counted.astype(kind).tobytes())


def table_of(stem: str) -> np.ndarray:
    """Return where each bucket begins in a shard: int64 [samples, tokens, masked; buckets + 1]."""
    return np.fromfile(f"{stem}.table", "<i8").reshape(len(SIZES), -1)


def _read_slice(stem: str, number: int) -> Samples:
    # Return the samples that a shard has for a bucket.
    table = dict(zip(SIZES, table_of(stem)))
    arrays = []
    for name, kind in ARRAYS.items():
        unit, size = table[_UNIT[name]], np.dtype(kind).itemsize
        count = int(unit[number + 1] - unit[number])
        values = np.fromfile(f"{stem}.{name}", kind, count, offset=int(unit[number]) * size)
        arrays.append(np.concatenate(([0], np.cumsum(values))) if "offsets" in name else values)
    return Samples(*arrays)


# -- what a bucket writes --------------------------------------------------------------------------------------


def gather(part: str, shards: Sequence[str], number: int, seed: Optional[int]) -> Samples:
    """Return all samples of a bucket, shuffled; in their order where there is no seed."""
    samples = join([_read_slice(stem, number) for stem in shards])
    if seed is None:
        return samples
    random = stream(seed, _SEED, len(part), number)
    return samples.take(random.permutation(len(samples)))


def plan(part: str, shards: Sequence[str], folder: Path, seed: int) -> List[Bucket]:
    """Make the arrays of a part with their size, and return the buckets that fill them."""
    sizes = np.diff(np.sum([table_of(stem) for stem in shards], axis=0), axis=1)
    begins = np.concatenate([np.zeros((len(SIZES), 1), np.int64), np.cumsum(sizes, axis=1)], axis=1)
    found = [
        Bucket(
            number, part, tuple(shards), tuple(map(int, begins[:, number])), int(sizes[0, number]), str(folder), seed
        )
        for number in range(sizes.shape[1])
    ]
    totals = dict(zip(SIZES, map(int, begins[:, -1])))
    fresh = [
        _create(folder / f"{part}_{name}.npy", kind, totals[_UNIT[name]] + ("offsets" in name))
        for name, kind in ARRAYS.items()
    ]
    for bucket in found if any(fresh) else ():
        bucket.done_path.unlink(missing_ok=True)
    return found


def _create(path: Path, kind: str, count: int) -> bool:
    # Make the file of an array at its full size, zeros; return whether it is new.
    if path.exists():
        return False
    partial = path.with_name(f"{path.name}.partial")
    np.lib.format.open_memmap(str(partial), "w+", np.dtype(kind), (count,))
    allocate(partial, partial.stat().st_size)
    partial.replace(path)
    return True


def fill(bucket: Bucket, report: Report) -> Tuple[int, int]:
    """Write a bucket's samples to their place in the arrays of the part."""
    samples = gather(bucket.part, bucket.shards, bucket.number, bucket.seed)
    begins = dict(zip(SIZES, bucket.begins))
    added = {"offsets": begins["tokens"], "masked_offsets": begins["masked"]}
    for name in ARRAYS:
        values, place = getattr(samples, name), begins[_UNIT[name]]
        if name in added:
            values, place = values[1:] + added[name], place + 1
        array = np.load(str(Path(bucket.folder) / f"{bucket.part}_{name}.npy"), mmap_mode="r+")
        array[place : place + len(values)] = values
        array.flush()
    bucket.done_path.write_text("{}")
    return bucket.samples, 0


def write_whole(part: str, samples: Samples, folder: Path) -> None:
    """Write the arrays of a part that fits into memory."""
    for name, kind in ARRAYS.items():
        write_array(folder / f"{part}_{name}.npy", getattr(samples, name).astype(kind))
