"""The raw data of a preparation: packed samples as MLPerf has them, or texts with their summaries; or the toy set's.

A file has a row a line (JSON) or is Parquet, for which pyarrow must be installed. A row of MLPerf's packed GovReport
has ``input_ids`` and ``labels`` of one length, a label of -100 where the loss does not count the token; a row of
GovReport itself (SCROLLS, Shaham et al. 2022, arXiv 2201.03533) has ``input`` and ``output``.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple, Optional, Tuple

from benchmarks.common.data import source_checks
from benchmarks.common.data.problem import Problem
from benchmarks.llama.tokenization import FILE

NAME = "gov-report"  # of MLPerf's samples
ENDINGS = (".parquet", ".jsonl", ".json")
EXPECTED = "train*.parquet or .jsonl, and the same of validation* or test*"
PACKED, TEXT = ("input_ids", "labels"), ("input", "output")
TOGETHER = 64  # rows of Parquet that are decoded at a time


class Source(NamedTuple):
    """A file of each part, and the tokenizer."""

    files: Dict[str, Path]
    tokenizer: Optional[Path]  # packed samples need none
    is_packed: bool


def find(args: argparse.Namespace) -> Source:
    """Return what the raw data hold.

    Raises:
        Problem: a part is not one file, or texts have no tokenizer.
    """
    origin: Path = args.origin
    every = sorted(origin.iterdir()) if origin.is_dir() else [origin]
    raw = [path for path in every if path.name.endswith(ENDINGS) and path.name != FILE]
    held = [path for path in raw if "valid" in path.name or "test" in path.name]
    train = [path for path in raw if "train" in path.name]
    if len(train) != 1 or len(held) != 1:
        found = f"{origin} has {len(train)} files for training, {len(held)} for evaluation"
        raise Problem(found, EXPECTED, "link the two into a folder of their own")
    tokenizer = args.tokenizer or next((path for path in every if path.name == FILE), None)
    first: Dict[str, Any] = next(rows(train[0]), {})
    is_packed = PACKED[0] in first
    if not is_packed and tokenizer is None:
        raise Problem(f"{origin} has texts and no {FILE}", "the tokenizer of the model", "name it with --tokenizer")
    return Source({"train": train[0], "test": held[0]}, tokenizer, is_packed)


def rows(path: Path) -> Iterator[Dict[str, Any]]:
    """Yield the rows of a file.

    Raises:
        Problem: it is damaged, or this Python has no pyarrow for a Parquet file.
    """
    if path.suffix == ".parquet":
        yield from _of_parquet(path)
        return
    source_checks.refuse_compressed(path, "lines of JSON")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise Problem(f"{path}, line {number:,}: no JSON object", "a row a line", "fix the line")
            yield found


def _of_parquet(path: Path) -> Iterator[Dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        hint = "install pyarrow into the Python that prepares, or write the rows as lines of JSON"
        raise Problem(f"{path} needs pyarrow: {error}", "pyarrow, or a .jsonl", hint) from None
    try:
        for batch in pyarrow.parquet.ParquetFile(str(path)).iter_batches(TOGETHER):
            yield from batch.to_pylist()
    except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
        raise Problem(f"{path}: {error}", "Parquet", "copy it again") from None


def field(row: Dict[str, Any], names: Tuple[str, str], kind: type, path: Path, number: int) -> Tuple[Any, Any]:
    """Return two fields of a row.

    Raises:
        Problem: it has not both, of this type.
    """
    found = row.get(names[0]), row.get(names[1])
    if not all(isinstance(each, kind) for each in found):
        wanted = f"{names[0]} and {names[1]} in each"
        raise Problem(f"{path}, row {number:,} has {', '.join(row)}", wanted, "fix the row")
    return found
