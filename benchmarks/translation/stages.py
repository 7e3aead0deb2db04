"""What worker processes do with one block of lines: clean it, split its words, write its ids.

A block's files are in the scratch folder under its name: ``.clean`` (source TAB target, tokenized), ``.words`` and
``.tokens`` (counts), ``.split`` (the same lines in tokens), ``.source.ids`` and so on. Each stage ends with a file of
facts; a block that has it is done.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, TextIO, Tuple

import numpy as np

from benchmarks.common.data import source_checks
from benchmarks.common.data.workers import Report
from benchmarks.translation import segment, vocabulary
from benchmarks.translation.arrays import SIDES
from benchmarks.translation.subtokens import Subtokens

BLOCK_LINES = 20_000
"""Pairs of lines of a block: what is done again after an interruption, and what a worker holds in memory."""
RAW, TOKENIZED, SPLIT, WHOLE = "raw", "tokenized", "split", "whole"
"""Forms of text: as written, words apart as Moses does it, split by BPE as well; as written and to stay so."""
CHUNK = 8 << 20
"""Bytes read at once."""


class Cleaning(NamedTuple):
    """Which pairs are left out of training."""

    longest: int
    """Words of a side, at most."""
    latin: bool = False
    """Leave out pairs with characters outside of Latin-1 (scripts/filter_dataset.py, GNMT v0.7)."""


class Block(NamedTuple):
    """Aligned lines of two files."""

    part: str
    paths: Tuple[str, str]
    names: Tuple[str, str]
    """What messages call them: where they were unpacked from."""
    begins: Tuple[int, int]
    """Bytes at which they begin."""
    first_line: int
    lines: int
    stem: str
    """Path of its files, without what each adds to it."""
    form: str
    languages: Tuple[str, str]
    cleaning: Optional[Cleaning]
    """None for sentences of which none may be missing."""
    codes: str
    """File of merges; empty where words stay whole or the text is split already."""
    entries: str
    """File of the vocabulary."""
    kind: str
    """Of the vocabulary."""

    def path(self, what: str) -> Path:
        """Return one of its files."""
        return Path(f"{self.stem}.{what}")


def is_done(stage: str) -> Callable[[Block], bool]:
    """Return whether a block has been through a stage."""
    return lambda block: block.path(f"{stage}.json").exists()


def facts_of(block: Block, stage: str) -> Dict[str, Any]:
    """Return what a stage counted in a block."""
    facts: Dict[str, Any] = json.loads(block.path(f"{stage}.json").read_text())
    return facts


def _finish(block: Block, stage: str, facts: Dict[str, Any]) -> Tuple[int, int]:
    _write(block.path(f"{stage}.json"), lambda file: file.write(json.dumps(facts)))
    return block.lines, 0


def _write(path: Path, write: Callable[[TextIO], Any]) -> None:
    """Write a file in one step; what a killed worker leaves has its process id for a suffix."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        write(file)
    partial.replace(path)


# -- finding blocks ----------------------------------------------------------------------------------------


def line_offsets(path: Path, every: int, report: Callable[[int], None]) -> Tuple[int, List[int]]:
    """Return the lines of a file and the bytes at which each ``every``-th one begins; the last may lack its end."""
    offsets, lines, begin, last = [0], 0, 0, b"\n"
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            first = (-lines - 1) % every
            offsets += [begin + int(end) + 1 for end in ends[first::every]]
            lines, begin, last = lines + len(ends), begin + len(chunk), chunk[-1:]
            report(len(chunk))
    if last != b"\n":
        lines += 1
    elif lines % every == 0 and lines:
        offsets.pop()  # a block of no lines
    return lines, offsets


# -- clean: lines to words ---------------------------------------------------------------------------------


@lru_cache(maxsize=None)
def _splitter(form: str, language: str) -> segment.Tokenize:
    if form == WHOLE:
        return _spaces
    return segment.tokenizer(language) if form == RAW else str.split


def _spaces(line: str) -> List[str]:
    """Cut at spaces alone, so that joining gives the line back; a tab is what separates the sides later."""
    text = line.replace("\t", " ").strip()
    return text.split(" ") if text else []


def read_lines(block: Block, side: int) -> Iterator[str]:
    """Yield the lines of one side without their ends.

    Raises:
        Problem: a line is not UTF-8.
    """
    with open(block.paths[side], "rb") as file:
        file.seek(block.begins[side])
        for _ in range(block.lines):
            line = file.readline().rstrip(b"\r\n")
            try:
                yield line.decode("utf-8").lstrip("\ufeff")
            except UnicodeDecodeError:
                raise source_checks.not_utf8(*zip(map(Path, block.paths), block.names)) from None


def clean(block: Block, report: Report) -> Tuple[int, int]:
    """Tokenize a block's lines and leave out those that cannot be trained on, as the submission's clean-corpus-n."""
    splitters = [_splitter(block.form, language) for language in block.languages]
    counts: Dict[str, Any] = {"kept": 0, "empty": 0, "long": 0, "foreign": 0, "first": 0}
    words: Counter[str] = Counter()

    def write(file: TextIO) -> None:
        for place, lines in enumerate(zip(read_lines(block, 0), read_lines(block, 1))):
            pair = [split(line) for split, line in zip(splitters, lines)]
            reason = _unfit(pair, block)
            counts[reason] += 1
            if reason == "kept":
                words.update(pair[0])
                words.update(pair[1])
                file.write(" ".join(pair[0]) + "\t" + " ".join(pair[1]) + "\n")
            elif not counts["first"]:
                counts["first"] = block.first_line + place
            report(place + 1, 0)

    _write(block.path("clean"), write)
    if block.form in (RAW, TOKENIZED) and block.part == "train":
        _write_counts(block.path("words"), words)
    return _finish(block, "clean", counts)


def _unfit(pair: Sequence[Sequence[str]], block: Block) -> str:
    """Return why a pair is left out, or that it is kept."""
    if not all(pair):
        return "empty"
    if block.cleaning is None:
        return "kept"
    if any(segment.words_of(tokens) > block.cleaning.longest for tokens in pair):
        return "long"
    if block.cleaning.latin and any(ord(mark) > 255 for tokens in pair for token in tokens for mark in token):
        return "foreign"
    return "kept"


def _write_counts(path: Path, counts: "Counter[str]") -> None:
    _write(path, lambda file: file.writelines(f"{token}\t{count}\n" for token, count in counts.items()))


def add_counts(blocks: Sequence[Block], what: str) -> "Counter[str]":
    """Add the counts of all blocks."""
    total: Counter[str] = Counter()
    for block in blocks:
        with block.path(what).open(encoding="utf-8", newline="\n") as file:
            for line in file:
                token, count = line.rstrip("\n").split("\t")
                total[token] += int(count)
    return total


def read_pairs(path: Path) -> Iterator[List[str]]:
    """Yield source and target of each line that a stage wrote."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.rstrip("\n").split("\t")


# -- split: words to tokens --------------------------------------------------------------------------------


def split(block: Block, report: Report) -> Tuple[int, int]:
    """Apply the merges to a block's words, and count the tokens."""
    encode = segment.bpe(Path(block.codes).read_text(encoding="utf-8")) if block.codes else str.split
    tokens: Counter[str] = Counter()

    def write(file: TextIO) -> None:
        for place, pair in enumerate(read_pairs(block.path("clean"))):
            parts = [encode(text) for text in pair]
            for each in parts:
                tokens.update(each)
            file.write("\t".join(" ".join(each) for each in parts) + "\n")
            report(place + 1, 0)

    _write(block.path("split"), write)
    _write_counts(block.path("tokens"), tokens)
    return _finish(block, "split", {})


# -- encode: tokens to ids ----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _encoder(path: str, kind: str) -> Callable[[str], List[int]]:
    """Return what turns a line into ids."""
    entries = vocabulary.read(Path(path))
    if kind == vocabulary.SUBTOKENS:
        return Subtokens(entries).encode
    places = {entry: place for place, entry in enumerate(entries)}
    return lambda line: [places.get(token, vocabulary.UNK) for token in line.split()]


def id_type(entries: int) -> "np.dtype[Any]":
    """Return the smallest type that holds every id."""
    return np.dtype("<u2" if entries <= 1 << 16 else "<i4")


def encode(block: Block, report: Report) -> Tuple[int, int]:
    """Write the ids and lengths of a block's sentences, both sides."""
    ids_of = _encoder(block.entries, block.kind)
    lines: Iterator[Sequence[str]] = read_pairs(block.path("split"))
    if block.kind == vocabulary.SUBTOKENS:
        lines = read_pairs(block.path("clean"))
    ids: Tuple[List[int], List[int]] = ([], [])
    lengths: Tuple[List[int], List[int]] = ([], [])
    for place, pair in enumerate(lines):
        for side, text in enumerate(pair):
            found = ids_of(text)
            ids[side].extend(found)
            lengths[side].append(len(found))
        report(place + 1, 0)
    kind = id_type(len(vocabulary.read(Path(block.entries))))
    for side, name in enumerate(SIDES):
        _write_bytes(block.path(f"{name}.ids"), np.array(ids[side], kind).tobytes())
        _write_bytes(block.path(f"{name}.lengths"), np.array(lengths[side], "<i4").tobytes())
    unknown = sum(each.count(vocabulary.UNK) for each in ids)
    return _finish(block, "encode", {"tokens": [len(each) for each in ids], "unknown": unknown})


def _write_bytes(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)
