"""NumPy files of a data set: written so that a full disk shows, read as memory maps, compared with the manifest."""

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

Expected = Tuple[str, int, int]  # a thing that is counted, how many there are, and how many there should be


def write_array(path: Path, values: np.ndarray) -> None:
    """Write an array in one step: it is there whole or not at all."""
    with in_one_step(path) as file:
        # Not as a file: numpy would write it itself, and lose the error of its last write.
        np.save(SimpleNamespace(write=file.write), values)


def write_header(file: BinaryIO, kind: "np.dtype[Any]", count: int) -> int:
    """Begin a file of ``count`` values of a type, which follow; returns its length so far, in bytes."""
    header = {"descr": kind.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()


def mapped(path: Path, kind: str) -> np.ndarray:
    """Return the one-dimensional array of type ``kind``, such as ``<u2``, in a file, as a memory map.

    Raises:
        Problem: it has another type or shape.
        OSError, EOFError, ValueError: it cannot be read, or is no file of NumPy.
    """
    array: np.ndarray = np.load(str(path), mmap_mode="r")
    if array.dtype.str != kind or array.ndim != 1:
        problem = f"{path} has {array.dtype.str} {list(array.shape)}"
        raise Problem(problem, f"{kind} in one dimension", prepare_again(path.parent))
    return array


@dataclass(frozen=True)
class Sequences:
    """Sequences of tokens, one after the other."""

    tokens: np.ndarray  # [tokens], a memory map
    offsets: np.ndarray  # int64 [sequences + 1], a memory map

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [sequences]: tokens of each; read when first asked for."""
        return np.diff(self.offsets).astype(np.int32)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


@contextmanager
def opening(folder: Path, kind: str) -> Iterator[None]:
    """Open a data set for ``kind``.

    Raises:
        Problem: in place of what a missing, damaged or other file or fact raises.
    """
    try:
        yield
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        # The text of an OSError names the file, its representation does not.
        problem = str(error) if isinstance(error, OSError) else repr(error)
        raise Problem(f"{folder}: {problem}", f"a data set for {kind}", prepare_again(folder)) from None


def check_sizes(folder: Path, manifest: Mapping[str, Any], expected: Sequence[Expected]) -> None:
    """Refuse what is not as ``expected``, and a file whose size is not the manifest's; reads no file."""
    files = [file for split in manifest["splits"].values() for file in split["files"]]
    sizes = [(f"bytes in {file['name']}", (folder / file["name"]).stat().st_size, file["bytes"]) for file in files]
    for unit, got, want in (*expected, *sizes):
        if got != want:
            raise Problem(f"{folder}: {got:,} {unit}", f"{want:,}", prepare_again(folder))
