"""Two sides on one scale: official score against official score, or raw against raw, and which it is in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from encore.results.compare.sides import Side
from encore.results.rules import ROUNDS
from encore.results.scores.normalization import SCALED_SINCE, official_in_words


def with_official_scores(ours: Side, theirs: Side | None) -> tuple[Side, Side | None]:
    """Return both with their official scores where both factors are known, else as they are, with raw scores."""
    if theirs is None:
        return ours, None
    mine, other = scaling_factors(ours, theirs)
    if mine is None or other is None:
        return ours, theirs
    return _official(ours, mine), _official(theirs, other)


def scaling_factors(ours: Side, theirs: Side) -> tuple[float | None, float | None]:
    """Return by what the raw scores are multiplied to the official ones; None where that is not known."""
    return _factor(ours), _factor(theirs)


def _factor(side: Side) -> float | None:
    """Return the factor: 1 in rounds that had none, and without a scaling.json in the logs of a submission."""
    if side.scaling_factor is not None:
        return side.scaling_factor
    unscaled = side.round in ROUNDS and ROUNDS.index(side.round) < ROUNDS.index(SCALED_SINCE)
    return 1.0 if unscaled else None


def _official(side: Side, factor: float) -> Side:
    score = side.score
    if score is not None and side.score_is_official:
        spread = None if score.spread is None else score.spread * factor
        score = replace(score, estimate=score.estimate * factor, spread=spread)
    return replace(side, score=score, scaling_factor=factor, score_kind="official")


def scores_in_words(ours: Side, theirs: Side) -> Iterator[str]:
    """Say which scores are compared, where the two kinds differ."""
    factors = [side.scaling_factor or 1.0 for side in (ours, theirs)]
    if factors == [1.0, 1.0]:
        return
    if ours.score_kind == "official":
        mine, published = (f"x {factor:.4f}" for factor in factors)
        yield f"official score against official score: raw scores {mine} (yours) and {published}, reference convergence"
        return
    named = {"yours": ours, theirs.label: theirs}
    lacking = [name for name, side in named.items() if side.scaling_factor is None]
    known = [
        f"; {name}: {official_in_words(side.score.estimate * side.scaling_factor, side.scaling_factor)}"
        for name, side in named.items()
        if side.scaling_factor is not None and side.score is not None
    ]
    yield f"raw score against raw score, as {' and '.join(lacking)} has no scaling.json{''.join(known)}"
