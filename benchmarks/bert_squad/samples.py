"""Windows, answers and vocabulary, for benchmarks/common/data/sample_checks.py."""

import unicodedata
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Tuple

import numpy as np

from benchmarks.bert_squad.arrays import DataSet, Windows, open_data
from benchmarks.common.data import sample_checks
from benchmarks.language.samples import words

LEAST_SAME = 0.8  # minimum fraction of tokens that match the paragraph at their offsets; accents are stripped
LEAST_ANSWERED = 0.5  # minimum fraction of training windows with an answer


def _plain(text: str) -> str:
    return "".join(
        character for character in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(character) != "Mn"
    )


def _placed(data: DataSet, window: int) -> bool:
    # Whether most tokens in a test window match the text of the question's paragraph.
    windows, context = data.test, data.questions[int(data.test.question[window])].context
    (begins, ends, _), tokens = windows.places(window), windows[window].tolist()
    entries = data.vocabulary.entries
    same = [
        _plain(context[begins[index] : ends[index]])
        == entries[tokens[index]][2 * entries[tokens[index]].startswith("##") :]
        for index in np.flatnonzero(ends > 0).tolist()
    ]
    return not same or sum(same) >= LEAST_SAME * len(same)


def _own(data: DataSet) -> Iterator[Tuple[str, str]]:
    for name, windows in (("train", data.train), ("test", data.test)):
        indices = sample_checks.spread(len(windows), 2000).tolist()
        yield from words(name, [windows[index] for index in indices], data.vocabulary)
        if (np.diff(windows.question) < 0).any():
            yield f"{name}: windows are not in the order of their questions", "ascending questions"
        right: Dict[int, bool] = {}
        for index in indices:
            start, end, length = int(windows.start[index]), int(windows.end[index]), len(windows[index])
            right[index] = start <= end < length and (start == 0 or start >= int(windows.second[index]))
        problem = f"windows of {name} have an answer outside of the paragraph"
        yield from sample_checks.agreement(right, problem, "answers in it: they may be those of other windows", 0.99)
    if float((np.asarray(data.train.start) > 0).mean()) < LEAST_ANSWERED:
        yield "train: most windows have no answer", f"an answer in {LEAST_ANSWERED:.0%}"
    top = int(data.test.question.max(initial=-1)) + 1
    if top > len(data.questions):
        yield f"test: questions up to {top - 1:,}", f"{len(data.questions):,} in the paragraphs"
        return
    placed = {index: _placed(data, index) for index in sample_checks.spread(len(data.test), 200).tolist()}
    expected = "the same order and the vocabulary that made the tokens"
    yield from sample_checks.agreement(placed, "windows of test are not the text of their paragraph", expected, 0.8)


def _part(windows: Windows) -> sample_checks.Part:
    return sample_checks.Part(
        len(windows),
        lambda indices: [sample_checks.key(windows[at], windows.start[at : at + 1]) for at in indices.tolist()],
    )


def view(directory: Path, manifest: Mapping[str, Any]) -> sample_checks.View:
    data = open_data(directory)
    return sample_checks.View({"train": _part(data.train), "test": _part(data.test)}, extra_checks=lambda: _own(data))
