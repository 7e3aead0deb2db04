"""Data set files in NumPy format: written with detection of full disks, memory-mapped, checked against the manifest."""

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, Iterator, Mapping, Sequence, Tuple

import numpy as np

from benchmarks.common.data.files import in_one_step
from benchmarks.common.data.manifest import prepare_again
from benchmarks.common.data.problem import Problem

Expected = Tuple[str, int, int]  # quantity, actual number, expected number


def write_array(path: Path, values: np.ndarray) -> None:
    """Write an array atomically."""
    with in_one_step(path) as file:
        # Not to the file itself: numpy would use its own file handle and ignore the error of the last write.
        np.save(SimpleNamespace(write=file.write), values)


def write_header(file: BinaryIO, kind: "np.dtype[Any]", count: int) -> int:
    """Write a file header for ``count`` values of type ``kind``; return the header's length in bytes."""
    header = {"descr": kind.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()


def mapped(path: Path, kind: str) -> np.ndarray:
    """Memory-map a one-dimensional array of type ``kind``, such as ``<u2``.

    Raises:
        Problem: wrong type or shape.
        OSError, EOFError, ValueError: unreadable, or not a NumPy file.
    """
    array: np.ndarray = np.load(str(path), mmap_mode="r")
    if array.dtype.str != kind or array.ndim != 1:
        raise Problem(
            f"{path} has {array.dtype.str} {list(array.shape)}", f"{kind} in one dimension", prepare_again(path.parent)
        )
    return array


@dataclass(frozen=True)
class Sequences:
    """Concatenated token sequences."""

    tokens: np.ndarray  # [tokens], a memory map
    offsets: np.ndarray  # int64 [sequences + 1], a memory map

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [sequences]: sequence lengths, read on first use."""
        return np.diff(self.offsets).astype(np.int32)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


@contextmanager
def opening(folder: Path, kind: str) -> Iterator[None]:
    """Convert errors while opening a data set for ``kind``.

    Raises:
        Problem: a file or fact is missing, damaged or different.
    """
    try:
        yield
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        # An OSError's str() includes the file name, its repr() does not.
        problem = str(error) if isinstance(error, OSError) else repr(error)
        raise Problem(f"{folder}: {problem}", f"a data set for {kind}", prepare_again(folder)) from None


def check_sizes(folder: Path, manifest: Mapping[str, Any], expected: Sequence[Expected]) -> None:
    """Reject unexpected counts and file sizes that differ from the manifest; does not read any file."""
    files = [file for split in manifest["splits"].values() for file in split["files"]]
    sizes = [(f"bytes in {file['name']}", (folder / file["name"]).stat().st_size, file["bytes"]) for file in files]
    for unit, got, want in (*expected, *sizes):
        if got != want:
            raise Problem(f"{folder}: {got:,} {unit}", f"{want:,}", prepare_again(folder))
