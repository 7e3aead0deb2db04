"""What a preparation refuses once it has seen the text: nothing left, lines that are missing, codes of another set."""

from __future__ import annotations

import hashlib
from itertools import chain, islice
from pathlib import Path
from typing import Dict, Mapping, Sequence

from benchmarks.common.data import source_checks
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.translation import segment, stages, wmt
from benchmarks.translation.arrays import PARTS, SIDES
from benchmarks.translation.stages import Block
from benchmarks.translation.vocabulary import join_bpe

REASONS = {"empty": "empty", "long": "too long", "foreign": "outside of Latin-1"}
SAMPLE_LINES = 2000
"""Lines that are split again to see whether codes belong to them."""
MOST_PARTS = 3.0
"""Tokens a word, on average: codes learnt from a text leave fewer than two, those of another script one a letter."""
MOST_UNKNOWN = 0.05
"""Share of tokens that the vocabulary lacks."""


def judge_cleaning(blocks: Sequence[Block], progress: Progress) -> Dict[str, int]:
    """Count what was left out of training; refuse a part of which nothing is left, or a test part that has holes."""
    counts = dict.fromkeys(("kept", *REASONS), 0)
    first = ""
    for block in blocks:
        facts = stages.facts_of(block, "clean")
        if facts["first"]:
            where = f"line {facts['first']:,} of {block.names[0]} and {Path(block.names[1]).name}"
            if block.part == "test":
                raise Problem(f"{where} is empty", "text in both: all are tested on", "remove the pair from both files")
            first = first or where
        if block.part == "train":
            for reason in counts:
                counts[reason] += facts[reason]
    kept = counts.pop("kept")
    left_out = ", ".join(f"{count:,} {REASONS[reason]}" for reason, count in counts.items() if count)
    if not kept:
        found = f"no pair is left to train on: {left_out}; the first is {first}"
        raise Problem(found, "pairs with text in both languages", "look at the files, or raise --longest")
    if left_out:
        progress.note(f"left out of training: {left_out}; the first is {first}")
    return counts


def judge_overlap(test: Sequence[Block], train: Sequence[Block], allowed: bool, progress: Progress) -> int:
    """Warn of pairs to test on that are trained on, or refuse them; return their number."""
    held, trained = (
        chain.from_iterable(block.path("clean").read_bytes().split(b"\n")[:-1] for block in each)
        for each in (test, train)
    )
    # Of the test part no line is left out.
    files = f"{test[0].names[0]} and {Path(test[0].names[1]).name}"
    named = ((f"line {number:,} of {files}", pair) for number, pair in enumerate(held, 1))
    return source_checks.overlap(named, trained, "pairs", allowed, progress)


def judge_codes(codes: Path, block: Block) -> None:
    """Refuse codes that split the words of a text in another way than it is split."""
    encode = segment.bpe(codes.read_text(encoding="utf-8"))
    for pair in islice(stages.read_pairs(block.path("clean")), SAMPLE_LINES):
        for text in pair:
            again = encode(join_bpe(text.split()))
            if again != text.split():
                raise Problem(
                    f"{codes} splits {_first_difference(text.split(), again)} of {Path(block.names[0]).name} or "
                    f"{Path(block.names[1]).name}",
                    "the codes that the text was split by",
                    "name them by --codes, or take the file of codes out of the folder",
                )


def _first_difference(text: Sequence[str], again: Sequence[str]) -> str:
    place = next((at for at, (old, new) in enumerate(zip(text, again)) if old != new), 0)
    return f"into {' '.join(again[place : place + 3])!r} what is {' '.join(text[place : place + 3])!r}"


def judge_foreign_codes(codes: Path, tokens: int, words: Mapping[str, int]) -> None:
    """Refuse codes that leave words in many parts: they come from another language or another kind of text."""
    parts = tokens / sum(words.values())
    if parts > MOST_PARTS:
        raise Problem(
            f"{codes} splits a word into {parts:.1f} tokens on average",
            f"at most {MOST_PARTS:g}: codes learnt from text like this",
            "name other --codes, or none, and they are learnt from the text",
        )


def judge_unknown(blocks: Sequence[Block], progress: Progress) -> None:
    """Report tokens of the test part that training never sees; refuse a vocabulary that lacks too many of any part."""
    for part in ("train", "test"):
        facts = [stages.facts_of(block, "encode") for block in blocks if block.part == part]
        unknown, tokens = sum(each["unknown"] for each in facts), sum(sum(each["tokens"]) for each in facts)
        text = f"{unknown:,} of {tokens:,} tokens of the {part} part are not in the vocabulary"
        if unknown > MOST_UNKNOWN * tokens:
            expected = f"at most {MOST_UNKNOWN:.0%}"
            raise Problem(text, expected, "take the vocabulary or the codes that belong to this text")
        if unknown:
            progress.note(text)


def judge_submitted(blocks: Sequence[Block], progress: Progress) -> str:
    """Compare the split text with that of GNMT's submission; return and report where it differs, which is allowed."""
    sums = {}
    for part in PARTS:
        digests = [hashlib.md5() for _ in SIDES]
        for block in blocks:
            if block.part == part:
                for pair in stages.read_pairs(block.path("split")):
                    for digest, text in zip(digests, pair):
                        digest.update(f"{text}\n".encode())
        sums.update({(part, side): digest.hexdigest() for side, digest in zip(SIDES, digests)})
    differing = ", ".join(" ".join(key) for key, md5 in wmt.SUBMITTED_MD5.items() if sums[key] != md5)
    text = f"other tokens than in verify_dataset.sh of v0.5: {differing}" if differing else "every token as submitted"
    progress.note(text)
    return differing
