"""Learns a small WordPiece vocabulary from counted words, by the merges of subword-nmt."""

from __future__ import annotations

from typing import Callable, List, Mapping

from benchmarks.language.vocabulary import SPECIAL
from benchmarks.translation.segment import learn_codes

END = "</w>"  # behind the last letter of a word (subword-nmt)


def learn(words: Mapping[str, int], size: int, report: Callable[[int], None] = lambda done: None) -> List[str]:
    """Return at most ``size`` entries: the special ones, all letters at a word's begin and within one, and merges.

    Words are those of ``wordpiece.words``. They are merged backwards, so that the mark which byte pair encoding has
    behind the last letter is at the first one: what does not have it gets "##".
    """
    letters = sorted({letter for word in words for letter in word})
    entries = dict.fromkeys((*SPECIAL, *letters, *(f"##{letter}" for letter in letters)))
    backwards = {word[::-1]: count for word, count in words.items()}
    codes = learn_codes(backwards, max(0, size - len(entries)), report)
    for line in codes.split("\n")[1:-1]:
        piece = line.replace(" ", "")
        whole = piece.endswith(END)
        text = piece[: -len(END)][::-1] if whole else "##" + piece[::-1]
        entries.setdefault(text)
    return list(entries)[:size]
