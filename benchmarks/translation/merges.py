"""Learns the merges of byte pair encoding from counted words, the same ones as subword-nmt's learn-bpe (version 0.2).

A heap of pairs and a list of the words that each pair is in replace its scan of the pairs before each merge.
"""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict
from typing import Callable, DefaultDict, Dict, List, Mapping, NamedTuple, Tuple

Pair = Tuple[str, str]
END = "</w>"
"""Behind the last letter of a word."""
LEAST = 2
"""Occurrences of a pair that is merged."""


class _Candidate(NamedTuple):
    """A pair with its occurrences when it was put on the heap."""

    occurrences: int
    pair: Pair

    def __lt__(self, other: Tuple[object, ...]) -> bool:
        # The most frequent first; of equal ones the last by its letters, as subword-nmt takes them.
        return tuple.__gt__(self, other)


def learn(words: Mapping[str, int], merges: int, report: Callable[[int], None] = lambda done: None) -> List[Pair]:
    """Return the merges in order; fewer where no pair occurs twice any more. ``report`` gets how many there are."""
    texts = [text for text in sorted(words) if text]
    counts = [words[text] for text in texts]
    symbols = [(*text[:-1], text[-1] + END) for text in texts]
    occurrences: DefaultDict[Pair, int] = defaultdict(int)
    # Word numbers, appended only: a word may have lost the pair since, and is then passed over.
    places: DefaultDict[Pair, "array[int]"] = defaultdict(lambda: array("l"))
    for number, word in enumerate(symbols):
        for pair in pairs_of(word):
            occurrences[pair] += counts[number]
            places[pair].append(number)
    heap = [_Candidate(count, pair) for pair, count in occurrences.items()]
    heapq.heapify(heap)
    found: List[Pair] = []
    while heap and len(found) < merges:
        count, pair = heapq.heappop(heap)
        if occurrences.get(pair) != count:
            continue  # its number has changed, and it is on the heap again with the new one
        if count < LEAST:
            break
        found.append(pair)
        changed: Dict[Pair, None] = {}
        for number in dict.fromkeys(places.pop(pair)):
            old = symbols[number]
            new = merge(old, pair)
            if len(new) == len(old):
                continue
            symbols[number] = new
            for each in pairs_of(old):
                occurrences[each] -= counts[number]
                changed[each] = None
            for each in pairs_of(new):
                occurrences[each] += counts[number]
                places[each].append(number)
                changed[each] = None
        for each in changed:
            if occurrences[each] > 0:
                heapq.heappush(heap, _Candidate(occurrences[each], each))
            else:
                del occurrences[each]
                places.pop(each, None)
        report(len(found))
    return found


def pairs_of(word: Tuple[str, ...]) -> List[Pair]:
    """Return the neighbours in a word."""
    return [(word[place], word[place + 1]) for place in range(len(word) - 1)]


def merge(word: Tuple[str, ...], pair: Pair) -> Tuple[str, ...]:
    """Join each occurrence of a pair in a word, from the left."""
    first, second = pair
    joined: List[str] = []
    place = 0
    while place < len(word):
        if word[place] == first and place + 1 < len(word) and word[place + 1] == second:
            joined.append(first + second)
            place += 2
        else:
            joined.append(word[place])
            place += 1
    return tuple(joined)
