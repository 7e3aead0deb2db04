"""Writes pretraining data from MLPerf's own prepared records: take the padding out, compare both parts, shuffle."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

import numpy as np

from benchmarks.bert import buckets, overlap, records
from benchmarks.bert.records import Packed
from benchmarks.bert.sources import File
from benchmarks.bert.task import Task
from benchmarks.common.data import source_checks
from benchmarks.common.data.files import in_one_step, read_facts
from benchmarks.common.data.prepare import Content, check_room
from benchmarks.common.data.problem import Problem
from benchmarks.language import vocabulary

BUCKET_BYTES = 128 << 20  # packed samples of a bucket, about: HDF5 has 6 times the bytes of its tokens


def write(task: Task) -> Content:
    """Write arrays and vocabulary.

    Raises:
        Problem: records are damaged, of another vocabulary or of several lengths, or the parts overlap.
    """
    if task.source.vocabulary is None:
        raise Problem("records without a vocabulary", "the one they were made with", "add --vocabulary FILE")
    total = sum(each.path.stat().st_size for each in task.source.train)
    check_room(task.scratch, 2 * total)
    entries = vocabulary.read(task.source.vocabulary)
    vocabulary.write(task.vocabulary, entries.entries)
    held_files = _packed(task, "test", task.source.test, 1)
    task.workers.run("convert", "bytes", records.convert, held_files, lambda packed: packed.size)
    # In the order of the files, as run_pretraining.py (NVIDIA v0.7) takes its first samples.
    held = buckets.gather("test", _stems(held_files), 0, None)
    held = held.take(np.arange(min(task.most, len(held))))
    runs = task.scratch / "runs"
    wanted = np.unique(overlap.runs_of(held, entries)[0])
    with in_one_step(runs) as file:
        file.write(wanted.tobytes())
    train_files = _packed(task, "train", task.source.train, max(1, -(-total // BUCKET_BYTES)), str(runs))
    task.workers.run("convert", "bytes", records.convert, train_files, lambda packed: packed.size)
    every = [*train_files, *held_files]
    width = _width(every)
    records.refuse_equal_files([(packed.path, read_facts(packed.done_path)) for packed in every])
    seen = np.any([np.fromfile(str(packed.seen_path), bool) for packed in train_files], axis=0)
    found = overlap.find(held, entries, wanted, seen)
    common = source_checks.overlapping(found, len(held), "samples", task.allows_overlap, task.workers.progress)
    counts = task.shuffle(_stems(train_files), held)
    return task.content(counts, entries.size, width, {"kind": "records"}, {"files": len(every), "in_both": common})


def _packed(task: Task, part: str, files: Sequence[File], count: int, compared: str = "") -> List[Packed]:
    found = []
    for number, file in enumerate(files):
        stem = str(task.scratch / f"{part}-{number:06}")
        how = stem, str(task.vocabulary), count, task.seed, compared
        found.append(Packed(number, part, str(file.path), file.form, file.path.stat().st_size, *how))
    return found


def _stems(files: Sequence[Packed]) -> List[str]:
    return [stem for packed in files for stem in read_facts(packed.done_path)["shards"]]


def _width(files: Sequence[Packed]) -> Tuple[int, int]:
    # Return tokens and masked words of a sample, at most: the same in all files.
    widths: Dict[Tuple[int, int], str] = {}
    for packed in files:
        facts = read_facts(packed.done_path)
        widths.setdefault((facts["width"], facts["predictions"]), packed.path)
    if len(widths) > 1:
        found = "; ".join(f"{path}: {width} tokens, {most} masked" for (width, most), path in widths.items())
        raise Problem(found, "records of one length", "name files of one phase: 128 tokens, or 512")
    return next(iter(widths))
