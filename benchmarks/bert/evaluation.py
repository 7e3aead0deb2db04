"""The evaluation set: articles of the source chosen by MLPerf's rule, or a text of its own; never trained on.

The rule (transparency_in_test_set_generation.py, NVIDIA v0.7): of each of the 500 parts of the text the article 42,
counted from 0, or the middle one of a part with fewer than 84. Here a part is an equal share of the documents, as they
come; a text too small for 500 parts has fewer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Set, Tuple

from benchmarks.bert import buckets, stages
from benchmarks.bert.stages import Block, facts_of
from benchmarks.common.data.problem import Problem

PARTS, ARTICLE = 500, 42
LEAST_DOCUMENTS = 20
"""Of a part: at most one of 20 documents is for evaluation."""

Sized = Tuple[str, int]
"""Stem of a shard and its bytes of text."""


class Chosen(NamedTuple):
    """Shards of both parts."""

    train: Tuple[Sized, ...]
    test: Tuple[Sized, ...]
    left_out: Dict[str, Tuple[int, ...]]
    """Documents of a training shard that are not trained on."""
    copies: int
    """How many of them are copies of a document of the evaluation set."""
    rule: str


def chosen_places(documents: int) -> List[int]:
    """Return which of so many documents are for evaluation."""
    parts = max(1, min(PARTS, documents // LEAST_DOCUMENTS))
    found = []
    for part in range(parts):
        begin, end = documents * part // parts, documents * (part + 1) // parts
        found.append(begin + min(ARTICLE, (end - begin) // 2))
    return found


def choose(blocks: Sequence[Block], scratch: Path) -> Chosen:
    """Return what is trained on and what is evaluated.

    Raises:
        Problem: there is no text, or the evaluation set overlaps the training text.
    """
    train, test = _shards(blocks, "train"), _shards(blocks, "test")
    digests = {stem: stages.read_digests(stem) for stem, _ in train}
    total = sum(map(len, digests.values()))
    if total < 2:
        paths = ", ".join(sorted({block.path for block in blocks}))
        raise Problem(f"{paths}: {total} documents with text", "at least two documents", "name another source")
    if test:
        held = [digest for stem, _ in test for digest in stages.read_digests(stem)]
        _refuse_overlap(digests, set(held), test)
        return Chosen(tuple(train), tuple(test), {}, 0, f"{len(held):,} documents of a text of its own")
    return _cut(train, digests, total, scratch)


def _shards(blocks: Sequence[Block], part: str) -> List[Sized]:
    return [
        (f"{block.stem}-{number:04}", shard["bytes"])
        for block in blocks
        if block.part == part
        for number, shard in enumerate(facts_of(block.facts_path)["shards"])
    ]


def _refuse_overlap(digests: Dict[str, List[bytes]], held: Set[bytes], test: Sequence[Sized]) -> None:
    common = {digest for each in digests.values() for digest in each} & held
    if common:
        first = next(
            document[0]
            for stem, _ in test
            for document, digest in zip(stages.read_shard(stem), stages.read_digests(stem))
            if digest in common
        )
        raise Problem(
            f"{len(common):,} documents are in both parts, the first one begins: {first[:80]}",
            "an evaluation set that is not trained on",
            "remove them from the training text, or leave out --evaluation: then the set is cut from it",
        )


def _cut(train: Sequence[Sized], digests: Dict[str, List[bytes]], total: int, scratch: Path) -> Chosen:
    """Write the chosen articles as a shard of their own; copies of them are left out of training too."""
    every = [(stem, place) for stem, _ in train for place in range(len(digests[stem]))]
    places = [every[place] for place in chosen_places(total)]
    held = {digests[stem][place] for stem, place in places}
    left_out = {
        stem: tuple(place for place, digest in enumerate(each) if digest in held) for stem, each in digests.items()
    }
    documents = [sentences for stem in left_out if left_out[stem] for sentences in _documents(stem, places)]
    size = sum(len(sentence.encode("utf-8")) for each in documents for sentence in each)
    stem = str(scratch / "chosen")
    text = "\n\n".join("\n".join(each) for each in documents) + "\n"
    buckets.write_in_one_step(Path(f"{stem}.text"), text.encode("utf-8"))
    copies = sum(map(len, left_out.values())) - len(places)
    kept = {stem: each for stem, each in left_out.items() if each}
    rule = (
        f"{len(places):,} of {total:,} documents: of each {total // len(places):,} the one at {ARTICLE} or the middle"
    )
    return Chosen(tuple(train), ((stem, size),), kept, copies, rule)


def _documents(stem: str, places: Sequence[Tuple[str, int]]) -> List[List[str]]:
    wanted = {place for each, place in places if each == stem}
    return [document for place, document in enumerate(stages.read_shard(stem)) if place in wanted]
