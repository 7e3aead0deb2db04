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
    # Both sides of a part: sentence i of one is the translation of sentence i of the other.

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
        # Target lines of the test part as BLEU compares with; read when first asked for.
        return _lines(self.folder / REFERENCES)

    @cached_property
    def sources(self) -> List[str]:
        # Source lines of the test part; read when first asked for.
        return _lines(self.folder / SOURCES)


def open_data(folder: Path) -> DataSet:
    """Open a prepared data set; reads its vocabulary and no sentence, so that it may be open before the clock starts.

    Raises:
        Problem: there is none, it is half-written, or its files are not those of its manifest.
    """
    contents = manifest.read(folder)
    with opening(folder, "translation"):
        facts = contents["facts"]
        pairs = {part: Pairs(*(_sentences(folder, part, side) for side in SIDES)) for part in PARTS}
        language = facts["target_language"] if facts["detokenized"] else None
        entries = Vocabulary(vocabulary.read(folder / VOCABULARY), facts["kind"], language)
        languages = facts["source_language"], facts["target_language"]
        data = DataSet(pairs["train"], pairs["test"], entries, *languages, contents, folder)
        check(data)
    return data


def _lines(path: Path) -> List[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def _sentences(folder: Path, part: str, side: str) -> Sequences:
    tokens = np.load(str(folder / f"{part}_{side}.npy"), mmap_mode="r")
    return Sequences(tokens, np.load(str(folder / f"{part}_{side}_offsets.npy"), mmap_mode="r"))


def check(data: DataSet) -> None:
    # Compare the sizes of arrays and files with the manifest, and read none of them.
    folder, facts, splits = data.folder, data.manifest["facts"], data.manifest["splits"]
    expected = [("entries of the vocabulary", data.vocabulary.size, facts["vocabulary"])]
    for part, pairs in (("train", data.train), ("test", data.test)):
        for side, sentences in (("source", pairs.source), ("target", pairs.target)):
            expected.append((f"sentences in {part}_{side}", len(sentences), splits[part]["count"]))
    check_sizes(folder, data.manifest, expected)
