"""Exact match and F1 by the rules of SQuAD v1.1's evaluate-v1.1.py (Rajpurkar et al. 2016, arXiv 1606.05250).

Both are in per cent: means over the questions, each counted once with the reference answer that it agrees with best.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Callable, List, NamedTuple, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Scores(NamedTuple):
    """0 to 100."""

    exact_match: float
    f1: float


def normalized(text: str) -> str:
    """Return ``text`` in lower case without ASCII punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, reference: str) -> float:
    """Return 1 where both are the same when normalized, else 0."""
    return float(normalized(prediction) == normalized(reference))


def f1(prediction: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall of the normalized words, 0 to 1; 0 where none is shared."""
    predicted, wanted = normalized(prediction).split(), normalized(reference).split()
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    return 2 * shared / (len(predicted) + len(wanted)) if shared else 0.0


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
    means: List[float] = [100 * sum(best(each, *pair) for pair in pairs) / len(pairs) for each in (exact_match, f1)]
    return Scores(*means)
