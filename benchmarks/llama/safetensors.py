"""Reader and writer of Hugging Face's safetensors; tensors can be read partially.

File format: header length (uint64, little-endian), a JSON header with ``dtype``, ``shape`` and ``data_offsets`` per
tensor (offsets start after the header), and the data (https://github.com/huggingface/safetensors). Models with more
than one file have an index, NAME.safetensors.index.json, that maps tensors to files (``weight_map``).
"""

import json
import math
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Tuple

import numpy as np

from benchmarks.common.data.files import in_one_step
from benchmarks.common.data.problem import Problem

INDEX = ".safetensors.index.json"
LONGEST_HEADER = 100_000_000  # bytes, limit of the format
# NumPy lacks bfloat16: read as uint16.
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
HINT = "copy it again"


class Stored(NamedTuple):
    """A tensor in a file, not yet read."""

    path: Path
    kind: str  # of TYPES
    shape: Tuple[int, ...]
    begin: int  # bytes of the file before it

    @property
    def values(self) -> np.ndarray:
        """Memory map of the tensor; BF16 as uint16."""
        return np.memmap(self.path, TYPES[self.kind], "r", self.begin, self.shape)


def tensors_of(path: Path) -> Dict[str, Stored]:
    """Return the tensors in a file, or in an index's files, by name; reads only the headers.

    Raises:
        Problem: a file is missing or damaged.
    """
    if not path.name.endswith(INDEX):
        return _tensors_in(path)
    placed = _object(_read(path), path).get("weight_map")
    if not isinstance(placed, dict) or not all(
        isinstance(entry, str) and Path(entry).name == entry for entry in placed.values()
    ):
        raise Problem(f"{path} has no weight_map of files next to it", "a safetensors index", HINT)
    files = {name: _tensors_in(path.with_name(name)) for name in sorted(set(placed.values()))}
    missing = [name for name, file in placed.items() if name not in files[file]]
    if missing:
        raise Problem(f"{missing[0]} is not in {placed[missing[0]]}", f"as {path} has it", HINT)
    return {name: files[file][name] for name, file in placed.items()}


def _read(path: Path, start: int = 0, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(size)
    except OSError as error:
        raise Problem(f"cannot read {path}: {error.strerror}", "weights of a model as safetensors", HINT) from None


def _object(content: bytes, path: Path) -> Dict[str, Any]:
    try:
        header = json.loads(content)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise Problem(f"{path} has no JSON header", "a safetensors file", HINT)
    return header


def _tensors_in(path: Path) -> Dict[str, Stored]:
    length = int.from_bytes(_read(path, 0, 8), "little")
    header = _object(_read(path, 8, length) if length <= LONGEST_HEADER else b"", path)
    header.pop("__metadata__", None)
    tensors, first, size = {}, 8 + length, path.stat().st_size
    for name, entry in header.items():
        try:
            kind, shape, (start, end) = str(entry["dtype"]), tuple(map(int, entry["shape"])), entry["data_offsets"]
            fits = min((0, *shape)) == 0 <= start and first + end <= size
            has_size = end - start == math.prod(shape) * np.dtype(TYPES[kind]).itemsize
        except (KeyError, TypeError, ValueError):
            raise Problem(f"{path}: {name} is {entry}", f"a tensor of {', '.join(TYPES)}", HINT) from None
        if not (fits and has_size):
            raise Problem(
                f"{path}: {name} of {shape} is at {start} to {end}",
                "a range within the file, of the tensor's size",
                HINT,
            )
        tensors[name] = Stored(path, kind, shape, first + start)
    return tensors


def write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors of fp32 as a file of PyTorch's."""
    header: Dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [end, end + array.size * 4]}
        end += array.size * 4
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # align the data to the element size
    with in_one_step(path) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array, "<f4").tobytes())
