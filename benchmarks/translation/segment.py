"""Tokenization: Moses' tokenizer with byte pair encoding, or tensor2tensor's subtokens.

sacremoses and subword-nmt are imported on use: tokenized and encoded data sets need neither.

The Transformer's submissions of v0.6 and v0.7 use subtokens (utils/tokenizer.py): a line is split between
alphanumeric and other characters; a single space between two tokens is dropped. A token is escaped (``_`` to
``\\u``, ``\\`` to ``\\\\``, a character outside of the dictionary to ``\\NUMBER;``), terminated by ``_`` and split
greedily from the left into the longest entries of the dictionary.
"""

import io
import os
import sys
import unicodedata
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Sequence, TextIO, Tuple, cast

from benchmarks.common.data.problem import Problem
from benchmarks.translation.vocabulary import JOIN, SPECIAL, UNK

LONGEST = 80  # Maximum words per side, ``clean-corpus-n.perl ... 1 80`` in GNMT's download_dataset.sh.
# First line of subword-nmt's code files.
HEADER = "#version:"

# The submission's dictionary: 33,708 lines; the first two are padding and end of sentence.
DICTIONARY = "reference_dictionary.ende.txt"
RESERVED = ("<pad>_", "<EOS>_", "<lua_index_compat>", "<bypass_unk>")
CACHE = 1 << 18  # cached tokens

Tokenize = Callable[[str], List[str]]


def tokenizer(language: str) -> Tokenize:
    """Return Moses' tokenizer with default options (``tokenizer.perl -q -l LANGUAGE``, download_dataset.sh of GNMT)."""
    from sacremoses import MosesTokenizer

    moses = MosesTokenizer(lang=language)
    return lambda line: moses.tokenize(line)


def learn_codes(counts: Mapping[str, int], merges: int, report: Callable[[int], None]) -> str:
    """Return the codes that subword-nmt learns from word counts; ``report`` gets the number of merges so far."""
    # The progress bar would interfere with our output.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from subword_nmt.learn_bpe import learn_bpe

    lines: List[str] = []

    class Codes:
        # Counts the lines that subword-nmt writes, the header first.

        def write(self, line: str) -> None:
            report(len(lines))
            lines.append(line)

    count_lines = (f"{word} {count}\n" for word, count in sorted(counts.items()))
    learn_bpe(count_lines, cast(TextIO, Codes()), merges, is_dict=True)
    return "".join(lines)


def check_codes(path: Path) -> str:
    """Return the text in a codes file.

    Raises:
        Problem: a line is not a merge; the message has the line number.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Problem(f"{path}: {error.reason}", "UTF-8 text", "pass the file of codes with --codes") from None
    for number, line in enumerate(text.splitlines() or [""], 1):
        if len(line.split()) != 2 and not (number == 1 and line.startswith(HEADER)):
            raise Problem(
                f"{path}, line {number:,}: {line[:60]!r}",
                "two parts that are merged, as subword-nmt's learn-bpe writes them",
                "pass the file of codes with --codes",
            )
    return text


def bpe(codes: str) -> Tokenize:
    # Return a function that applies the merges in a file's text to the words in a line.
    from subword_nmt.apply_bpe import BPE as Encoder

    encoder: Any = Encoder(io.StringIO(codes), separator=JOIN)
    return lambda line: encoder.segment_tokens(line.split())


def read_dictionary(path: Path) -> List[str]:
    """Return the entries in a submission's dictionary, one quoted entry per line, without the reserved entries.

    Raises:
        Problem: a line is not a quoted entry, or is a duplicate.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise Problem(f"{path}: {error.reason}", "UTF-8 text", "download the dictionary again") from None
    entries: Dict[str, None] = {}
    for number, line in enumerate(lines[:-1] if not lines[-1] else lines, 1):
        # As the submission reads it: outer white space goes, then the quotes.
        quoted = line.strip()
        if len(quoted) < 3 or quoted[0] != "'" or quoted[-1] != "'":
            raise Problem(
                f"{path}, line {number:,}: {line[:60]!r}", "an entry in single quotes", "download the dictionary again"
            )
        if quoted[1:-1] in entries:
            raise Problem(f"{path}, line {number:,}: {line[:60]!r} again", "each entry once", "remove the line")
        if quoted[1:-1] not in RESERVED:
            entries[quoted[1:-1]] = None
    return list(entries)


class Subtokens:
    """Splits lines into vocabulary entries; the first four entries are special and are never used."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._places = {entry: index for index, entry in enumerate(entries) if index >= len(SPECIAL)}
        self._alphabet = frozenset("".join(self._places)) | frozenset("\\_u;0123456789")
        self._longest = max(map(len, self._places), default=1)
        self._cached = lru_cache(maxsize=CACHE)(self._ids_of_token)

    def encode(self, line: str) -> List[int]:
        # Return a line's ids; uncovered text is unknown.
        return [id_ for token in split_tokens(line) for id_ in self._cached(token)]

    def _ids_of_token(self, token: str) -> Tuple[int, ...]:
        plain = token.replace("\\", "\\\\").replace("_", "\\u")
        escaped = "".join(mark if mark in self._alphabet else f"\\{ord(mark)};" for mark in plain) + "_"
        ids, start = [], 0
        while start < len(escaped):
            for end in range(min(len(escaped), start + self._longest), start, -1):
                id_ = self._places.get(escaped[start:end])
                if id_ is not None:
                    break
            else:
                end, id_ = start + 1, UNK
            ids.append(id_)
            start = end
        return tuple(ids)


@lru_cache(maxsize=1 << 16)
def _is_alphanumeric(mark: str) -> bool:
    return unicodedata.category(mark)[0] in "LN"


def split_tokens(line: str) -> List[str]:
    """Cut a line where letters and digits meet other characters, without single spaces between tokens."""
    runs = ["".join(run) for _, run in groupby(line, _is_alphanumeric)]
    return [run for index, run in enumerate(runs) if run != " " or index in (0, len(runs) - 1)]


def versions() -> Dict[str, str]:
    # Return the versions of the imported tokenization libraries.
    from importlib.metadata import version

    names = {"sacremoses": "sacremoses", "subword_nmt": "subword-nmt"}
    return {name: version(distribution) for name, distribution in names.items() if name in sys.modules}
