"""Cuts lines into tokens: Moses' tokenizer, byte pair encoding, tensor2tensor's subtokens.

sacremoses and subword-nmt are imported where they are used: sets whose text is tokenized and encoded need neither.
"""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Sequence, Tuple

from benchmarks.common.data.problem import Problem
from benchmarks.translation.vocabulary import JOIN

LONGEST = 80
"""Words of a side at most, as ``clean-corpus-n.perl ... 1 80`` of GNMT's download_dataset.sh."""

Tokenize = Callable[[str], List[str]]


def tokenizer(language: str) -> Tokenize:
    """Return Moses' tokenizer with its defaults, as ``tokenizer.perl -q -l LANGUAGE`` (download_dataset.sh, GNMT)."""
    from sacremoses import MosesTokenizer

    moses = MosesTokenizer(lang=language)
    return lambda line: moses.tokenize(line)


def words_of(tokens: Iterable[str]) -> int:
    """Count the words of tokens that BPE may have split."""
    return sum(not token.endswith(JOIN) for token in tokens)


# -- byte pair encoding ----------------------------------------------------------------------------------


def write_codes(pairs: Iterable[Tuple[str, str]], path: Path) -> None:
    """Write merges as subword-nmt reads them."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write("#version: 0.2\n")
        file.writelines(f"{first} {second}\n" for first, second in pairs)


def read_codes(path: Path) -> List[Tuple[str, str]]:
    """Read the merges of a file of codes.

    Raises:
        Problem: with the line that is not a merge.
    """
    merges = []
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(_decoded(file, path), 1):
            fields = line.split()
            if number == 1 and line.startswith("#version:"):
                continue
            if len(fields) != 2:
                expected = "two parts that are merged, as subword-nmt's learn-bpe writes them"
                raise Problem(f"{path}, line {number:,}: {line[:60]!r}", expected, "name the file of codes by --codes")
            merges.append((fields[0], fields[1]))
    if not merges:
        raise Problem(f"{path} has no merges", "codes of subword-nmt's learn-bpe", "name another file by --codes")
    return merges


def _decoded(file: Iterable[str], path: Path) -> Iterator[str]:
    try:
        for line in file:
            yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise Problem(f"{path}: {error.reason}", "UTF-8 text", "name the file of codes by --codes") from None


def bpe(codes: str) -> Tokenize:
    """Return what applies the merges of a file's text to the words of a line."""
    from subword_nmt.apply_bpe import BPE as Encoder

    encoder: Any = Encoder(io.StringIO(codes), separator=JOIN)
    return lambda line: encoder.segment_tokens(line.split())


def count_tokens(lines: Iterable[Sequence[str]]) -> "Counter[str]":
    """Count the tokens of lines."""
    counts: Counter[str] = Counter()
    for tokens in lines:
        counts.update(tokens)
    return counts


def by_frequency(counts: Mapping[str, int]) -> List[str]:
    """Return tokens in the order of a vocabulary: the most frequent first, equal ones by their text."""
    ranked: Dict[str, int] = dict(counts)
    return sorted(ranked, key=lambda token: (-ranked[token], token))


def versions() -> Dict[str, str]:
    """Return the versions of what was used to cut text, as far as it is imported."""
    import sys

    named = {"sacremoses": "sacremoses", "subword_nmt": "subword-nmt"}
    return {name: _version(name) for module, name in named.items() if module in sys.modules}


def _version(distribution: str) -> str:
    from importlib.metadata import version

    return version(distribution)
