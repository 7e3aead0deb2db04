"""Means of few runs and confidence intervals of their ratio.

    from encore.results.statistics import Sample, ratio_of
    current, baseline = Sample.of([39.8, 40.1, 39.7]), Sample.of([39.3, 39.6, 39.9, 40.1, 40.6], trimmed=1)
    ratio = ratio_of(current, baseline)
    print(ratio.value, ratio.interval(), ratio.outcome(within=0.05))

Two times are equal within a margin if two one-sided tests pass (Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987),
that is, if the 90 % interval of their ratio is inside the margin. The interval is Welch's for the logarithm of the
ratio: swapping the samples mirrors it. Error rates: docs/compare.md, measured with tools/calibrate_verdicts.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

LEVEL = 0.90  # Level of all intervals: 5 % at both ends, for the two one-sided tests
MAX_FURTHER_RUNS = 100
_MAX_HALF_WIDTH = math.log(1000)
_MAX_EXPONENT = 700.0  # Larger exponents overflow


class Outcome(str, Enum):
    WITHIN = "within"
    BELOW = "below"
    ABOVE = "above"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Runs summarized by their mean. ``estimate`` and ``spread`` (standard deviation) are in the unit of the runs."""

    estimate: float
    spread: float | None  # None if unknown: one run, or a published score without runs
    count: int
    trimmed: int = 0  # Runs dropped at both ends before taking the mean
    spread_count: int | None = None  # Number of runs for the spread, if borrowed from another set
    error_per_spread: float | None = None  # Standard error of the estimate over the spread; None: plain mean

    @classmethod
    def of(cls, values: Sequence[float], trimmed: int = 0) -> Sample:
        if not values:
            raise ValueError("a sample needs a value")
        # Scaled by the largest value, so that squares cannot overflow.
        unit = max(map(abs, values)) or 1.0
        if not all(map(math.isfinite, values)):
            return cls(estimate=math.inf, spread=None, count=len(values))
        ordered = sorted(value / unit for value in values)
        if len(ordered) <= 2 * trimmed:
            trimmed = 0
        remaining = ordered[trimmed : len(ordered) - trimmed]
        spread = _deviation(ordered)
        return cls(
            estimate=unit * (math.fsum(remaining) / len(remaining)),
            spread=None if spread is None else unit * spread,
            count=len(values),
            trimmed=trimmed,
            error_per_spread=_standard_error(ordered, trimmed) / spread if spread and trimmed else None,
        )

    @property
    def cv(self) -> float | None:
        if self.spread is None or self.estimate == 0:
            return None
        return self.spread / abs(self.estimate)

    @property
    def relative_error(self) -> float | None:
        """Standard error relative to the estimate"""
        return None if self.cv is None else self.cv * (self.error_per_spread or 1 / math.sqrt(max(self.count, 1)))

    @property
    def freedom(self) -> float:
        return max((self.spread_count or self.count) - 1, 1)

    def with_spread_of(self, other: Sample) -> Sample:
        """Return this sample with the other sample's relative spread if its spread is unknown."""
        if self.spread is not None or other.cv is None:
            return self
        return replace(self, spread=other.cv * abs(self.estimate), spread_count=other.spread_count or other.count)


@dataclass(frozen=True)
class Ratio:
    """Ratio of two means as its natural logarithm; ``error`` is None if no spread is known."""

    log: float
    error: float | None
    freedom: float

    @property
    def value(self) -> float:
        return _exp(self.log)

    @property
    def half_width(self) -> float | None:
        return None if self.error is None else min(_quantile(self.freedom) * self.error, _MAX_HALF_WIDTH)

    def interval(self) -> tuple[float, float] | None:
        """Return the confidence interval of the true ratio at LEVEL; None if no spread is known."""
        half = self.half_width
        return None if half is None else (_exp(self.log - half), _exp(self.log + half))

    def outcome(self, within: float) -> Outcome:
        """Compare the interval with the margin from 1 / (1 + within) to 1 + within."""
        half, margin = self.half_width, math.log1p(within)
        if half is None:
            return Outcome.UNDECIDED
        if abs(self.log) + half <= margin:
            return Outcome.WITHIN
        if abs(self.log) - half > margin:
            return Outcome.BELOW if self.log < 0 else Outcome.ABOVE
        return Outcome.UNDECIDED

    def confidence(self, within: float) -> float | None:
        """Return one minus the larger p-value of the outcome; None if undecided."""
        from scipy.special import stdtr

        outcome = self.outcome(within)
        if outcome is Outcome.UNDECIDED or self.error is None:
            return None
        room = abs(math.log1p(within) - abs(self.log))
        return float(stdtr(self.freedom, room / self.error)) if self.error else 1.0


def ratio_of(current: Sample, baseline: Sample) -> Ratio | None:
    """Return current over baseline; None unless both means are positive. An unknown spread is borrowed."""
    if not (0 < current.estimate < math.inf and 0 < baseline.estimate < math.inf):
        return None
    log = math.log(current.estimate) - math.log(baseline.estimate)
    borrowed = (current.spread is None) != (baseline.spread is None)
    current, baseline = current.with_spread_of(baseline), baseline.with_spread_of(current)
    error_a, error_b = current.relative_error, baseline.relative_error
    if error_a is None or error_b is None:
        return Ratio(log, None, 1.0)
    error = math.hypot(error_a, error_b)
    if borrowed:
        # One estimate of the spread serves both sides.
        return Ratio(log, error, min(current.freedom, baseline.freedom))
    return Ratio(log, error, _welch_freedom(error_a, current.freedom, error_b, baseline.freedom))


def interval(sample: Sample) -> tuple[float, float] | None:
    """Return the confidence interval of the true mean at LEVEL; None if the spread is unknown."""
    error = sample.relative_error
    if error is None:
        return None
    half = _quantile(sample.freedom) * error * abs(sample.estimate)
    # A spread as large as the mean leaves room below zero, where no time and no count can be.
    lower = sample.estimate - half
    return max(lower, 0.0) if sample.estimate > 0 else lower, sample.estimate + half


def z_score(current: Sample, baseline: Sample) -> float | None:
    """Return the distance between the means in standard errors, from the spread of the baseline only."""
    if not baseline.spread:
        return None
    error = baseline.spread * math.sqrt(1 / current.count + 1 / baseline.count)
    return (current.estimate - baseline.estimate) / error


def further_runs(current: Sample, baseline: Sample, within: float) -> int | None:
    """Return the number of further current runs for a decision, if mean and spread do not change; 0 if decided.

    None if the spread is unknown, or more than MAX_FURTHER_RUNS are needed.
    """
    now = ratio_of(current, baseline)
    if now is None or now.error is None:
        return None
    if now.outcome(within) is not Outcome.UNDECIDED:
        return 0
    current, baseline = current.with_spread_of(baseline), baseline.with_spread_of(current)
    root = (current.error_per_spread or 1 / math.sqrt(current.count)) * math.sqrt(current.count)
    for extra in range(1, MAX_FURTHER_RUNS + 1):
        count = current.count + extra
        grown = replace(current, count=count, spread_count=None, error_per_spread=root / math.sqrt(count))
        ratio = ratio_of(grown, baseline)
        if ratio is not None and ratio.outcome(within) is not Outcome.UNDECIDED:
            return extra
    return None


# Sample standard deviation
def _deviation(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


# Standard error of the mean of sorted values without ``trimmed`` values at both ends: the larger of two estimates. The
# plain mean's error, which an unseen slow run cannot make too small, and the trimmed mean's from the winsorized spread
# (Tukey and McLaughlin, Sankhya A 25, 1963), for runs that take 4 or 5 epochs.
def _standard_error(ordered: Sequence[float], trimmed: int) -> float:
    count, remaining = len(ordered), len(ordered) - 2 * trimmed
    lower, upper = ordered[trimmed], ordered[-1 - trimmed]
    winsorized = _deviation([min(max(value, lower), upper) for value in ordered]) or 0.0
    robust = winsorized * math.sqrt((count - 1) / (remaining * (remaining - 1))) if remaining > 1 else 0.0
    return max((_deviation(ordered) or 0.0) / math.sqrt(count), robust)


# Degrees of freedom for a difference (Welch and Satterthwaite)
def _welch_freedom(error_a: float, freedom_a: float, error_b: float, freedom_b: float) -> float:
    largest = max(error_a, error_b)
    if largest == 0 or not math.isfinite(largest):
        return min(freedom_a, freedom_b)
    a, b = (error_a / largest) ** 2, (error_b / largest) ** 2
    return (a + b) ** 2 / (a**2 / freedom_a + b**2 / freedom_b)


def _quantile(freedom: float) -> float:
    # scipy.special takes 0.1 s to load, scipy.stats ten times longer.
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def _exp(log: float) -> float:
    return math.exp(min(max(log, -_MAX_EXPONENT), _MAX_EXPONENT))
