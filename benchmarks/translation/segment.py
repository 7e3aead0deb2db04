"""Cuts lines into tokens: Moses' tokenizer and byte pair encoding.

sacremoses and subword-nmt are imported where they are used: sets whose text is tokenized and encoded need neither.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, TextIO, cast

from benchmarks.common.data.problem import Problem
from benchmarks.translation.vocabulary import JOIN

LONGEST = 80  # Words of a side at most, as ``clean-corpus-n.perl ... 1 80`` of GNMT's download_dataset.sh.
# How subword-nmt's files of codes begin.
HEADER = "#version:"

Tokenize = Callable[[str], List[str]]


def tokenizer(language: str) -> Tokenize:
    """Return Moses' tokenizer with its defaults, as ``tokenizer.perl -q -l LANGUAGE`` (download_dataset.sh, GNMT)."""
    from sacremoses import MosesTokenizer

    moses = MosesTokenizer(lang=language)
    return lambda line: moses.tokenize(line)


def learn_codes(words: Mapping[str, int], merges: int, report: Callable[[int], None]) -> str:
    """Return the codes that subword-nmt learns from counted words; ``report`` gets the number of merges so far."""
    # Its own bar of progress would be between the lines of ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from subword_nmt.learn_bpe import learn_bpe

    lines: List[str] = []

    class Codes:
        # Counts the lines that subword-nmt writes, the header first.

        def write(self, line: str) -> None:
            report(len(lines))
            lines.append(line)

    counted = (f"{word} {count}\n" for word, count in sorted(words.items()))
    learn_bpe(counted, cast(TextIO, Codes()), merges, is_dict=True)
    return "".join(lines)


def check_codes(path: Path) -> str:
    """Return the text of a file of codes.

    Raises:
        Problem: a line is not a merge, with its number.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise Problem(f"{path}: {error.reason}", "UTF-8 text", "name the file of codes by --codes") from None
    for number, line in enumerate(text.splitlines() or [""], 1):
        if len(line.split()) != 2 and not (number == 1 and line.startswith(HEADER)):
            expected = "two parts that are merged, as subword-nmt's learn-bpe writes them"
            raise Problem(f"{path}, line {number:,}: {line[:60]!r}", expected, "name the file of codes by --codes")
    return text


def bpe(codes: str) -> Tokenize:
    # Return what applies the merges of a file's text to the words of a line.
    from subword_nmt.apply_bpe import BPE as Encoder

    encoder: Any = Encoder(io.StringIO(codes), separator=JOIN)
    return lambda line: encoder.segment_tokens(line.split())


def versions() -> Dict[str, str]:
    # Return the versions of what was used to cut text, as far as it is imported.
    from importlib.metadata import version

    names = {"sacremoses": "sacremoses", "subword_nmt": "subword-nmt"}
    return {name: version(distribution) for name, distribution in names.items() if name in sys.modules}
