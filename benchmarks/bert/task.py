"""The common part of all preparations of BERT's data: the work of processes, and the shuffle at their end."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

import numpy as np

from benchmarks.bert import buckets
from benchmarks.bert.masking import Settings
from benchmarks.bert.sources import Source
from benchmarks.common.data.prepare import Content, Split
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.workers import Workers
from benchmarks.language import PARTS, VOCABULARY, part_files
from benchmarks.language.arrays import Samples

VERSION = "1"  # raise it when the same source and options give other bytes: unfinished parts are then made again
Counts = Dict[str, Dict[str, int]]  # samples, tokens and masked words of each part


class Task(NamedTuple):
    """One preparation: from what and how."""

    source: Source
    settings: Settings
    entries: int  # size of the vocabulary to learn; 0 where the source has one
    most: int  # samples of the evaluation set, at most
    allows_overlap: bool  # whether an evaluation set that is trained on is accepted
    seed: int
    scratch: Path
    workers: Workers

    @property
    def vocabulary(self) -> Path:
        """The file of the vocabulary, as it will be published."""
        return self.scratch / VOCABULARY

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
        self.workers.run("shuffle", "samples", buckets.fill, filled, lambda bucket: bucket.samples)
        buckets.write_whole("test", test, self.scratch)
        return counts

    def content(
        self, counts: Counts, entries: int, width: Tuple[int, int], facts: Mapping[str, Any], how: Mapping[str, Any]
    ) -> Content:
        """Return what the passport says.

        Args:
            counts: of each part.
            entries: of the vocabulary.
            width: tokens and masked words of a sample, at most.
            facts: further ones.
            how: it was made, beyond what all preparations have in common.
        """
        files = {part: (*part_files(part), *((VOCABULARY,) if part == "train" else ())) for part in PARTS}
        train, test = (counts[part]["samples"] for part in PARTS)
        return Content(
            name=self.source.name,
            splits={part: Split(counts[part]["samples"], files[part]) for part in PARTS},
            summary=f"{train:,} + {test:,} samples of {width[0]} tokens at most, {entries:,} entries",
            facts={
                "vocabulary": entries,
                "sequence_length": width[0],
                "max_predictions": width[1],
                "tokens": {part: counts[part]["tokens"] for part in PARTS},
                "masked": {part: counts[part]["masked"] for part in PARTS},
                **facts,
            },
            how={"made": self.source.made, "seed": self.seed, **how},
            tool={"version": VERSION, "numpy": np.__version__, "unicode": unicodedata.unidata_version},
        )
