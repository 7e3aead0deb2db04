"""Forecast and loss verdict for unfinished runs. Separate from their computation, which needs NumPy."""

from dataclasses import dataclass
from typing import Literal

from encore.results.format import count_of


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Expected minutes from run_start to the target, with a 90 % interval.

    docs/compare.md lists the measured coverage by benchmark. All three are None if no lengths to the target are
    known; ``why`` contains the reason.
    """

    run: str
    elapsed_minutes: float
    length: float
    unit: str
    minutes_per_length: float
    minutes: float | None = None
    low: float | None = None
    high: float | None = None
    length_to_target: float | None = None
    runs: int = 0
    points: int = 0
    why: str = ""
    # Whether the published time is expected; null without a published time
    expected: Literal["yes", "no", "open"] | None = None

    def expects(self, published: float, within: float) -> Literal["yes", "no", "open"]:
        """Return whether ``published`` minutes are to be expected: yes, no or open."""
        if self.low is None or self.high is None:
            return "open"
        bounds = published / (1 + within), published * (1 + within)
        if bounds[0] <= self.low and self.high <= bounds[1]:
            return "yes"
        return "no" if self.high < bounds[0] or self.low > bounds[1] else "open"

    def text(self, published: float | None = None, within: float = 0.0) -> str:
        """Return the forecast as a sentence, with whether ``published`` minutes are to be expected."""
        singular = self.unit.removesuffix("s")
        if self.minutes is None or self.low is None or self.high is None:
            return f"{self.minutes_per_length:.4g} minutes per {singular} so far; {self.why}"
        message = f"on pace for {self.minutes:.1f} minutes ({self.low:.1f} to {self.high:.1f})"
        if published is None:
            return message
        return f"{message}; published {published:.1f}; reproduction expected: {self.expects(published, within)}"

    def basis(self) -> str:
        """Describe the data that the forecast is based on."""
        sources = [count_of(self.runs, "run"), *([count_of(self.points, "reference point")] if self.points else [])]
        progress = (
            f"{self.length:.6g} of about {self.length_to_target:.6g} {self.unit} after {self.elapsed_minutes:.1f}"
        )
        return f"{self.run}: {progress} minutes; how far {' and '.join(sources)} had to train"


@dataclass(frozen=True, kw_only=True)
class LossVerdict:
    """Comparison of the training losses up to ``samples``. Differences are natural logarithms, ours over theirs."""

    verdict: Literal["matches", "differs", "not enough data"]
    runs: int = 0
    references: int = 0
    samples: float = 0.0  # Trained by all tested runs
    differences: tuple[float | None, ...] = ()  # Mean log losses of each part; null if not finite
    limits: tuple[float, ...] = ()  # Smallest difference of each part that is significant
    text: str = ""

    def __str__(self) -> str:
        return f"training loss: {self.verdict} ({self.text})"
