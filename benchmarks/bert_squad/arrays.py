"""On-disk format: concatenated windows without padding.

For ``train`` and ``test``::

    train_tokens.npy     uint16 [tokens]: [CLS] question [SEP] paragraph part [SEP] of all windows
    train_begins.npy     uint16 [tokens]: offset of the token's first character in the paragraph; 0 outside
    train_ends.npy       uint16 [tokens]: offset of the last character + 1; 0 outside the paragraph
    train_best.npy       uint8 [tokens]: 1 if no other window has more context for the token
    train_offsets.npy    int64 [windows + 1]
    train_second.npy     uint16 [windows]: position in the window where the paragraph starts
    train_start.npy      uint16 [windows]: position of the answer's first token; 0 if not completely in the window
    train_end.npy        uint16 [windows]: position of the answer's last token, or 0
    train_question.npy   int32 [windows]: index of the question, ascending; a question's windows are in text order

``vocabulary.txt`` has one entry per line, as published; ``test_paragraphs.jsonl`` has one paragraph per line, with
the questions in order and all answers. Arrays are read through memory maps::

    data = open_data(Path("data/bert-squad"))
    print(data.vocabulary.text(data.test[0]), data.questions[0].references)
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, List, Mapping, NamedTuple, Tuple

import numpy as np

from benchmarks.bert_squad import ARRAYS, OF_TOKENS, OF_WINDOWS, PARAGRAPHS, PARTS, VOCABULARY
from benchmarks.bert_squad.answers import Places
from benchmarks.common.data import manifest
from benchmarks.common.data.arrays import Sequences, check_sizes, mapped, opening
from benchmarks.language import vocabulary
from benchmarks.language.vocabulary import Vocabulary

LONGEST_PARAGRAPH = (1 << 16) - 1  # characters


@dataclass(frozen=True)
class Windows(Sequences):
    # One part; the fields are as above. A length has [CLS] and both [SEP].

    begins: np.ndarray
    ends: np.ndarray
    best: np.ndarray
    second: np.ndarray
    start: np.ndarray
    end: np.ndarray
    question: np.ndarray

    def places(self, index: int) -> Places:
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.begins[part], self.ends[part], self.best[part]


class Asked(NamedTuple):
    id: str
    text: str
    context: str
    references: Tuple[str, ...]  # all answers


@dataclass(frozen=True)
class DataSet:
    train: Windows
    test: Windows
    vocabulary: Vocabulary
    manifest: Mapping[str, Any]
    folder: Path

    @property
    def sequence_length(self) -> int:
        return int(self.manifest["facts"]["sequence_length"])

    @cached_property
    def questions(self) -> List[Asked]:
        # Questions of the test part, read on first access.
        questions = []
        for line in (self.folder / PARAGRAPHS).read_text(encoding="utf-8").split("\n")[:-1]:
            paragraph = json.loads(line)
            for question in paragraph["questions"]:
                questions.append(
                    Asked(question["id"], question["question"], paragraph["context"], tuple(question["answers"]))
                )
        return questions


def open_data(folder: Path) -> DataSet:
    """Open a prepared data set; reads the vocabulary and no windows, so it may be called before the clock starts.

    Raises:
        Problem: the data set is missing, incomplete, or does not match its manifest.
    """
    contents = manifest.read(folder)
    with opening(folder, "bert-squad"):
        parts = [{name: mapped(folder / f"{part}_{name}.npy", kind) for name, kind in ARRAYS.items()} for part in PARTS]
        train, test = (Windows(**part) for part in parts)
        data = DataSet(train, test, vocabulary.read(folder / VOCABULARY), contents, folder)
        expected = [("entries of the vocabulary", data.vocabulary.size, contents["facts"]["vocabulary"])]
        for part, windows in zip(PARTS, (train, test)):
            count, tokens = contents["splits"][part]["count"], len(windows.tokens)
            expected.append((f"windows in {part}_offsets", len(windows), count))
            sizes = {**dict.fromkeys(OF_WINDOWS, count), **dict.fromkeys(OF_TOKENS, tokens)}
            expected += [
                (f"values in {part}_{name}", len(getattr(windows, name)), size) for name, size in sizes.items()
            ]
        check_sizes(folder, contents, expected)
    return data
