"""Two worker process passes over a block of lines: cleaning, and encoding to ids.

A block's files are in the scratch folder under the block name: ``.clean`` (source TAB target, as words), ``.words``
(word counts), ``.split`` (the same lines in tokens) and ``.npz`` (ids and lengths). A pass writes a file with facts
at the end, which marks the block as done.
"""

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from benchmarks.common.data import text_files
from benchmarks.common.data.files import in_one_step, read_facts, write_facts
from benchmarks.common.data.workers import Report
from benchmarks.translation import CODES, SIDES, VOCABULARY, segment, vocabulary
from benchmarks.translation.vocabulary import JOIN

# Line pairs per block: the work lost by an interruption, and the amount in a worker's memory.
BLOCK_LINES = 20_000
# Forms of text: raw, tokenized by Moses, also split by BPE; raw for subtokens.
RAW, TOKENIZED, SPLIT, WHOLE = "raw", "tokenized", "split", "whole"
CHUNK = 8 << 20  # bytes per read


class Block(NamedTuple):
    part: str
    paths: Tuple[str, str]
    names: Tuple[str, str]  # names in messages: where the files were unpacked from
    begins: Tuple[int, int]  # offsets in bytes
    first_line: int
    lines: int
    stem: str  # path of the output files without suffix
    form: str
    languages: Tuple[str, str]
    longest: int  # maximum words per side of a training pair
    latin: bool  # drop training pairs with characters outside of Latin-1 (scripts/filter_dataset.py, GNMT v0.7)

    def path(self, name: str) -> Path:
        return Path(f"{self.stem}.{name}")

    def shared(self, name: str) -> Path:
        # Return a file of the scratch folder that all blocks use.
        return Path(self.stem).with_name(name)

    def facts(self, stage: str) -> Dict[str, Any]:
        return read_facts(self.path(f"{stage}.json"))


def line_offsets(path: Path, interval: int, report: Callable[[int], None], name: str) -> Tuple[int, List[int]]:
    """Return the number of lines and the byte offsets of every ``interval``-th line; the last may lack a newline.

    Raises:
        Problem: a line is too long; ``name`` is the file name in the message.
    """
    offsets, lines, start, last, line_start = [0], 0, 0, b"\n", 0
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            first = (-lines - 1) % interval
            bounds = np.concatenate(([line_start], start + ends + 1, [start + len(chunk)]))
            if np.diff(bounds).max() > text_files.LONGEST_LINE:
                raise text_files.too_long(name, lines + int(np.diff(bounds).argmax()) + 1)
            line_start = int(bounds[-2])
            offsets += [start + int(end) + 1 for end in ends[first::interval]]
            lines, start, last = lines + len(ends), start + len(chunk), chunk[-1:]
            report(len(chunk))
    if last != b"\n":
        lines += 1
    elif lines % interval == 0 and lines:
        offsets.pop()  # a block of no lines
    return lines, offsets


# -- cleaning: lines to words ------------------------------------------------------------------------------


def _splitter(form: str, language: str) -> segment.Tokenize:
    if form == WHOLE:
        return _spaces
    return segment.tokenizer(language) if form == RAW else str.split


def _spaces(line: str) -> List[str]:
    # Split at spaces only, so that joining restores the line; tabs later separate the sides.
    text = line.replace("\t", " ").strip()
    return text.split(" ") if text else []


def read_lines(block: Block, side: int) -> Iterator[str]:
    """Yield one side's lines without newlines.

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
                raise text_files.not_utf8(*zip(map(Path, block.paths), block.names)) from None


def clean(block: Block, report: Report) -> Tuple[int, int]:
    """Tokenize a block's lines and drop unsuitable pairs, like clean-corpus-n in the submission."""
    splitters = [_splitter(block.form, language) for language in block.languages]
    counts: Dict[str, Any] = {"kept": 0, "empty": 0, "long": 0, "foreign": 0, "first": 0}
    word_counts: Counter[str] = Counter()

    with in_one_step(block.path("clean")) as file:
        for number, texts in enumerate(zip(read_lines(block, 0), read_lines(block, 1))):
            pair = [split(line) for split, line in zip(splitters, texts)]
            reason = _unfit(pair, block)
            counts[reason] += 1
            if reason == "kept":
                word_counts.update(pair[0] + pair[1])
                file.write("\t".join(map(" ".join, pair)).encode() + b"\n")
            elif not counts["first"]:
                counts["first"] = block.first_line + number
            report(number + 1, 0)
    if block.part == "train" and block.form != WHOLE:
        write_facts(block.path("words"), word_counts)
    write_facts(block.path("clean.json"), counts)
    return block.lines, 0


def _unfit(pair: Sequence[Sequence[str]], block: Block) -> str:
    # Return the reason for dropping a pair, or "kept".
    if not all(pair):
        return "empty"
    if block.part == "test":
        return "kept"
    if any(sum(not token.endswith(JOIN) for token in tokens) > block.longest for tokens in pair):
        return "long"
    if block.latin and any(ord(mark) > 255 for tokens in pair for token in tokens for mark in token):
        return "foreign"
    return "kept"


def read_pairs(path: Path) -> Iterator[List[str]]:
    # Yield source and target of the lines written by a pass.
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.rstrip("\n").split("\t")


# -- encoding: words to ids --------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def splitter(codes: Path) -> segment.Tokenize:
    # Return the function that splits words into tokens with a file of BPE codes, which may be empty.
    text = codes.read_text(encoding="utf-8")
    return segment.bpe(text) if text else str.split


def encode(block: Block, report: Report) -> Tuple[int, int]:
    # Split a block's words; write ids and lengths per sentence, for both sides.
    entries = vocabulary.read(block.shared(VOCABULARY))
    id_of_entry = {entry: number for number, entry in enumerate(entries)}
    subtokens = segment.Subtokens(entries) if block.form == WHOLE else None
    split = str.split if block.form == SPLIT else splitter(block.shared(CODES))
    ids: Tuple[List[int], List[int]] = ([], [])
    lengths: Tuple[List[int], List[int]] = ([], [])

    with in_one_step(block.path("split")) as file:
        for number, pair in enumerate(read_pairs(block.path("clean"))):
            if subtokens:
                encoded = [subtokens.encode(text) for text in pair]
            else:
                tokens = [split(text) for text in pair]
                file.write("\t".join(map(" ".join, tokens)).encode() + b"\n")
                encoded = [[id_of_entry.get(token, vocabulary.UNK) for token in side_tokens] for side_tokens in tokens]
            for side, ids_of_side in enumerate(encoded):
                ids[side].extend(ids_of_side)
                lengths[side].append(len(ids_of_side))
            report(number + 1, 0)
    arrays: Dict[str, Any] = dict(zip(SIDES, (np.array(ids_of_side, id_type(len(entries))) for ids_of_side in ids)))
    arrays.update({f"{side}_lengths": np.array(side_lengths, "<i4") for side, side_lengths in zip(SIDES, lengths)})
    with in_one_step(block.path("npz")) as file:
        np.savez(file, **arrays)
    unknown = sum(ids_of_side.count(vocabulary.UNK) for ids_of_side in ids)
    write_facts(block.path("encode.json"), {"tokens": [len(ids_of_side) for ids_of_side in ids], "unknown": unknown})
    return block.lines, 0


def id_type(entries: int) -> "np.dtype[Any]":
    return np.dtype("<u2" if entries <= 1 << 16 else "<i4")
