"""BLEU in the ways that the submissions count it, 0 to 100."""

import math
import re
import sys
import unicodedata
from collections import Counter
from functools import lru_cache
from typing import Any, Dict, List, Pattern, Sequence, Tuple

from benchmarks.translation.vocabulary import EOS, SPECIAL, UNK

ORDER = 4  # longest n-grams that count


def sacrebleu_score(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return sacreBLEU of detokenized text in lower case with the ``intl`` tokenizer, as GNMT's submissions count.

    ``sacrebleu --score-only -lc --tokenize intl`` (inference.py, v0.5; bleu.py, v0.6 and v0.7), smoothed by ``exp``.
    The target is compared with two decimals: of the printed score in v0.5, rounded by inference.py since.
    """
    import sacrebleu

    _check(hypotheses, references)
    score: Any = sacrebleu.corpus_bleu(
        list(hypotheses), [list(references)], lowercase=True, tokenize="intl", force=True, smooth_method="exp"
    )
    return round(float(score.score), 2)


def tokenized_score(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return case-insensitive BLEU, with punctuation and symbols split off, of rejoined subtokens on both sides.

    Hyphenated compounds are split, numbers with commas or points are not (bleu_tokenize and compute_bleu of the
    Transformer's train.py with ``--ignore-case``, v0.6 and v0.7).
    """
    _check(hypotheses, references)
    return _bleu([split_words(line.lower()) for line in hypotheses], [split_words(line.lower()) for line in references])


def fairseq_score(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return case-insensitive BLEU over words rejoined from BPE on both sides, as in the Transformer's v0.5.

    Without smoothing; unknown words in a reference match nothing, and an empty line counts its end as a word
    (train.py, fairseq/bleu.py and libbleu.cpp).
    """
    _check(hypotheses, references)
    unknown, end = SPECIAL[UNK], SPECIAL[EOS]
    expected = ([f"<{word}>" if word == unknown else word for word in line.lower().split()] for line in references)
    return _bleu([line.lower().split() or [end] for line in hypotheses], [line or [end] for line in expected], False)


def plain_score(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return BLEU over words separated by white space, for tokenized data sets, as in papers."""
    _check(hypotheses, references)
    return _bleu([line.split() for line in hypotheses], [line.split() for line in references])


def split_words(line: str) -> List[str]:
    """Split off symbols, and punctuation not between digits, like mteval-v14 (international).

    A backslash is not split off: in the submission's character class of all punctuation it escapes the next bracket.
    """
    before, after, symbols = _patterns()
    line = before.sub(r"\1 \2 ", line)
    line = after.sub(r" \1 \2", line)
    return symbols.sub(r" \1 ", line).split()


@lru_cache(maxsize=None)
def _patterns() -> Tuple[Pattern[str], Pattern[str], Pattern[str]]:
    kinds: Dict[str, List[str]] = {"P": [], "S": []}
    for mark in map(chr, range(sys.maxunicode)):
        kind = unicodedata.category(mark)[0]
        if kind in kinds and mark != "\\":
            kinds[kind].append(mark)
    punctuation, symbols = (re.escape("".join(kinds[kind])) for kind in "PS")
    return (
        re.compile(f"([^\\d])([{punctuation}])"),
        re.compile(f"([{punctuation}])([^\\d])"),
        re.compile(f"([{symbols}])"),
    )


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references) or not references:
        raise ValueError(f"{len(hypotheses):,} hypotheses for {len(references):,} references")


def _ngrams(tokens: Sequence[str]) -> "Counter[Tuple[str, ...]]":
    return Counter(
        tuple(tokens[start : start + order])
        for order in range(1, ORDER + 1)
        for start in range(len(tokens) - order + 1)
    )


def _bleu(hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[str]], smoothed: bool = True) -> float:
    # Return BLEU of words. Smoothed: the first order without matches counts as half a match, the next as a quarter, and
    # so on. Otherwise, an order without matches gives 0.
    matches, possible = [0] * ORDER, [0] * ORDER
    for tokens, reference in zip(hypotheses, references):
        ngrams = _ngrams(tokens)
        for ngram, count in (ngrams & _ngrams(reference)).items():
            matches[len(ngram) - 1] += count
        for ngram, count in ngrams.items():
            possible[len(ngram) - 1] += count
    if not smoothed and not all(matches):
        return 0.0
    smooth, logs = 1.0, 0.0
    for match, total in zip(matches, possible):
        if not total:
            continue
        smooth = smooth if match else 2 * smooth
        logs += math.log(match / total if match else 1 / (smooth * total))
    length, reference_length = sum(map(len, hypotheses)), sum(map(len, references))
    if not length:
        return 0.0
    return 100 * math.exp(logs / ORDER + min(0.0, 1 - reference_length / length))
