"""Raw preparation data, by file name: Megatron files, JSON lines or text; or the toy data set."""

import argparse
import re
from itertools import groupby
from pathlib import Path
from typing import Iterable, Iterator, List, NamedTuple, Optional, Tuple

from benchmarks.common.data import text_files
from benchmarks.common.data.problem import Problem
from benchmarks.language import python_text
from benchmarks.llama.tokenization import FILE

EXPECTED = (
    "c4-train*.bin with .idx, or train*.json, .jsonl or .txt (also .gz, .bz2, .xz), and the same of valid* or test*"
)
JSON_LINES = (".json", ".jsonl")
TEXT = (".txt", ".raw", ".tokens")
HELD_OUT = 20  # one in HELD_OUT documents of the toy data set is used for evaluation


class Source(NamedTuple):
    """Files to prepare, and the name of the data set."""

    name: str
    train: Tuple[Path, ...]
    test: Tuple[Path, ...]
    tokenizer: Optional[Path]  # None to learn it
    is_indexed: bool
    made: str


def find(args: argparse.Namespace) -> Source:
    """Find the raw data.

    Raises:
        Problem: a part or the tokenizer is missing, or more than one indexed file is for training.
    """
    origin: Path = args.origin
    files = sorted(path for path in origin.iterdir() if path.is_file()) if origin.is_dir() else [origin]
    raw = [path for path in files if path.name != FILE]
    kinds = [
        tuple(path for path in raw if text_files.plain_name(path).endswith(suffix))
        for suffix in (".bin", JSON_LINES, TEXT)
    ]
    indexed, of_kind = bool(kinds[0]), next(filter(None, kinds), ())
    train = tuple(path for path in of_kind if "train" in path.name)
    # With both valid and test files, as in WikiText, evaluate on test.
    test_files = [tuple(path for path in of_kind if name in path.name) for name in ("test", "valid")]
    test = next(filter(None, test_files), ())
    if not train or not test:
        raise Problem(
            f"{origin} has {len(train)} files for training, {len(test)} for evaluation", EXPECTED, "name them so"
        )
    if indexed and (len(train) > 1 or len(test) > 1):
        names = ", ".join(path.name for path in (*train, *test))
        raise Problem(
            f"{origin} has {names}",
            "one indexed file per part: the reference trains on c4-train.en_6_text_document only",
            "link the two, each with its .idx, into a separate folder",
        )
    for path in (*train, *test):
        index = path.with_suffix(".idx")
        if indexed and not index.is_file():
            raise Problem(f"{index} does not exist", f"the index of {path.name}", "copy both files")
    text_files.check_shards(train)
    text_files.check_shards(test)
    tokenizer = args.tokenizer or next((path for path in files if path.name == FILE), None)
    if tokenizer is None and not args.vocabulary_size:
        raise Problem(
            f"{origin} has no {FILE}",
            "the tokenizer of the model",
            "pass it with --tokenizer, or train one with --vocabulary-size",
        )
    if args.vocabulary_size and (indexed or tokenizer):
        raise Problem(f"--vocabulary-size with {tokenizer or train[0]}", "text without a tokenizer", "leave it out")
    kind = "Megatron's indexed files" if indexed else f"{len(train) + len(test):,} files of text"
    name = args.name or ("c4" if indexed else origin.stem)
    return Source(name, train, test, tokenizer, indexed, kind)


def documents(path: Path) -> Iterator[str]:
    """Yield a file's documents: "text" of JSON lines, or blocks separated by empty lines.

    Raises:
        Problem: the file is damaged or not UTF-8, or a line is not a JSON object with a text.
    """
    if text_files.plain_name(path).endswith(JSON_LINES):
        for number, row in text_files.json_lines(path, '{"text": "..."}'):
            yield text_files.text_of(row, "text", f"{path}, line {number:,}")
        return
    for has_text, lines in groupby(text_files.lines(path), lambda line: bool(line[1].strip())):
        if has_text:
            yield "".join(_limited(path, lines)).strip()


def _limited(path: Path, lines: Iterable[Tuple[int, str]]) -> Iterator[str]:
    size = 0
    for number, line in lines:
        size += len(line)
        if size > text_files.LONGEST_LINE:
            raise Problem(
                f"{path}, line {number:,}: a document longer than {text_files.LONGEST_LINE:,} characters",
                "documents separated by empty lines",
                "separate them",
            )
        yield line


def toy_data_set(folder: Path, name: Optional[str]) -> Source:
    # Write the toy data set's text; written anew after an interruption, it is the same.
    text_path = folder / "python.text"
    origin_text = python_text.write_text(text_path)
    parts: List[List[str]] = [[], []]
    for number, text in enumerate(re.split(r"\n\n+", text_path.read_text(encoding="utf-8"))):
        parts[number % HELD_OUT == 0].append(text.strip().replace("\n", " "))
    paths = tuple(folder / f"python_{part}.txt" for part in ("train", "test"))
    for path, texts in zip(paths, parts):
        path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return Source(name or python_text.NAME, paths[:1], paths[1:], None, False, origin_text)
