"""The shuffle of all samples by external passes: each sample draws a bucket, each bucket is shuffled in memory.

A shard's samples are written grouped by bucket. A bucket's worker reads its slice of every shard, permutes them and
writes them to their place in the arrays of the whole part, whose sizes are known by then.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from benchmarks.bert.masking import stream
from benchmarks.common.data.arrays import write_header
from benchmarks.common.data.workers import Report
from benchmarks.language.arrays import ARRAYS, Samples

SIZES = ("samples", "tokens", "masked")
_UNIT = {
    "tokens": "tokens",
    "offsets": "samples",
    "second": "samples",
    "masked_places": "masked",
    "masked_labels": "masked",
    "masked_offsets": "samples",
    "next": "samples",
}
"""What each array is as long as."""
_SEED = 2
"""Behind those of the parts: the bucket's own random numbers."""


class Bucket(NamedTuple):
    """One bucket of a part."""

    number: int
    part: str
    shards: Tuple[str, ...]
    """Stems of the files of all shards."""
    begins: Tuple[int, ...]
    """Samples, tokens and masked words of the buckets before it."""
    samples: int
    folder: str
    seed: int

    @property
    def facts_path(self) -> Path:
        """The file that says that it is done."""
        return Path(self.folder) / f"{self.part}-{self.number:05}.bucket.json"


def _empty() -> Samples:
    starts = np.zeros(1, np.int64)
    return Samples(*(starts if "offsets" in name else np.zeros(0, kind) for name, kind in ARRAYS.items()))


def join(parts: Sequence[Samples]) -> Samples:
    """Return the samples of all parts, one after the other."""
    parts = parts or [_empty()]
    joined = []
    for name in ARRAYS:
        arrays = [getattr(part, name) for part in parts]
        if "offsets" in name:
            counts = np.concatenate([np.diff(each) for each in arrays])
            joined.append(np.concatenate(([0], np.cumsum(counts, dtype=np.int64))))
        else:
            joined.append(np.concatenate(arrays))
    return Samples(*joined)


def take(samples: Samples, order: np.ndarray) -> Samples:
    """Return the samples ``order`` in that order."""
    tokens, offsets = _take_ragged(order, samples.offsets, samples.tokens)
    places, masked_offsets = _take_ragged(order, samples.masked_offsets, samples.masked_places)
    labels, _ = _take_ragged(order, samples.masked_offsets, samples.masked_labels)
    return Samples(tokens, offsets, samples.second[order], places, labels, masked_offsets, samples.next[order])


def _take_ragged(order: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    counts = np.diff(offsets)[order]
    found = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    if not len(order):
        return values[:0], found
    return np.concatenate([values[offsets[each] : offsets[each + 1]] for each in order.tolist()]), found


# -- what a shard leaves ---------------------------------------------------------------------------------------


def write_grouped(stem: str, samples: Samples, bucket_of: np.ndarray, buckets: int) -> None:
    """Write the samples of a shard in the order of their buckets, and where each bucket begins."""
    ordered = take(samples, np.argsort(bucket_of, kind="stable"))
    firsts = np.searchsorted(np.sort(bucket_of), np.arange(buckets + 1))
    table = np.stack([firsts, ordered.offsets[firsts], ordered.masked_offsets[firsts]]).astype("<i8")
    write_in_one_step(Path(f"{stem}.table"), table.tobytes())
    for name, kind in ARRAYS.items():
        values = getattr(ordered, name)
        counted = np.diff(values) if "offsets" in name else values
        write_in_one_step(Path(f"{stem}.{name}"), counted.astype(kind).tobytes())


def write_in_one_step(path: Path, content: bytes) -> None:
    """Write a file; what a killed worker leaves has its process id for a suffix."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


def table_of(stem: str) -> np.ndarray:
    """Return where each bucket begins in a shard: int64 [samples, tokens, masked; buckets + 1]."""
    return np.fromfile(f"{stem}.table", "<i8").reshape(len(SIZES), -1)


def _read_slice(stem: str, number: int) -> Samples:
    """Return the samples that a shard has for a bucket."""
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
    return take(samples, random.permutation(len(samples)))


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
    if not _make_arrays(folder, part, totals):
        for bucket in found:
            bucket.facts_path.unlink(missing_ok=True)
    return found


def _make_arrays(folder: Path, part: str, totals: Dict[str, int]) -> bool:
    """Make the files of a part at their full size; return whether they were there already."""
    present = True
    for name, kind in ARRAYS.items():
        count = totals[_UNIT[name]] + ("offsets" in name)
        path = folder / f"{part}_{name}.npy"
        size = _header(path, kind, count) if not path.exists() else _data_begin(path)
        whole = size + count * np.dtype(kind).itemsize
        if path.stat().st_size != whole:
            present = False
            size = _header(path, kind, count)
            with path.open("r+b") as file:
                # Room for all of it: a write into a memory map that finds none would kill the process.
                os.posix_fallocate(file.fileno(), 0, whole)
    return present


def _header(path: Path, kind: str, count: int) -> int:
    with path.open("wb") as file:
        return write_header(file, np.dtype(kind), count)


def _data_begin(path: Path) -> int:
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        return file.tell()


def fill(bucket: Bucket, report: Report) -> Tuple[int, int]:
    """Write a bucket's samples to their place in the arrays of the part."""
    samples = gather(bucket.part, bucket.shards, bucket.number, bucket.seed)
    begins = dict(zip(SIZES, bucket.begins))
    added = {"offsets": begins["tokens"], "masked_offsets": begins["masked"]}
    for name, kind in ARRAYS.items():
        values = getattr(samples, name)
        place = begins[_UNIT[name]]
        if name in added:
            values, place = values[1:] + added[name], place + 1
        path = Path(bucket.folder) / f"{bucket.part}_{name}.npy"
        begin = _data_begin(path) + place * np.dtype(kind).itemsize
        with path.open("r+b") as file:
            file.seek(begin)
            file.write(values.astype(kind).tobytes())
    bucket.facts_path.write_text("{}")
    return bucket.samples, 0


def write_whole(part: str, samples: Samples, folder: Path) -> None:
    """Write the arrays of a part that fits into memory."""
    for name, kind in ARRAYS.items():
        values: Any = getattr(samples, name).astype(kind)
        path = folder / f"{part}_{name}.npy"
        _header(path, kind, len(values))
        with path.open("ab") as file:
            file.write(values.tobytes())
