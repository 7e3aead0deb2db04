"""Means of few runs, and how sure they are.

    from encore.results.statistics import Sample, ratio_interval
    ours, theirs = Sample.of([39.8, 40.1, 39.7]), Sample.of([39.3, 39.6, 39.9, 40.1, 40.6])
    print(ratio_interval(ours, theirs))

Sets hold 3 to 100 runs. Resampling the runs themselves cannot keep its promise on so few: of five values the
whole range holds the true median in 94 % of the cases only. So the bootstrap here is parametric: it draws sets
of the same size from a normal distribution, looks how far the studentized mean of such a set is from the
truth, and takes that much off the mean that was found. For a plain mean this is Student's interval; for the
mean without the fastest and the slowest, and for a ratio of two means with unequal spreads (Weerahandi's
generalized interval, JASA 88, 1993), there is no such formula.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

LEVEL = 0.95
DRAWS = 40_000
_MOST_RUNS = 1000
_OURS, _THEIRS = 1, 2


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Some runs by their mean; ``estimate`` and ``spread`` (standard deviation) are in the unit of the runs."""

    estimate: float
    spread: float | None
    """None where it is not known: one run, or a published score without its runs."""
    count: int
    trimmed: int = 0
    """Runs dropped on each side before the mean was taken."""
    spread_count: int | None = None
    """Runs that the spread was taken from, where it was borrowed from another set."""

    @classmethod
    def of(cls, values: Sequence[float], trimmed: int = 0) -> Sample:
        """Return the sample of these values."""
        if not values:
            raise ValueError("a sample needs a value")
        ordered = sorted(values)
        kept = ordered[trimmed : len(ordered) - trimmed] if len(ordered) > 2 * trimmed else ordered
        mean = math.fsum(values) / len(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        spread = math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else None
        return cls(
            estimate=math.fsum(kept) / len(kept),
            spread=spread,
            count=len(values),
            trimmed=trimmed if len(kept) < len(ordered) else 0,
        )

    @property
    def cv(self) -> float | None:
        """Spread as a share of the mean."""
        if self.spread is None or self.estimate == 0:
            return None
        return self.spread / abs(self.estimate)

    def with_spread_of(self, other: Sample) -> Sample:
        """Return this sample with the other's relative spread, where it has none of its own."""
        if self.spread is not None or other.cv is None:
            return self
        return replace(self, spread=other.cv * abs(self.estimate), spread_count=other.count)


def interval(sample: Sample, level: float = LEVEL) -> tuple[float, float] | None:
    """Return where the true mean is, with probability ``level``; None where the spread is not known."""
    draws = _truths(sample, _OURS)
    return None if draws is None else _quantiles(draws, level)


def ratio_draws(ours: Sample, theirs: Sample) -> Any:
    """Draw the true ratio of the means, as a numpy array; None where a spread is not known."""
    import numpy as np

    upper, lower = _truths(ours, _OURS), _truths(theirs, _THEIRS)
    if upper is None or lower is None:
        return None
    # A spread as large as the mean leaves room below zero, where no time and no count can be.
    tiny = 1e-9 * abs(theirs.estimate)
    return np.maximum(upper, 0.0) / np.maximum(lower, tiny)


def ratio_interval(ours: Sample, theirs: Sample, level: float = LEVEL) -> tuple[float, float] | None:
    """Return where the true ratio of the means is, with probability ``level``."""
    draws = ratio_draws(ours, theirs)
    return None if draws is None else _quantiles(draws, level)


def z_score(ours: Sample, theirs: Sample) -> float | None:
    """Return our mean's distance from theirs in standard errors, by the spread of their runs alone.

    Their spread and not ours: a run that varies wildly must not look near for that reason.
    """
    if not theirs.spread:
        return None
    error = theirs.spread * math.sqrt(1 / ours.count + 1 / theirs.count)
    return (ours.estimate - theirs.estimate) / error


def is_significant(z: float, count: int, level: float = LEVEL) -> bool:
    """Return whether a z-score by the spread of ``count`` runs is larger than chance makes it (Student's t)."""
    from scipy.stats import t

    return count > 1 and abs(z) > float(t.ppf((1 + level) / 2, count - 1))


def further_runs(sample: Sample, within: float, level: float = LEVEL) -> int | None:
    """Return how many more runs make the interval of the mean as narrow as ``within`` (0.05 for 5 %) on each side.

    None where the spread is not known, or where a thousand runs would not do. Runs are taken to vary as
    the ones at hand do (textbook formula: t * s / sqrt(n)).
    """
    from scipy.stats import t

    if sample.cv is None:
        return None
    for count in range(max(sample.count, 2), _MOST_RUNS + 1):
        half = float(t.ppf((1 + level) / 2, count - 1)) * sample.cv / math.sqrt(count)
        if half <= within:
            return count - sample.count
    return None


def _truths(sample: Sample, seed: int) -> Any:
    if sample.spread is None:
        return None
    spread_count = sample.spread_count or sample.count
    return sample.estimate - sample.spread * _pivots(sample.count, sample.trimmed, spread_count, seed)


@functools.lru_cache(maxsize=64)
def _pivots(count: int, trimmed: int, spread_count: int, seed: int) -> Any:
    """Draw (mean - truth) / spread of sets from a normal distribution."""
    import numpy as np

    generator = np.random.default_rng((seed, count, trimmed, spread_count))
    sets = np.sort(generator.standard_normal((DRAWS, count)), axis=1)
    means = sets[:, trimmed : count - trimmed].mean(axis=1)
    if spread_count == count and count > 1:
        return means / sets.std(axis=1, ddof=1)
    freedom = max(spread_count - 1, 1)
    return means / np.sqrt(generator.chisquare(freedom, DRAWS) / freedom)


def _quantiles(draws: Any, level: float) -> tuple[float, float]:
    import numpy as np

    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
