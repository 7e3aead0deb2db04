"""Writes questions about paragraphs as windows: read or generate, tokenize, cut, look for the answers."""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional

import numpy as np

from benchmarks.bert_squad import (
    ARRAYS,
    OF_TOKENS,
    PARAGRAPHS,
    PARTS,
    VOCABULARY,
    made,
    part_files,
    squad,
    windows,
)
from benchmarks.bert_squad.arrays import LONGEST_PARAGRAPH
from benchmarks.bert_squad.windows import Cut
from benchmarks.common.data import source_checks, text_files
from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.prepare import Content, Listing, Split, check_room
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.language import vocabulary
from benchmarks.language.vocabulary import SPECIAL
from benchmarks.language.wordpiece import Tokenizer, words

VERSION = "1"  # increase it if the output for the same source and options changes
# As in scripts/run_squad.sh and run_squad.py of DeepLearningExamples; as short as the toy data set's paragraphs.
PUBLISHED, SMALL = Cut(384, 128, 64), Cut(40, 12, 12)
SHORTEST_PART = 8  # minimum space for the paragraph in a window, tokens
# Maximum bytes written per byte of JSON: a paragraph is written once per question and window.
ROOM_FACTOR = 24


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    # Find the files. The fingerprint includes everything that determines the output.
    options = args.sequence_length, args.stride, args.question_length
    default = SMALL if args.origin is None else PUBLISHED
    cut = Cut(*(option if option is not None else usual for option, usual in zip(options, default)))
    if cut.sequence_length < cut.question_length + windows.MARKS + SHORTEST_PART:
        raise Problem(
            f"--sequence-length {cut.sequence_length} with --question-length {cut.question_length}",
            f"room for the question, {windows.MARKS} marks and {SHORTEST_PART} tokens of the paragraph",
            "a longer --sequence-length, or a shorter --question-length",
        )
    listed: List[Any] = []
    for name in (squad.TRAIN, squad.TEST, "vocab.txt") if args.origin is not None else ():
        path = args.origin / name
        text_files.refuse_packed_copy(path, f"{name} without compression")
        if not path.is_file():
            raise Problem(
                f"{path} is not there",
                f"{squad.TRAIN}, {squad.TEST} and vocab.txt",
                "put SQuAD v1.1 and the vocabulary of the published weights into one folder",
            )
        listed.append((name, path.stat().st_size, path.stat().st_mtime_ns))
    facts = repr((VERSION, args.name, args.seed if args.origin is None else 0, tuple(cut), listed))
    return Listing(cut, hashlib.sha256(facts.encode()).hexdigest())


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    folder: Optional[Path] = args.origin
    cut: Cut = listing.source
    if folder is None:
        paragraphs = {part: made.paragraphs(part, args.seed) for part in PARTS}
        texts = [
            text for each in paragraphs["train"] for text in (each.context, *(part.text for part in each.questions))
        ]
        entries, sha256 = [*SPECIAL, *sorted({word for text in texts for word in words(text)})], {}
    else:
        files = {"train": squad.TRAIN, "test": squad.TEST}
        paragraphs = {part: squad.read(folder / files[part]) for part in PARTS}
        sha256 = {part: hashlib.sha256((folder / files[part]).read_bytes()).hexdigest() for part in PARTS}
        entries = list(vocabulary.read(folder / "vocab.txt").entries)
        check_room(scratch, ROOM_FACTOR * sum((folder / name).stat().st_size for name in files.values()))
    train, test_questions = (
        [(entry.id, (paragraph.context, entry.text)) for paragraph in paragraphs[part] for entry in paragraph.questions]
        for part in PARTS
    )
    questions = (question for _, question in train)
    common = source_checks.overlap(test_questions, questions, "questions", args.allow_overlap, progress)
    vocabulary.write(scratch / VOCABULARY, entries)
    tokenizer = Tokenizer(vocabulary.read(scratch / VOCABULARY))
    written = {part: write_part(part, paragraphs[part], tokenizer, cut, scratch, progress) for part in PARTS}
    write_paragraphs(scratch / PARAGRAPHS, paragraphs["test"])
    counts, window_counts = ({part: written[part][name] for part in PARTS} for name in ("questions", "windows"))
    return Content(
        name=args.name or (made.NAME if folder is None else "squad-v1.1"),
        splits={part: Split(window_counts[part], part_files(part)) for part in PARTS},
        summary=f"{counts['train']:,} + {counts['test']:,} questions, {window_counts['train']:,} + "
        f"{window_counts['test']:,} windows",
        facts={
            "vocabulary": len(entries),
            "sequence_length": cut.sequence_length,
            "stride": cut.stride,
            "question_length": cut.question_length,
            "questions": counts,
        },
        how={
            "made": folder is None,
            "seed": args.seed if folder is None else None,
            "in_both": common,
            "sha256": sha256,
            **{name: {part: written[part][name] for part in PARTS} for name in ("left_out", "with_answer", "cut_off")},
        },
        tool={"version": VERSION, "numpy": np.__version__},
    )


def write_part(
    part: str, paragraphs: List[squad.Paragraph], tokenizer: Tokenizer, cut: Cut, scratch: Path, progress: Progress
) -> Dict[str, int]:
    """Write a part's arrays.

    Returns numbers: of windows, questions, questions without answer tokens (``left_out``), windows ``with_answer``, and
    questions that were ``cut_off`` at the limit.
    """
    part_windows: List[Dict[str, Any]] = []
    owners: List[int] = []
    number = left_out = cut_off = 0
    for done, paragraph in enumerate(paragraphs, 1):
        text = windows.tokenized(paragraph.context, tokenizer)
        if not len(text.ids) or len(paragraph.context) > LONGEST_PARAGRAPH:
            raise Problem(
                f"a paragraph of {len(paragraph.context):,} characters and {len(text.ids):,} tokens: "
                + repr(paragraph.context[:60]),
                f"at least one token, and at most {LONGEST_PARAGRAPH:,} characters",
                "remove or split it",
            )
        for question in paragraph.questions:
            ids = tokenizer.encode(question.text).ids
            answer = windows.answer_tokens(text, question.answers[0])
            cut_off += len(ids) > cut.question_length
            left_out += answer is None
            if answer is not None or part == "test":
                part_windows += windows.windows(ids, text, cut, tokenizer.vocabulary, answer)
                owners += [number] * (len(part_windows) - len(owners))
            number += 1
        progress.update(part, done, len(paragraphs), unit="paragraphs")
    arrays = {
        **{name: np.concatenate([window[name] for window in part_windows]) for name in OF_TOKENS},
        "offsets": np.cumsum([0, *(len(window["tokens"]) for window in part_windows)]),
        **{name: np.array([window[name] for window in part_windows]) for name in ("second", "start", "end")},
        "question": np.array(owners),
    }
    for name, values in arrays.items():
        write_array(scratch / f"{part}_{name}.npy", values.astype(ARRAYS[name]))
    with_answer = int(np.count_nonzero(arrays["start"]))
    counts = {"windows": len(part_windows), "questions": number, "left_out": left_out}
    return {**counts, "with_answer": with_answer, "cut_off": cut_off}


def write_paragraphs(path: Path, paragraphs: Iterable[squad.Paragraph]) -> None:
    # Write the references of the evaluation, one paragraph per line.
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for paragraph in paragraphs:
            questions = [
                {"id": question.id, "question": question.text, "answers": [answer.text for answer in question.answers]}
                for question in paragraph.questions
            ]
            # JSON escapes all line separators of Unicode, so a paragraph is on one line.
            file.write(json.dumps({"context": paragraph.context, "questions": questions}) + "\n")
