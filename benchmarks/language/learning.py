"""Learns a small WordPiece vocabulary from counted words, by merging the most frequent neighbours."""

from __future__ import annotations

from typing import Callable, List, Mapping

from benchmarks.language.wordpiece import SPECIAL
from benchmarks.translation import merges
from benchmarks.translation.merges import END


def learn(words: Mapping[str, int], size: int, report: Callable[[int], None] = lambda done: None) -> List[str]:
    """Return at most ``size`` entries: the special ones, all letters at a word's begin and within one, and merges.

    Words are those of ``wordpiece.words``. They are merged backwards, so that the mark which byte pair encoding has
    behind the last letter is at the first one: what does not have it gets "##".
    """
    letters = sorted({letter for word in words for letter in word})
    entries = dict.fromkeys((*SPECIAL, *letters, *(f"##{letter}" for letter in letters)))
    found = merges.learn({word[::-1]: count for word, count in words.items()}, max(0, size - len(entries)), report)
    for first, second in found:
        piece = first + second
        whole = piece.endswith(END)
        text = piece[: -len(END)][::-1] if whole else "##" + piece[::-1]
        entries.setdefault(text)
    return list(entries)[:size]
