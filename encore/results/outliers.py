"""Detection of slow outliers among equal components, relative to the median of the others.

from encore.results.outliers import lowest, slow_ones
slow_ones({"n1": 99.0, "n2": 100.0, "n3": 50.0}, tolerance=0.2)  # {"n3": 0.5025...}
"""

import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
FAR = 4.0  # Limit in median absolute deviations


@dataclass(frozen=True, kw_only=True)
class Comparison(Generic[Key]):
    """A value and the statistics of the other values."""

    name: Key
    value: float
    others: float  # Median of the other values
    spread: float  # Median absolute deviation of the other values

    @property
    def is_far(self) -> bool:
        """Whether the value is below the median by more than FAR deviations."""
        return self.value < self.others - FAR * self.spread


def compare(values: Mapping[Key, float]) -> list[Comparison[Key]]:
    """Compare each value with the remaining ones; empty for a single value."""
    comparisons = []
    for name, value in values.items() if len(values) > 1 else ():
        rest = [other for key, other in values.items() if key != name]
        middle = statistics.median(rest)
        spread = statistics.median(abs(other - middle) for other in rest)
        comparisons.append(Comparison(name=name, value=value, others=middle, spread=spread))
    return comparisons


def lowest(values: Mapping[Key, float]) -> Comparison[Key] | None:
    return min(compare(values), key=lambda comparison: comparison.value, default=None)


def slow_ones(values: Mapping[Key, float], tolerance: float) -> dict[Key, float]:
    """Return values that are slower than ``tolerance`` permits and far from the rest, as fractions of their median."""
    return {
        comparison.name: comparison.value / comparison.others
        for comparison in compare(values)
        if comparison.others > 0 and comparison.value < comparison.others * (1 - tolerance) and comparison.is_far
    }
