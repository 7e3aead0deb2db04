"""Writes pretraining data: clean, choose the evaluation set, learn or copy the vocabulary, mask, shuffle."""

from __future__ import annotations

import argparse
import hashlib
import platform
import unicodedata
from collections import Counter
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from benchmarks.bert import buckets, converting, evaluation, sources, stages, texts, wikipedia, words
from benchmarks.bert.evaluation import Chosen
from benchmarks.bert.masking import MASKED, Settings
from benchmarks.bert.sources import File, Source
from benchmarks.bert.stages import DUMP, Block, Shard
from benchmarks.bert.task import VERSION, Counts, Task
from benchmarks.common.data.files import read_facts
from benchmarks.common.data.prepare import Content, check_room
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.common.data.workers import Workers
from benchmarks.language import PARTS, vocabulary

BLOCK_BYTES = 8 << 20  # text of a block, about
BUCKET_BYTES = 32 << 20  # text of a bucket times the passes over it, about
BYTES_PER_PASS = 1.6  # written per byte of text and pass, at most: tokens and masked words, in shards and in the arrays
PREDICTIONS = {128: 20, 512: 76}  # as published for both phases; NVIDIA v0.7 and DeepLearningExamples
SMALL = {"vocabulary": 2048, "length": 128, "evaluation": 1000}
SUBMITTED = {"vocabulary": 0, "length": 512, "evaluation": 10_000}


class Listing(NamedTuple):
    """The source of a preparation."""

    source: Optional[Source]  # none for the toy data set, whose text is not written yet
    fingerprint: str


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    """Find the text; all that decides what is written goes into the fingerprint."""
    files: List[Path] = []
    source, parts = None, 0
    if args.origin is not None:
        source = sources.find(args)
        files += [each.path for each in (*source.train, *source.test)]
        parts = len(source.train)
        files += [path for path in (source.vocabulary, source.listed) if path]
        if source.vocabulary:
            vocabulary.read(source.vocabulary)
    elif args.evaluation or args.vocabulary:
        raise Problem("--evaluation or --vocabulary without raw data", "both for a text of your own", "name the text")
    options = (args.name, args.seed, args.vocabulary_size, args.sequence_length, args.predictions, args.duplication)
    more = (args.evaluation_samples, args.paragraphs)
    listed = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    # The words of a text are cut by what Unicode says of its characters.
    made = (VERSION, source and (source.name, source.made), unicodedata.unidata_version)
    python = "" if source else platform.python_version()
    return Listing(source, hashlib.sha256(repr((made, python, parts, listed, options, more)).encode()).hexdigest())


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    """Write arrays and vocabulary."""
    task = _task(listing, args, scratch, progress)
    return converting.write(task) if task.source.is_packed else _write_text(task)


def _task(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Task:
    source = listing.source or sources.toy_data_set(scratch, args.name)
    defaults = SUBMITTED if listing.source else SMALL
    length = args.sequence_length or defaults["length"]
    predictions = args.predictions or PREDICTIONS.get(length, max(1, round(length * MASKED)))
    settings = Settings(length, predictions, args.duplication)
    entries = 0 if source.vocabulary else args.vocabulary_size or defaults["vocabulary"]
    most = args.evaluation_samples or defaults["evaluation"]
    workers = Workers(args.workers, scratch.parent, progress)
    return Task(source, settings, entries, most, args.allow_overlap, args.seed, scratch, workers)


def _write_text(task: Task) -> Content:
    blocks = _blocks(task)
    task.workers.run("clean", "bytes", stages.clean, blocks, lambda block: block.end - block.begin)
    chosen = evaluation.choose(blocks, task)
    text = sum(size for _, size in chosen.train)
    present = sum(path.stat().st_size for path in task.scratch.iterdir() if path.suffix != ".text")
    check_room(task.scratch, int(text * BYTES_PER_PASS * task.settings.duplication) - present)
    words.write_vocabulary(task.source.vocabulary, task.entries, chosen, task.scratch, task.workers.progress)
    shards = _shards(task, chosen, text)
    task.workers.run("mask", "bytes", stages.mask, shards, lambda shard: shard.size)
    stems = {part: [shard.stem for shard in shards if shard.part == part] for part in PARTS}
    held = buckets.gather("test", stems["test"], 0, task.seed)
    # They are shuffled: the first ones are a random choice.
    held = held.take(np.arange(min(task.most, len(held))))
    return _content(task, blocks, shards, chosen, task.shuffle(stems["train"], held))


def _blocks(task: Task) -> List[Block]:
    # Cut the files into ranges of whole documents.
    found: List[Block] = []
    for part, files in (("train", task.source.train), ("test", task.source.test)):
        for file in files:
            for begin, end in _ranges(file):
                stem = str(task.scratch / f"{part}-{len(found):06}")
                found.append(Block(part, file.form, str(file.path), begin, end, stem, stages.SHARD_BYTES))
    return found


def _ranges(file: File) -> List[Tuple[int, int]]:
    if file.form == DUMP:
        return wikipedia.cut(file.path)
    return texts.cut(file.path, file.form, BLOCK_BYTES)


def _shards(task: Task, chosen: Chosen, text: int) -> List[Shard]:
    count = max(1, -(-text * task.settings.duplication // BUCKET_BYTES))
    vocabulary = str(task.vocabulary)
    found = []
    for part, stems, number in (("train", chosen.train, count), ("test", chosen.test, 1)):
        for place, (stem, size) in enumerate(stems):
            left_out = chosen.left_out.get(stem, ())
            how = task.settings, task.seed, number, vocabulary
            found.append(Shard(place, part, stem, size, left_out, *how))
    return found


def _content(task: Task, blocks: Sequence[Block], shards: Sequence[Shard], chosen: Chosen, counts: Counts) -> Content:
    cleaned = [read_facts(block.done_path) for block in blocks]
    masked = {part: [read_facts(each.done_path) for each in shards if each.part == part] for part in PARTS}
    left_out = Counter({"copies of evaluation documents": chosen.copies})
    for each in cleaned:
        left_out.update(each["counts"])
    text = {name: sum(each[name] for facts in cleaned for each in facts["shards"]) for name in _TEXT}
    text["unknown"] = sum(facts["unknown"] for each in masked.values() for facts in each)
    documents = {part: sum(facts["documents"] for facts in masked[part]) for part in PARTS}
    facts = {"kind": "text", "duplication": task.settings.duplication, "documents": documents}
    how = {"text": text, "left_out": left_out, "evaluation": chosen.rule, "in_both": chosen.common}
    return task.content(counts, vocabulary.read(task.vocabulary).size, task.settings[:2], facts, how)


_TEXT = ("documents", "sentences", "bytes")
