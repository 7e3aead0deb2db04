"""Completeness of safetensors files, without reading tensors: shards of an index, and sizes from the headers.

Format: header length (uint64, little-endian), JSON header with ``data_offsets`` per tensor, data
(https://github.com/huggingface/safetensors).
"""

import json
from pathlib import Path
from typing import Any

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes, limit of the format
LISTED = 3  # Missing shards in a message


def shards(path: Path) -> list[Path]:
    """Return the files of an index, sorted by name; only ``path`` for other files or an unreadable index."""
    if not path.name.endswith(INDEX):
        return [path]
    try:
        files = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        return [path.with_name(name) for name in sorted(files)] or [path]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return [path]


def problem(path: Path) -> str:
    """Return the reason why ``path``, a file or an index, cannot be used as weights, or an empty string."""
    files = shards(path)
    if path.name.endswith(INDEX) and files == [path]:
        return f"{path} contains no weights: no weight_map of {SUFFIX} files"
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
        return f"{len(missing)} of {len(files)} files of {path} do not exist: {', '.join(missing[:LISTED])}{more}"
    return next(filter(None, map(_file_problem, files)), "")


def _file_problem(path: Path) -> str:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(length, MAX_HEADER)))
        ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
    except OSError as error:
        return f"{path}: {error.strerror}"
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return f"{path} is not a {SUFFIX} file"
    size, expected = path.stat().st_size, 8 + length + max(ends, default=0)
    if not ends:
        return f"{path} contains no weights"
    return "" if size >= expected else f"{path} is incomplete: {size:,} of {expected:,} bytes"
