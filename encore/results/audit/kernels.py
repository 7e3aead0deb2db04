"""Precisions in a profiled step, from kernel names or operator input types.

from encore.results.audit.kernels import read_profile
for part, precision in read_profile(Path("profile.json")).items():
    print(part, precision.lowest, precision.example)
"""

import csv
import functools
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore.files import Bounded, max_unpacked, read_toml

# Bits of mlperf-logging's precision names, for comparison; TF32 has 19 bits of 32
BITS: Mapping[str, int] = {
    "fp64": 64, "fp32": 32, "tf32": 19, "fp16": 16, "bfloat16": 16, "Graphcore FLOAT 16.16": 16, "fp8": 8, "int8": 8,
    "uint8": 8, "mxfp6": 6, "nvfp4": 4, "mxfp4": 4, "int4": 4, "uint4": 4,
}  # fmt: skip
PROFILES = (".json", ".json.gz", ".csv")  # Suffixes of the files that can be read
_DAMAGED = (zlib.error, csv.Error)
Names = Iterator[tuple[str, tuple[str, ...]]]  # Kernel or operator names with input types of the operators


@dataclass(frozen=True)
class Precision:
    """Precision in one part of a step: linear layers, attention or communication."""

    lowest: frozenset[str]  # Names of the lowest precision
    example: str = ""  # Kernel or operator with this precision
    unknown: str = ""  # Kernel that is not in the table and may have a lower precision

    def contradicts(self, declared: str) -> bool:
        """Return whether ``declared`` differs; a lower precision only counts if all names are known."""
        if not self.lowest or declared not in BITS or declared in self.lowest:
            return False
        return not self.unknown or BITS[declared] >= _min_bits(self.lowest)


@functools.cache
def table() -> dict[str, Any]:
    """Return data/precisions.toml."""
    return read_toml(Path(__file__).parents[1] / "data" / "precisions.toml")


def read_profile(path: Path) -> dict[str, Precision]:
    """Return the precisions in a torch.profiler trace (JSON or .gz) or an nsys cuda_gpu_kern_sum (CSV), by part.

    Raises:
        ValueError: the file has another format or cannot be read.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            text = Bounded(file, max_unpacked(path)).read().decode("utf-8")
        names = _parse_nsys(text) if path.suffix == ".csv" else _parse_trace(json.loads(text))
        return lowest_precisions(names)
    # A damaged file can be wrong in any of these ways.
    except (OSError, EOFError, LookupError, TypeError, AttributeError, RecursionError, ValueError, *_DAMAGED) as error:
        raise ValueError(f"{path.name} is not a profile: {error}") from None


def lowest_precisions(names: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, Precision]:
    """Return the lowest precision per part of kernels, and of operators with input types."""
    precisions: dict[str, Precision] = {}
    for name, types in dict.fromkeys(names):
        part, labels = _classify_operator(name, types) if types else classify_kernel(name)
        if part is None:
            continue
        precision = precisions.get(part, Precision(frozenset()))
        if not labels:
            precisions[part] = Precision(precision.lowest, precision.example, name)
        elif not precision.lowest or _min_bits(labels) < _min_bits(precision.lowest):
            precisions[part] = Precision(labels, name, precision.unknown)
        elif _min_bits(labels) == _min_bits(precision.lowest):
            precisions[part] = Precision(precision.lowest | labels, precision.example, precision.unknown)
    return precisions


def classify_kernel(name: str) -> tuple[str | None, frozenset[str]]:
    """Return a kernel's part, None if unknown, and the names of its precision."""
    for row in table()["kernel"]:
        if match := re.search(row["pattern"], name):
            return row["part"], frozenset(row.get("precision") or [table()["types"][match["type"].lower()]])
    unknown = (part for part, pattern in table()["unknown"].items() if re.search(pattern, name, re.IGNORECASE))
    return next(unknown, None), frozenset()


# The lowest of the types that an operator reads; indices and lengths are no precision.
def _classify_operator(name: str, types: Iterable[str]) -> tuple[str | None, frozenset[str]]:
    part = next((part for part, pattern in table()["operators"].items() if re.fullmatch(pattern, name)), None)
    labels = {table()["types"].get(type_name.lower().rpartition("::")[2]) for type_name in types} - {None}
    lowest = min((BITS[word] for word in labels), default=0)
    return (part if labels else None), frozenset(word for word in labels if BITS[word] == lowest)


def _min_bits(labels: Iterable[str]) -> int:
    return min(BITS[word] for word in labels)


# Kernels in a Chrome trace, if any: operators on a GPU do not show TF32.
def _parse_trace(trace: Any) -> Names:
    events = [entry for entry in trace["traceEvents"] if entry.get("ph") == "X"]
    kernels = [entry for entry in events if str(entry.get("cat")).lower() == "kernel"]
    yield from ((str(entry["name"]), ()) for entry in kernels)
    for event in () if kernels else events:
        arguments = event.get("args") or {}
        yield str(event["name"]), tuple(map(str, arguments.get("Input type") or [arguments.get("dtype", "")]))


def _parse_nsys(text: str) -> Names:
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if line.lstrip('"').startswith("Time (%)")), None)
    if first is None:
        raise KeyError("no header of cuda_gpu_kern_sum")
    yield from ((row["Name"], ()) for row in csv.DictReader(lines[first:]))
