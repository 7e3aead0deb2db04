"""Split paragraphs into windows, the input of the network.

[CLS] question [SEP] part of the paragraph [SEP], as in run_squad.py of BERT and of NVIDIA's DeepLearningExamples:
parts have up to the remaining sequence length, and start ``stride`` tokens apart. If a token is in more than one
window, answers may start with it only in the window with maximum context, which is the smaller of left and right
context.
"""

import unicodedata
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from benchmarks.bert_squad.squad import Answer
from benchmarks.language.vocabulary import Vocabulary
from benchmarks.language.wordpiece import Tokenizer

MARKS = 3  # [CLS] and twice [SEP]


class Cut(NamedTuple):
    # How windows are cut; all in tokens.

    sequence_length: int  # maximum tokens per window
    stride: int  # between the first tokens of two windows
    question_length: int  # maximum tokens of the question; the rest is dropped


class Text(NamedTuple):
    ids: np.ndarray  # uint16 [tokens]
    begins: np.ndarray  # int64 [tokens]: first character in the paragraph
    ends: np.ndarray  # int64 [tokens]: last character + 1


def tokenized(text: str, tokenizer: Tokenizer) -> Text:
    # Return a paragraph's tokens and their offsets.
    encoding = tokenizer.encode(text)
    spans = [(start, _with_accents(text, end)) for start, end in encoding.offsets]
    begins, ends = np.array(spans, np.int64).reshape(-1, 2).T
    return Text(np.array(encoding.ids, np.uint16), begins, ends)


def _with_accents(text: str, end: int) -> int:
    # Include combining accents after a letter: the tokens do not contain them.
    while end < len(text) and unicodedata.category(text[end]) == "Mn":
        end += 1
    return end


def answer_tokens(text: Text, answer: Answer) -> Optional[Tuple[int, int]]:
    """Return the first and the last token that an answer touches; None where no token has any of it."""
    first = int(np.searchsorted(text.ends, answer.begin, side="right"))
    last = int(np.searchsorted(text.begins, answer.begin + len(answer.text), side="left")) - 1
    return (first, last) if first <= last else None


def parts(length: int, room: int, stride: int) -> List[Tuple[int, int]]:
    """Return the (first token, number of tokens) per window for a paragraph with ``length`` tokens."""
    spans = [(0, min(length, room))]
    while sum(spans[-1]) < length:
        start = spans[-1][0] + min(room, stride)
        spans.append((start, min(length - start, room)))
    return spans


def most_context(length: int, cut: List[Tuple[int, int]]) -> np.ndarray:
    """Return the index of the window with maximum context per token, int64 [length]; the first for equal contexts.

    Context: the smaller of left and right context, plus 0.01 times the length of the window's part.
    """
    positions = np.arange(length)
    scores = np.full((len(cut), length), -np.inf)
    for number, (start, size) in enumerate(cut):
        part = slice(start, start + size)
        poorer = np.minimum(positions[part] - start, start + size - 1 - positions[part])
        scores[number, part] = poorer + 0.01 * size
    return scores.argmax(axis=0)


def windows(
    question: List[int], text: Text, cut: Cut, vocabulary: Vocabulary, answer: Optional[Tuple[int, int]]
) -> Iterator[Dict[str, Any]]:
    """Yield a question's windows as the values of the arrays in arrays.py, for all tokens or for the window.

    ``start`` is 0 ([CLS]) if the answer is not completely in the window.

    Args:
        question: tokens of the question.
        text: the paragraph.
        cut: sizes of the windows.
        vocabulary: has the ids of [CLS] and [SEP].
        answer: first and last token of the answer in the paragraph, from ``answer_tokens``.
    """
    prefix = np.array([vocabulary.cls, *question[: cut.question_length], vocabulary.sep], np.uint16)
    second = len(prefix)
    spans = parts(len(text.ids), cut.sequence_length - second - 1, cut.stride)
    owners = most_context(len(text.ids), spans)
    for number, (first, size) in enumerate(spans):
        part = slice(first, first + size)
        start = end = 0
        if answer is not None and first <= answer[0] and answer[1] < first + size:
            start, end = (position - first + second for position in answer)
        yield {
            "tokens": np.concatenate([prefix, text.ids[part], prefix[-1:]]),
            "second": second,
            "start": start,
            "end": end,
            "begins": np.pad(text.begins[part], (second, 1)),
            "ends": np.pad(text.ends[part], (second, 1)),
            "best": np.pad(owners[part] == number, (second, 1)),
        }
