"""What a preparation refuses once it has seen the text: nothing left, lines that are missing, codes of another set."""

from __future__ import annotations

import hashlib
from itertools import chain, islice
from pathlib import Path
from typing import Dict, Iterator, Mapping, Sequence

from benchmarks.common.data import source_checks
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.translation import PARTS, SIDES, segment, stages, wmt
from benchmarks.translation.stages import Block
from benchmarks.translation.vocabulary import join_bpe

REASONS = {"empty": "empty", "long": "too long", "foreign": "outside of Latin-1"}
SAMPLE_LINES = 2000  # lines that are split again to see whether codes belong to them
# Tokens a word, on average: codes learnt from a text leave fewer than two, those of another script one a letter.
MOST_PARTS = 3.0
MOST_UNKNOWN = 0.05  # share of tokens that the vocabulary lacks


def check_cleaning(blocks: Sequence[Block], progress: Progress) -> Dict[str, int]:
    """Count what was left out of training; refuse a part of which nothing is left, or a test part that has holes."""
    counts = dict.fromkeys(("kept", *REASONS), 0)
    first = ""
    for block in blocks:
        facts = block.facts("clean")
        if facts["first"]:
            where = f"line {facts['first']:,} of {_files(block)}"
            if block.part == "test":
                raise Problem(f"{where} is empty", "text in both: all are tested on", "remove the pair from both files")
            first = first or where
        if block.part == "train":
            counts = {reason: count + facts[reason] for reason, count in counts.items()}
    kept = counts.pop("kept")
    left_out = ", ".join(f"{count:,} {REASONS[reason]}" for reason, count in counts.items() if count)
    if not kept:
        found = f"no pair is left to train on: {left_out}; the first is {first}"
        raise Problem(found, "pairs with text in both languages", "look at the files, or raise --longest")
    if left_out:
        progress.note(f"left out of training: {left_out}; the first is {first}")
    return counts


def _files(block: Block) -> str:
    return f"{block.names[0]} and {Path(block.names[1]).name}"


def check_overlap(test: Sequence[Block], train: Sequence[Block], allowed: bool, progress: Progress) -> int:
    """Warn of pairs to test on that are trained on, or refuse them; return their number."""

    def pairs(blocks: Sequence[Block]) -> Iterator[bytes]:
        return chain.from_iterable(block.path("clean").read_bytes().split(b"\n")[:-1] for block in blocks)

    # No line of the test part is left out.
    named = ((f"line {number:,} of {_files(test[0])}", pair) for number, pair in enumerate(pairs(test), 1))
    return source_checks.overlap(named, pairs(train), "pairs", allowed, progress)


def check_codes(codes: Path, block: Block) -> None:
    # Refuse codes that split the words of a text in another way than it is split.
    encode = segment.bpe(codes.read_text(encoding="utf-8"))
    for text in chain.from_iterable(islice(stages.read_pairs(block.path("clean")), SAMPLE_LINES)):
        old, new = text.split(), encode(join_bpe(text.split()))
        if new != old:
            at = next((place for place, pair in enumerate(zip(old, new)) if pair[0] != pair[1]), 0)
            raise Problem(
                f"{codes} splits into {' '.join(new[at : at + 3])!r} what is {' '.join(old[at : at + 3])!r} of "
                f"{Path(block.names[0]).name} or {Path(block.names[1]).name}",
                "the codes that the text was split by",
                "name them by --codes, or take the file of codes out of the folder",
            )


def check_foreign_codes(codes: Path, tokens: Mapping[str, int], words: Mapping[str, int]) -> None:
    """Refuse codes that leave words in many parts: they come from another language or another kind of text."""
    parts = sum(tokens.values()) / sum(words.values())
    if parts > MOST_PARTS:
        raise Problem(
            f"{codes} splits a word into {parts:.1f} tokens on average",
            f"at most {MOST_PARTS:g}: codes learnt from text like this",
            "name other --codes, or none, and they are learnt from the text",
        )


def check_unknown(blocks: Sequence[Block], progress: Progress) -> None:
    """Report tokens of the test part that training never sees; refuse a vocabulary that lacks too many of any part."""
    for part in PARTS:
        facts = [block.facts("encode") for block in blocks if block.part == part]
        unknown, tokens = sum(each["unknown"] for each in facts), sum(sum(each["tokens"]) for each in facts)
        text = f"{unknown:,} of {tokens:,} tokens of the {part} part are not in the vocabulary"
        if unknown > MOST_UNKNOWN * tokens:
            expected = f"at most {MOST_UNKNOWN:.0%}"
            raise Problem(text, expected, "take the vocabulary or the codes that belong to this text")
        if unknown:
            progress.note(text)


def compare_with_submitted(blocks: Sequence[Block], progress: Progress) -> str:
    """Compare the split text with that of GNMT's submission; return and report where it differs, which is allowed."""
    sums = {(part, side): hashlib.md5() for part in PARTS for side in SIDES}
    for block in blocks:
        for pair in stages.read_pairs(block.path("split")):
            for side, text in zip(SIDES, pair):
                sums[block.part, side].update(f"{text}\n".encode())
    differing = ", ".join(" ".join(key) for key, md5 in wmt.SUBMITTED_MD5.items() if sums[key].hexdigest() != md5)
    text = f"other tokens than in verify_dataset.sh of v0.5: {differing}" if differing else "every token as submitted"
    progress.note(text)
    return differing
