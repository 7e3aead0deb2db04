"""The on-disk format: the tokens of all sentences in one array, and where each sentence begins.

For ``train`` and ``test`` and each side::

    train_source.npy           uint16 or int32 [tokens], one sentence after the other, without BOS and EOS
    train_source_offsets.npy   int64 [sentences + 1]

Next to them ``vocabulary.txt`` (one entry a line, without the four special ones), ``codes.txt`` (BPE merges, empty
where there are none), ``test_source.txt`` and ``test_references.txt`` (raw lines of the test part). Arrays are read
through memory maps::

    data = open_data(Path("data/gnmt"))
    print(data.vocabulary.text(data.test.target[0]), data.references[0])
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Mapping, Tuple

import numpy as np

from benchmarks.common.data import passport
from benchmarks.common.data.passport import prepare_again
from benchmarks.common.data.problem import Problem
from benchmarks.translation import vocabulary
from benchmarks.translation.vocabulary import Vocabulary

PARTS = ("train", "test")
SIDES = ("source", "target")
VOCABULARY, CODES = "vocabulary.txt", "codes.txt"
SOURCES, REFERENCES = "test_source.txt", "test_references.txt"


def part_files(part: str) -> Tuple[str, ...]:
    """Return the names of the arrays of a part."""
    return tuple(f"{part}_{side}{kind}.npy" for side in SIDES for kind in ("", "_offsets"))


FILES = (*part_files("train"), *part_files("test"), VOCABULARY, CODES, SOURCES, REFERENCES)


@dataclass(frozen=True)
class Sentences:
    """One side of one part."""

    tokens: np.ndarray
    """uint16 or int32 [tokens], a memory map: all sentences one after the other, without BOS and EOS."""
    offsets: np.ndarray
    """int64 [sentences + 1]"""
    lengths: np.ndarray
    """int32 [sentences]: tokens without BOS and EOS."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True)
class Pairs:
    """Both sides of a part: sentence i of one is the translation of sentence i of the other."""

    source: Sentences
    target: Sentences

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class DataSet:
    """A prepared data set, opened."""

    train: Pairs
    test: Pairs
    vocabulary: Vocabulary
    """Of both languages."""
    references: List[str]
    """Target lines of the test part as BLEU compares with."""
    sources: List[str]
    """Source lines of the test part."""
    source_language: str
    target_language: str
    passport: Mapping[str, Any]


def open_data(folder: Path) -> DataSet:
    """Open a prepared data set.

    Raises:
        Problem: there is none, it is half-written, or its files do not fit together.
    """
    found = passport.read(folder)
    facts = found["facts"]
    try:
        pairs = {part: Pairs(*(_sentences(folder, part, side) for side in SIDES)) for part in PARTS}
        texts = {name: (folder / name).read_text(encoding="utf-8").split("\n")[:-1] for name in (SOURCES, REFERENCES)}
        language = facts["target_language"] if facts["detokenized"] else None
        entries = Vocabulary(vocabulary.read(folder / VOCABULARY), facts["kind"], language)
        languages = facts["source_language"], facts["target_language"]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise Problem(f"{folder}: {error!r}", "a data set for translation", prepare_again(folder)) from None
    data = DataSet(pairs["train"], pairs["test"], entries, texts[REFERENCES], texts[SOURCES], *languages, found)
    problems = check(data, folder)
    if problems:
        raise problems[0]
    return data


def _sentences(folder: Path, part: str, side: str) -> Sentences:
    tokens = np.load(str(folder / f"{part}_{side}.npy"), mmap_mode="r")
    offsets = np.load(str(folder / f"{part}_{side}_offsets.npy"))
    return Sentences(tokens, offsets, np.diff(offsets).astype(np.int32))


def check(data: DataSet, folder: Path) -> List[Problem]:
    """Compare the sizes of the arrays with each other and with the passport: cheap, nothing is read but offsets."""
    again, facts, splits = prepare_again(folder), data.passport["facts"], data.passport["splits"]
    expected = [("entries of the vocabulary", data.vocabulary.size, facts["vocabulary"])]
    for part, pairs in (("train", data.train), ("test", data.test)):
        for side, sentences in (("source", pairs.source), ("target", pairs.target)):
            expected += [
                (f"sentences in {part}_{side}", len(sentences), splits[part]["count"]),
                (f"tokens in {part}_{side}", len(sentences.tokens), int(sentences.offsets[-1])),
            ]
    expected += [(f"lines in {SOURCES}", len(data.sources), len(data.test))]
    expected += [(f"lines in {REFERENCES}", len(data.references), len(data.test))]
    return [Problem(f"{folder}: {got:,} {what}", f"{want:,}", again) for what, got, want in expected if got != want]
