"""Writes pretraining data: clean, choose the evaluation set, learn or copy the vocabulary, mask and shuffle shards."""

import argparse
import hashlib
import platform
import unicodedata
from collections import Counter
from functools import partial
from pathlib import Path
from typing import List

import numpy as np

from benchmarks.bert import evaluation, records, shards, sources, stages, texts, wikipedia
from benchmarks.bert.masking import MASKED, Settings
from benchmarks.bert.sources import Prepared, Task
from benchmarks.common.data.files import read_facts
from benchmarks.common.data.prepare import Content, Listing, Split, check_room
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.common.data.workers import Workers
from benchmarks.language import PARTS, VOCABULARY, part_files, vocabulary, wordpiece

VERSION = "2"  # increase it if the output for the same source and options changes: unfinished parts are then rewritten
BLOCK_BYTES = 8 << 20  # approximate text per block
BYTES_PER_PASS = 1.6  # maximum bytes written per byte of text and pass: tokens and masked tokens, in shards and arrays
PREDICTIONS = {128: 20, 512: 76}  # as published for both phases; NVIDIA v0.7 and DeepLearningExamples
# Shards for counting words, distributed over the text: more would not fit into bounded memory, with little effect.
MOST_COUNTED = 32
SMALL = {"vocabulary": 2048, "length": 128, "evaluation": 1000}
SUBMITTED = {"vocabulary": 0, "length": 512, "evaluation": 10_000}


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    # Find the text. The fingerprint includes everything that determines the output.
    files: List[Path] = []
    source, parts = None, 0
    if args.origin is not None:
        source = sources.find(args)
        files += [file.path for file in (*source.train, *source.test)]
        parts = len(source.train)
        files += [path for path in (source.vocabulary, source.listed) if path]
        if source.vocabulary:
            vocabulary.read(source.vocabulary)
    elif args.evaluation or args.vocabulary:
        raise Problem("--evaluation or --vocabulary without raw data", "both only with your own text", "pass the text")
    options = (args.name, args.seed, args.vocabulary_size, args.sequence_length, args.predictions, args.duplication)
    settings = (args.evaluation_samples, args.paragraphs)
    listed = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    # Tokenization depends on the Unicode version.
    origin = (VERSION, source and (source.name, source.made), unicodedata.unidata_version)
    python = "" if source else platform.python_version()
    return Listing(
        source, hashlib.sha256(repr((origin, python, parts, listed, options, settings)).encode()).hexdigest()
    )


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    """Write arrays and vocabulary.

    Raises:
        Problem: the source is damaged or inconsistent, or leaves a part empty.
    """
    source = listing.source or sources.toy_data_set(scratch, args.name)
    defaults = SUBMITTED if listing.source else SMALL
    length = args.sequence_length or defaults["length"]
    predictions = args.predictions or PREDICTIONS.get(length, max(1, round(length * MASKED)))
    task = Task(
        source=source,
        settings=Settings(length, predictions, args.duplication),
        entries=0 if source.vocabulary else args.vocabulary_size or defaults["vocabulary"],
        most=args.evaluation_samples or defaults["evaluation"],
        allows_overlap=args.allow_overlap,
        seed=args.seed,
        scratch=scratch,
        workers=Workers(args.workers, scratch.parent, progress),
    )
    prepared = records.write(task) if source.is_packed else _write_text(task)
    test_stem = str(scratch / "held")
    shards.write(test_stem, prepared.test)
    counts = {}
    for part, stems in (("train", prepared.train), ("test", [test_stem])):
        progress.update("write", PARTS.index(part), len(PARTS), unit="parts")
        counts[part] = shards.write_part(part, stems, scratch)
        if not counts[part]["next"]:
            raise Problem(f"the {part} part has no sample", "text of at least two documents", "add to the source")
    entries = vocabulary.read(task.vocabulary).size
    train, test = counts["train"]["next"], counts["test"]["next"]
    return Content(
        name=source.name,
        splits={"train": Split(train, (*part_files("train"), VOCABULARY)), "test": Split(test, part_files("test"))},
        summary=f"{train:,} + {test:,} samples of {prepared.width[0]} tokens at most, {entries:,} entries",
        facts={
            "vocabulary": entries,
            "sequence_length": prepared.width[0],
            "max_predictions": prepared.width[1],
            "tokens": {part: counts[part]["tokens"] for part in PARTS},
            "masked": {part: counts[part]["masked_labels"] for part in PARTS},
            **prepared.facts,
        },
        how={"made": source.made, "seed": args.seed, **prepared.how},
        tool={"version": VERSION, "numpy": np.__version__, "unicode": unicodedata.unidata_version},
    )


def _write_text(task: Task) -> Prepared:
    blocks = _blocks(task)
    task.workers.run("clean", "bytes", stages.clean, blocks, lambda block: block.end - block.begin)
    choice = evaluation.choose(blocks, task)
    text = sum(size for _, size in choice.train)
    present = sum(path.stat().st_size for path in task.scratch.iterdir() if path.suffix != ".text")
    check_room(task.scratch, int(text * BYTES_PER_PASS * task.settings.duplication) - present)
    if not task.vocabulary.exists():
        _write_vocabulary(task, choice)
    tasks = [
        stages.Shard(
            number, part, stem, size, choice.left_out.get(stem, ()), task.settings, task.seed, str(task.vocabulary)
        )
        for part, stems in (("train", choice.train), ("test", choice.test))
        for number, (stem, size) in enumerate(stems)
    ]
    task.workers.run("mask", "bytes", stages.mask, tasks, lambda shard: shard.size)
    stems = {part: [shard.stem for shard in tasks if shard.part == part] for part in PARTS}
    test_samples = shards.shuffled(shards.join(map(shards.read, stems["test"])), task.seed, "test")
    # The samples are shuffled: the first ones are a random selection.
    test_samples = test_samples.take(np.arange(min(task.most, len(test_samples))))

    cleaned = [read_facts(block.done_path) for block in blocks]
    masked = {part: [read_facts(shard.done_path) for shard in tasks if shard.part == part] for part in PARTS}
    left_out = Counter({"copies of evaluation documents": choice.copies})
    for facts in cleaned:
        left_out.update(facts["counts"])
    counted_keys = ("documents", "sentences", "bytes")
    totals = {name: sum(shard[name] for facts in cleaned for shard in facts["shards"]) for name in counted_keys}
    totals["unknown"] = sum(facts["unknown"] for part in PARTS for facts in masked[part])
    documents = {part: sum(facts["documents"] for facts in masked[part]) for part in PARTS}
    text_facts = {"kind": "text", "duplication": task.settings.duplication, "documents": documents}
    how = {"text": totals, "left_out": left_out, "evaluation": choice.rule, "in_both": choice.common}
    return Prepared(stems["train"], test_samples, task.settings[:2], text_facts, how)


def _blocks(task: Task) -> List[stages.Block]:
    # Split the files into ranges of complete documents.
    blocks: List[stages.Block] = []
    for part, files in (("train", task.source.train), ("test", task.source.test)):
        for file in files:
            is_dump = file.form == wikipedia.DUMP
            for start, end in wikipedia.cut(file.path) if is_dump else texts.cut(file.path, file.form, BLOCK_BYTES):
                stem = str(task.scratch / f"{part}-{len(blocks):06}")
                blocks.append(stages.Block(part, file.form, str(file.path), start, end, stem, stages.SHARD_BYTES))
    return blocks


def _write_vocabulary(task: Task, choice: evaluation.Chosen) -> None:
    # Write the given vocabulary, or train one on the training text.
    progress = task.workers.progress
    if task.source.vocabulary:
        entries = list(vocabulary.read(task.source.vocabulary).entries)
    else:
        stems = [stem for stem, _ in choice.train][:: -(-len(choice.train) // MOST_COUNTED)]
        counts: Counter[str] = Counter()
        for number, stem in enumerate(stems):
            progress.update("count", number, len(stems), unit="shards")
            for index, document in enumerate(stages.read_shard(stem)):
                if index not in choice.left_out.get(stem, ()):
                    counts.update(word for sentence in document for word in wordpiece.words(sentence))
        report = partial(progress.update, "learn", total=task.entries, unit="entries")
        entries = wordpiece.learn(counts, task.entries, report)
    partial_file = task.vocabulary.with_suffix(".learnt")
    vocabulary.write(partial_file, entries)
    partial_file.replace(task.vocabulary)
