"""From logits to answers and their scores: the best spans of each window, and the text of a question's best span.

The rule of run_squad.py: the 20 best first and the 20 best last tokens of a window, in pairs that are within the
paragraph, in order, no longer than 30 tokens and begin where this window has the most context; then the best pair of
all windows of a question. The text is the paragraph's own from the first character of the first token to the last of
the last one. run_squad.py knows the words of a token alone and looks for the token in them by a heuristic, which gives
the same text where it succeeds.
"""

import re
import string
from collections import Counter
from typing import Callable, Dict, Iterable, List, NamedTuple, Sequence, Tuple

import numpy as np


class Span(NamedTuple):
    score: float  # sum of the logits of the first and the last token
    begin: int  # first character in the paragraph
    end: int  # behind the last one


class Places(NamedTuple):
    # The places of a window's tokens, an array of all of them each.

    begins: np.ndarray
    ends: np.ndarray  # 0 where a token is not the paragraph's
    best: np.ndarray  # whether the token may begin an answer in this window


def highest(logits: np.ndarray, count: int) -> np.ndarray:
    # Return the places of the ``count`` highest logits, the first of equal ones first.
    return np.argsort(-logits, kind="stable")[:count]


def best_spans(start: np.ndarray, end: np.ndarray, positions: Places, count: int, longest: int) -> List[Span]:
    """Return up to ``count`` spans of one window, the best first, no two of the same characters.

    Args:
        start: logits [tokens] of the first token of the answer.
        end: the same of its last one.
        places: of the window's tokens.
        count: of spans, and of first and of last tokens that are paired.
        longest: tokens of an answer, at most.
    """
    start, end = start.astype(np.float64), end.astype(np.float64)
    firsts, lasts = highest(start, count), highest(end, count)
    length = lasts[None, :] - firsts[:, None] + 1
    possible = (length >= 1) & (length <= longest)
    possible &= positions.best[firsts].astype(bool)[:, None] & (positions.ends[lasts] > 0)[None, :]
    sums = (start[firsts][:, None] + end[lasts][None, :])[possible]
    rows, columns = np.nonzero(possible)
    spans: Dict[Tuple[int, int], Span] = {}
    for pair in np.argsort(-sums, kind="stable"):
        first, last = firsts[rows[pair]], lasts[columns[pair]]
        text = int(positions.begins[first]), int(positions.ends[last])
        spans.setdefault(text, Span(float(sums[pair]), *text))
        if len(spans) == count:
            break
    return list(spans.values())


def best_of(spans: Iterable[Span], count: int) -> List[Span]:
    """Return the best spans of all windows of a question, the best first, the earlier window first of equal ones."""
    return sorted(spans, key=lambda span: -span.score)[:count]


def text_of(spans: Sequence[Span], context: str) -> str:
    """Return the text of the best span; empty where there is none."""
    return context[spans[0].begin : spans[0].end] if spans else ""


# -- scores: SQuAD v1.1's evaluate-v1.1.py (Rajpurkar et al. 2016, arXiv 1606.05250) ---------------------------

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Scores(NamedTuple):
    # 0 to 100.

    exact_match: float
    f1: float


def normalized(text: str) -> str:
    """Return ``text`` in lower case without ASCII punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, reference: str) -> float:
    # Return 1 where both are the same when normalized, else 0.
    return float(normalized(prediction) == normalized(reference))


def f1(prediction: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall of the normalized words, 0 to 1; 0 where none is shared."""
    predicted, expected = normalized(prediction).split(), normalized(reference).split()
    shared = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * shared / (len(predicted) + len(expected)) if shared else 0.0


def best(score: Callable[[str, str], float], prediction: str, references: Sequence[str]) -> float:
    # Return the score with the reference that gives the most.
    return max(score(prediction, reference) for reference in references)


def score(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """Return both means over all questions.

    Args:
        predictions: one text a question.
        references: all answers of each question, at least one.

    Raises:
        ValueError: not one prediction a question, or no question.
    """
    if len(predictions) != len(references) or not references:
        raise ValueError(f"{len(predictions)} predictions for {len(references)} questions")
    pairs = list(zip(predictions, references))
    means: List[float] = [100 * sum(best(metric, *pair) for pair in pairs) / len(pairs) for metric in (exact_match, f1)]
    return Scores(*means)
