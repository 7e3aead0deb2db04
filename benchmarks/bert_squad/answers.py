"""Best answer spans from logits, and their scores.

Same rule as run_squad.py: pairs of a window's 20 best start and 20 best end tokens, in order, inside the
paragraph, no longer than 30 tokens, and starting where this window has maximum context; then the question's best pair
in all windows. The text is the substring of the paragraph. run_squad.py has no offsets within words and
searches for the token heuristically, with the same result if the search succeeds.
"""

import re
import string
from collections import Counter
from typing import Dict, List, NamedTuple, Sequence, Tuple

import numpy as np


class Span(NamedTuple):
    score: float  # sum of the logits of the first and the last token
    begin: int  # first character in the paragraph
    end: int  # last character + 1


# Arrays of a window's tokens: offsets of their first characters in the paragraph, of the last characters + 1, 0 where a
# token is not the paragraph's, and whether answers may start with the token in this window.
Places = Tuple[np.ndarray, np.ndarray, np.ndarray]


def best_spans(start: np.ndarray, end: np.ndarray, positions: Places, count: int, longest: int) -> List[Span]:
    """Return up to ``count`` spans in a window, best first, without duplicate character ranges.

    Args:
        start: start logits [tokens].
        end: end logits [tokens].
        positions: offsets of the window's tokens.
        count: number of spans, and of start and end tokens to pair.
        longest: maximum tokens per answer.
    """
    begins, ends, best = positions
    start, end = start.astype(np.float64), end.astype(np.float64)
    firsts, lasts = (np.argsort(-logits, kind="stable")[:count] for logits in (start, end))
    length = lasts[None, :] - firsts[:, None] + 1
    possible = (length >= 1) & (length <= longest)
    possible &= best[firsts].astype(bool)[:, None] & (ends[lasts] > 0)[None, :]
    sums = (start[firsts][:, None] + end[lasts][None, :])[possible]
    rows, columns = np.nonzero(possible)
    spans: Dict[Tuple[int, int], Span] = {}
    for pair in np.argsort(-sums, kind="stable"):
        first, last = firsts[rows[pair]], lasts[columns[pair]]
        text = int(begins[first]), int(ends[last])
        spans.setdefault(text, Span(float(sums[pair]), *text))
        if len(spans) == count:
            break
    return list(spans.values())


# -- scores: SQuAD v1.1's evaluate-v1.1.py (Rajpurkar et al. 2016, arXiv 1606.05250) ---------------------------

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Return ``text`` in lower case without ASCII punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, reference: str) -> float:
    # Return 1 if both are equal after normalization, else 0.
    return float(normalized(prediction) == normalized(reference))


def f1(prediction: str, reference: str) -> float:
    """Return the F1 score of the normalized words, 0 to 1."""
    predicted, expected = normalized(prediction).split(), normalized(reference).split()
    shared = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * shared / (len(predicted) + len(expected)) if shared else 0.0


def score(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Tuple[float, float]:
    """Return the means of F1 and exact match over all questions, 0 to 100.

    Args:
        predictions: one text per question.
        references: all answers per question, at least one.

    Raises:
        ValueError: the number of predictions differs from the number of questions, or there are no questions.
    """
    if len(predictions) != len(references) or not references:
        raise ValueError(f"{len(predictions)} predictions for {len(references)} questions")
    best = [
        [max(metric(prediction, reference) for reference in known) for metric in (f1, exact_match)]
        for prediction, known in zip(predictions, references)
    ]
    of_f1, exact = (100 * sum(values) / len(best) for values in zip(*best))
    return of_f1, exact
