"""On-disk format: concatenated tokens of all sentences, and offsets.

For ``train`` and ``test`` and both sides::

    train_source.npy           uint16 or int32 [tokens], concatenated sentences without BOS and EOS
    train_source_offsets.npy   int64 [sentences + 1]

``vocabulary.txt`` (one entry per line, without the four special tokens), ``codes.txt`` (BPE merges, may be empty),
``test_source.txt`` and ``test_references.txt`` (raw lines of the test part) complete the data set. Arrays are read
through memory maps::

    data = open_data(Path("data/gnmt"))
    print(data.vocabulary.text(data.test.target[0]), data.references[0])
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, List, Mapping

import numpy as np

from benchmarks.common.data import manifest
from benchmarks.common.data.arrays import Sequences, check_sizes, opening
from benchmarks.translation import PARTS, REFERENCES, SIDES, SOURCES, VOCABULARY, vocabulary
from benchmarks.translation.vocabulary import Vocabulary


@dataclass(frozen=True)
class Pairs:
    # A part's two sides: sentence i of the target is the translation of sentence i of the source.

    source: Sequences
    target: Sequences

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class DataSet:
    train: Pairs
    test: Pairs
    vocabulary: Vocabulary  # of both languages
    source_language: str
    target_language: str
    manifest: Mapping[str, Any]
    folder: Path

    @cached_property
    def references(self) -> List[str]:
        # Target lines of the test part, the references for BLEU; read on first access.
        return _lines(self.folder / REFERENCES)

    @cached_property
    def sources(self) -> List[str]:
        # Source lines of the test part, read on first access.
        return _lines(self.folder / SOURCES)


def open_data(folder: Path) -> DataSet:
    """Open a prepared data set; reads the vocabulary and no sentences, so it may be called before the clock starts.

    Raises:
        Problem: the data set is missing, incomplete, or does not match its manifest.
    """
    contents = manifest.read(folder)
    with opening(folder, "translation"):
        facts = contents["facts"]
        pairs = {part: Pairs(*(_sentences(folder, part, side) for side in SIDES)) for part in PARTS}
        language = facts["target_language"] if facts["detokenized"] else None
        entries = Vocabulary(vocabulary.read(folder / VOCABULARY), facts["kind"], language)
        languages = facts["source_language"], facts["target_language"]
        data = DataSet(pairs["train"], pairs["test"], entries, *languages, contents, folder)
        # Without reading the arrays.
        sizes = [
            (f"sentences in {part}_{side}", len(getattr(pairs[part], side)), contents["splits"][part]["count"])
            for part in PARTS
            for side in SIDES
        ]
        check_sizes(folder, contents, [("entries of the vocabulary", entries.size, facts["vocabulary"]), *sizes])
    return data


def _lines(path: Path) -> List[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def _sentences(folder: Path, part: str, side: str) -> Sequences:
    tokens = np.load(str(folder / f"{part}_{side}.npy"), mmap_mode="r")
    return Sequences(tokens, np.load(str(folder / f"{part}_{side}_offsets.npy"), mmap_mode="r"))
