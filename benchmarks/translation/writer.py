"""Writes parallel text as indexed arrays: clean, learn the merges, split, list the vocabulary, encode."""

import argparse
import hashlib
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from benchmarks.common.data import source_checks
from benchmarks.common.data.arrays import write_array, write_header
from benchmarks.common.data.files import in_one_step, read_facts
from benchmarks.common.data.prepare import Content, Listing, Split, check_room
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.common.data.workers import Function, Workers
from benchmarks.translation import (
    CODES,
    PARTS,
    REFERENCES,
    SIDES,
    SOURCES,
    TEST_FILES,
    TRAIN_FILES,
    VOCABULARY,
    segment,
    sources,
    stages,
    vocabulary,
    wmt,
)
from benchmarks.translation.stages import BLOCK_LINES, RAW, SPLIT, WHOLE, Block

VERSION = "1"  # increase it if the output for the same source and options changes: unfinished parts are then rewritten
ROOM_FACTOR = 8  # maximum bytes written per byte of text: original, clean and split text, and ids
MOST_WORDS = 1 << 20  # no word limit: with subtokens only the training limits the length, as submitted


REASONS = {"empty": "empty", "long": "too long", "foreign": "outside of Latin-1"}
# Mean tokens per word: codes learned from the text give fewer than two, codes for another script one per letter.
MOST_PARTS = 3.0
MOST_UNKNOWN = 0.05  # maximum fraction of unknown tokens


class Task(NamedTuple):
    # A preparation: source and settings.

    source: sources.Source
    blocks: Tuple[Block, ...]
    scratch: Path
    workers: Workers

    def run(self, phase: str, function: Function) -> None:
        # Run the remaining blocks in the worker processes.
        size, is_done = (lambda block: block.lines), (lambda block: block.path(f"{phase}.json").exists())
        self.workers.run(phase, "pairs", function, self.blocks, size, is_done)

    def part(self, name: str) -> List[Block]:
        return [block for block in self.blocks if block.part == name]


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    # Find the text. The fingerprint includes everything that determines the output.
    options = (args.name, args.seed, args.merges, args.longest, args.tokens)
    files: List[Path] = [path for path in (args.codes, args.dictionary) if path is not None]
    source = None
    if args.origin is not None:
        source = sources.find(args)
        files += [item.path for corpus in (*source.train, source.test) for item in corpus]
        files += [path for path in (source.codes, source.dictionary) if path is not None]
    for path in files:
        if not path.is_file():
            raise Problem(f"{path} is no file", "a file that can be read", "name another one")
    listed = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    origin_key = source and (source.name, source.made, source.form, source.languages, source.latin)
    key = repr((VERSION, origin_key, listed, *options))
    return Listing(source, hashlib.sha256(key.encode()).hexdigest())


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    source = listing.source or sources.toy_data_set(scratch / "text", args.seed, args.name)
    pool = Workers(args.workers, scratch.parent, progress)
    source = sources.extract(source, scratch, pool)
    task = plan(source, args, scratch, pool)
    task.run("clean", stages.clean)
    left_out = check_cleaning(task.blocks, progress)
    common = check_overlap(task.part("test"), task.part("train"), args.allow_overlap, progress)
    how = _split(task, args)
    task.run("encode", stages.encode)
    check_unknown(task.blocks, progress)
    entries = len(vocabulary.read(scratch / VOCABULARY))
    tokens = {part: _write_arrays(task.part(part), scratch, entries) for part in PARTS}
    for side, name in enumerate((SOURCES, REFERENCES)):
        # The lines of the test part, for BLEU.
        with (scratch / name).open("w", encoding="utf-8", newline="\n") as file:
            for line in chain.from_iterable(stages.read_lines(block, side) for block in task.part("test")):
                words = line.split()
                file.write((vocabulary.join_bpe(words) if source.form == SPLIT else " ".join(words)) + "\n")
    if source.corpus == "wmt16" and source.form != WHOLE:
        how["differs_from_submitted"] = compare_with_submitted(task.blocks, progress)
    counts = {part: sum(block.facts("clean")["kept"] for block in task.part(part)) for part in PARTS}
    return Content(
        name=source.name,
        splits={
            "train": Split(counts["train"], (*TRAIN_FILES, VOCABULARY, CODES)),
            "test": Split(counts["test"], (*TEST_FILES, SOURCES, REFERENCES)),
        },
        summary=f"{counts['train']:,} + {counts['test']:,} pairs, {entries:,} entries",
        facts={
            "source_language": source.languages[0],
            "target_language": source.languages[1],
            "vocabulary": entries,
            "kind": vocabulary.SUBTOKENS if source.form == WHOLE else vocabulary.BPE,
            "detokenized": source.form in (RAW, WHOLE),
            "tokens": tokens,
        },
        how={
            "made": source.made,
            "left_out": left_out,
            "in_both": common,
            "form": source.form,
            "seed": args.seed,
            **how,
        },
        tool={"version": VERSION, "numpy": np.__version__, **segment.versions()},
    )


# -- plan --------------------------------------------------------------------------------------------------


def plan(source: sources.Source, args: argparse.Namespace, scratch: Path, pool: Workers) -> Task:
    """Split the files into blocks of lines.

    Raises:
        Problem: aligned files differ in the number of lines, or disk space is insufficient.
    """
    corpora = {"train": source.train, "test": (source.test,)}
    paths = [item.path for part_corpora in corpora.values() for corpus in part_corpora for item in corpus]
    present = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
    total = sum(path.stat().st_size for path in paths)
    check_room(scratch.parent, ROOM_FACTOR * total - present)
    add = pool.progress.counter("scan", total)
    longest = args.longest or (MOST_WORDS if source.form == WHOLE else segment.LONGEST)
    blocks: List[Block] = []
    for part, part_corpora in corpora.items():
        for corpus in part_corpora:
            for first, lines, begins in _aligned(corpus, add):
                stem = str(scratch / f"{part}-{len(blocks):05}")
                texts = str(corpus.source.path), str(corpus.target.path)
                names = str(corpus.source), str(corpus.target)
                how = source.form, source.languages, longest, source.latin
                blocks.append(Block(part, texts, names, begins, first, lines, stem, *how))
    return Task(source, tuple(blocks), scratch, pool)


def _aligned(corpus: sources.Corpus, add: Any) -> List[Tuple[int, int, Tuple[int, int]]]:
    # Return first line, number of lines and byte offsets per block of two aligned files.
    source, target = (stages.line_offsets(item.path, BLOCK_LINES, add, str(item)) for item in corpus)
    if source[0] != target[0] or not source[0]:
        raise Problem(
            f"{corpus.source} has {source[0]:,} lines, {corpus.target} has {target[0]:,}",
            "aligned files: line N of one is the translation of line N of the other",
            "restore both files",
        )
    firsts = range(0, source[0], BLOCK_LINES)
    begins = zip(source[1], target[1])
    return [(first + 1, min(BLOCK_LINES, source[0] - first), pair) for first, pair in zip(firsts, begins)]


# -- merges and vocabulary ---------------------------------------------------------------------------------


def _split(task: Task, args: argparse.Namespace) -> Dict[str, Any]:
    # Write merges and vocabulary; return their description for the manifest.
    scratch, source = task.scratch, task.source
    if source.dictionary:
        (scratch / CODES).write_text("")
        vocabulary.write(scratch / VOCABULARY, segment.read_dictionary(source.dictionary))
        return {"dictionary": source.dictionary.name}
    word_counts: Counter[str] = Counter()
    for block in task.part("train"):
        word_counts.update(read_facts(block.path("words")))
    given_codes, learns = source.codes, not source.codes and source.form != SPLIT
    codes = segment.check_codes(given_codes) if given_codes else ""
    if learns and (scratch / CODES).exists():
        codes = (scratch / CODES).read_bytes().decode()  # from an interrupted preparation
    elif learns:
        report = partial(task.workers.progress.update, "merge", total=args.merges, unit="merges")
        codes = segment.learn_codes(word_counts, args.merges, report)
    with in_one_step(scratch / CODES) as file:
        file.write(codes.encode())
    tokens: Counter[str] = Counter()
    split = str.split if source.form == SPLIT else segment.bpe(codes)
    for word, count in word_counts.items():
        for token in split(word):
            tokens[token] += count
    if given_codes and source.form != SPLIT:
        check_foreign_codes(given_codes, tokens, word_counts)
    # By descending frequency, then by text.
    vocabulary.write(scratch / VOCABULARY, sorted(tokens, key=lambda token: (-tokens[token], token)))
    return {"codes": given_codes.name if given_codes else "", "merges": args.merges if learns else 0}


# -- arrays and texts --------------------------------------------------------------------------------------


def _write_arrays(blocks: Sequence[Block], scratch: Path, entries: int) -> List[int]:
    # Write a part's tokens and offsets for both sides from its blocks; return the tokens of both sides.
    tokens = [sum(numbers) for numbers in zip(*(block.facts("encode")["tokens"] for block in blocks))]
    for side, count in zip(SIDES, tokens):
        stem, lengths = f"{blocks[0].part}_{side}", [np.zeros(1, "<i8")]
        with (scratch / f"{stem}.npy").open("wb") as file:
            write_header(file, stages.id_type(entries), count)
            for block in blocks:
                with np.load(str(block.path("npz"))) as arrays:
                    file.write(arrays[side].tobytes())
                    lengths.append(arrays[f"{side}_lengths"])
        write_array(scratch / f"{stem}_offsets.npy", np.concatenate(lengths).cumsum(dtype="<i8"))
    return tokens


# -- checks of the text -------------------------------------------------------------------------------------


def check_cleaning(blocks: Sequence[Block], progress: Progress) -> Dict[str, int]:
    """Count dropped training pairs; reject an empty part, or dropped lines in the test part."""
    counts = dict.fromkeys(("kept", *REASONS), 0)
    first = ""
    for block in blocks:
        facts = block.facts("clean")
        if facts["first"]:
            location = f"line {facts['first']:,} of {_files(block)}"
            if block.part == "test":
                raise Problem(
                    f"{location} is empty",
                    "text in both languages: all pairs are part of the test",
                    "remove the pair from both files",
                )
            first = first or location
        if block.part == "train":
            counts = {reason: count + facts[reason] for reason, count in counts.items()}
    kept_count = counts.pop("kept")
    left_out = ", ".join(f"{count:,} {REASONS[reason]}" for reason, count in counts.items() if count)
    if not kept_count:
        raise Problem(
            f"no training pairs remain: {left_out}; the first is {first}",
            "pairs with text in both languages",
            "check the files, or increase --longest",
        )
    if left_out:
        progress.note(f"excluded from training: {left_out}; the first is {first}")
    return counts


def _files(block: Block) -> str:
    return f"{block.names[0]} and {Path(block.names[1]).name}"


def check_overlap(test: Sequence[Block], train: Sequence[Block], allowed: bool, progress: Progress) -> int:
    # Warn of test pairs that are in training, or reject them; return their number.

    def pairs(blocks: Sequence[Block]) -> Iterator[bytes]:
        return chain.from_iterable(block.path("clean").read_bytes().split(b"\n")[:-1] for block in blocks)

    # The test part has all lines.
    named_pairs = ((f"line {number:,} of {_files(test[0])}", pair) for number, pair in enumerate(pairs(test), 1))
    return source_checks.overlap(named_pairs, pairs(train), "pairs", allowed, progress)


def check_foreign_codes(codes: Path, tokens: Mapping[str, int], word_counts: Mapping[str, int]) -> None:
    """Reject codes that split words into many tokens: they are for another language or kind of text."""
    parts = sum(tokens.values()) / sum(word_counts.values())
    if parts > MOST_PARTS:
        raise Problem(
            f"{codes} splits a word into {parts:.1f} tokens on average",
            f"at most {MOST_PARTS:g}: codes learnt from text like this",
            "pass other --codes, or none to learn them from the text",
        )


def check_unknown(blocks: Sequence[Block], progress: Progress) -> None:
    """Report test tokens that do not occur in training; reject a vocabulary with too many unknown tokens in a part."""
    for part in PARTS:
        facts_of_blocks = [block.facts("encode") for block in blocks if block.part == part]
        unknown = sum(facts["unknown"] for facts in facts_of_blocks)
        tokens = sum(sum(facts["tokens"]) for facts in facts_of_blocks)
        text = f"{unknown:,} of {tokens:,} tokens of the {part} part are not in the vocabulary"
        if unknown > MOST_UNKNOWN * tokens:
            raise Problem(text, f"at most {MOST_UNKNOWN:.0%}", "use the vocabulary and the codes of this text")
        if unknown:
            progress.note(text)


def compare_with_submitted(blocks: Sequence[Block], progress: Progress) -> str:
    """Compare the split text with GNMT's submission; report and return differences, which are allowed."""
    sums = {(part, side): hashlib.md5() for part in PARTS for side in SIDES}
    for block in blocks:
        for pair in stages.read_pairs(block.path("split")):
            for side, text in zip(SIDES, pair):
                sums[block.part, side].update(f"{text}\n".encode())
    differing = ", ".join(" ".join(key) for key, md5 in wmt.SUBMITTED_MD5.items() if sums[key].hexdigest() != md5)
    text = f"other tokens than in verify_dataset.sh of v0.5: {differing}" if differing else "every token as submitted"
    progress.note(text)
    return differing
