"""What all preparations of BERT's data have in common: the work of processes, and the shuffle at their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import numpy as np

from benchmarks.bert import buckets
from benchmarks.bert.masking import Settings
from benchmarks.bert.sources import Source
from benchmarks.common.data import workers
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.language.arrays import PARTS, VOCABULARY, Samples

Counts = Dict[str, Dict[str, int]]
"""Samples, tokens and masked words of each part."""


class Task(NamedTuple):
    """One preparation: from what and how."""

    source: Source
    settings: Settings
    entries: int
    """Of the vocabulary to learn; 0 where the source has one."""
    most: int
    """Samples of the evaluation set, at most."""
    allows_overlap: bool
    """Whether an evaluation set that is trained on is accepted."""
    seed: int
    scratch: Path
    processes: int
    progress: Progress

    @property
    def vocabulary(self) -> Path:
        """The file of the vocabulary, as it will be published."""
        return self.scratch / VOCABULARY

    def run(
        self, phase: str, unit: str, function: workers.Function, tasks: Sequence[Any], size: Callable[[Any], int]
    ) -> None:
        """Let the worker processes do what is not done yet: what has no file of facts."""
        waiting = [each for each in tasks if not each.facts_path.exists()]
        stage = workers.Stage(phase, unit, function, size)
        workers.run(stage, tasks, waiting, self.processes, self.scratch.parent, self.progress)

    def shuffle(self, train: List[str], test: Samples) -> Counts:
        """Write the arrays of both parts, from the shards of one and all samples of the other.

        Raises:
            Problem: a part has no sample.
        """
        tables = np.sum([buckets.table_of(stem)[:, -1] for stem in train], axis=0)
        sizes = (len(test), len(test.tokens), len(test.masked_places))
        counts = {part: dict(zip(buckets.SIZES, map(int, each))) for part, each in zip(PARTS, (tables, sizes))}
        for part in PARTS:
            if not counts[part]["samples"]:
                raise Problem(f"the {part} part has no sample", "text of at least two documents", "add to the source")
        filled = buckets.plan("train", train, self.scratch, self.seed)
        self.run("shuffle", "samples", buckets.fill, filled, lambda bucket: bucket.samples)
        buckets.write_whole("test", test, self.scratch)
        return counts
