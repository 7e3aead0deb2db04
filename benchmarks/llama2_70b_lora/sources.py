"""Raw preparation data: MLPerf's packed samples, texts with summaries, or the toy data set.

A file has one JSON row per line, or is Parquet (pyarrow, from requirements/hub.txt). A row of MLPerf's packed GovReport
has ``input_ids`` and ``labels`` of equal length, with label -100 for tokens excluded from the loss; a row of GovReport
itself (SCROLLS, Shaham et al. 2022, arXiv 2201.03533) has ``input`` and ``output``.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple

from benchmarks.common.data import text_files
from benchmarks.common.data.problem import Problem
from benchmarks.llama.tokenization import FILE

NAME = "gov-report"  # of MLPerf's samples
ENDINGS = (".parquet", ".jsonl", ".json")
EXPECTED = "train*.parquet or .jsonl (also .gz, .bz2, .xz), and the same of validation* or test*"
PACKED, TEXT = ("input_ids", "labels"), ("input", "output")
MANIFEST = "hub.json"  # encore/hub.py
TOGETHER = 64  # rows of Parquet that are decoded at a time


class Source(NamedTuple):
    """Files per part, and the tokenizer."""

    files: Dict[str, Tuple[Path, ...]]
    tokenizer: Optional[Path]  # packed samples need none
    is_packed: bool


def find(args: argparse.Namespace) -> Source:
    """Find the raw data.

    Raises:
        Problem: a part is missing or incomplete, or texts lack a tokenizer.
    """
    origin: Path = args.origin
    all_files = sorted(origin.iterdir()) if origin.is_dir() else [origin]
    raw = [path for path in all_files if text_files.plain_name(path).endswith(ENDINGS) and path.name != FILE]
    test = tuple(path for path in raw if "valid" in path.name or "test" in path.name)
    train = tuple(path for path in raw if "train" in path.name)
    names = {text_files.SHARD.sub(r"\1\4", path.name) for path in (*train, *test)}
    if not train or not test or len(names) > 2:
        problem = f"{origin} has {len(train)} files for training, {len(test)} for evaluation"
        raise Problem(problem, f"{EXPECTED}, each one file or shards", "link the two into a separate folder")
    text_files.check_shards(train)
    text_files.check_shards(test)
    tokenizer = args.tokenizer or next((path for path in all_files if path.name == FILE), None)
    first: Dict[str, Any] = next((row for _, row in rows(train[:1])), {})
    is_packed = PACKED[0] in first
    if not is_packed and tokenizer is None:
        raise Problem(f"{origin} has texts and no {FILE}", "the tokenizer of the model", "pass it with --tokenizer")
    return Source({"train": train, "test": test}, tokenizer, is_packed)


def rows(paths: Sequence[Path]) -> Iterator[Tuple[str, Dict[str, Any]]]:
    """Yield location (for messages) and content of all rows.

    Raises:
        Problem: a file is damaged, or pyarrow is not installed for a Parquet file.
    """
    for path in paths:
        if path.suffix == ".parquet":
            yield from ((f"{path}, row {number:,}", row) for number, row in enumerate(_of_parquet(path), 1))
        else:
            lines = text_files.json_lines(path, "a row per line")
            yield from ((f"{path}, line {number:,}", row) for number, row in lines)


def _of_parquet(path: Path) -> Iterator[Dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        hint = "prepare on the host without --python, where encore installs pyarrow, or write the rows as lines of JSON"
        raise Problem(f"{path} needs pyarrow: {error}", "pyarrow, or a .jsonl", hint) from None
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(str(path)).iter_batches(TOGETHER):
            for row in batch.to_pylist():
                number += 1
                yield row
    except (ValueError, OSError, LookupError, TypeError, NotImplementedError) as error:  # bases of pyarrow's errors
        raise Problem(f"{path} is damaged after row {number:,}: {error}", "Parquet", "copy it again") from None


def commit_of(origin: Path) -> Dict[str, str]:
    """Return repository and commit of files that `encore data get` downloaded; empty for other files."""
    for path in (origin / MANIFEST, origin.parent / MANIFEST):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return {key: str(content[key]) for key in ("repository", "revision")}
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return {}
