"""What figures mean, in words, the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from encore.results.compare import Comparison


def with_names(values: Mapping[str, float], style: str = ".4f") -> str:
    """Return ``0.9259``; of several qualities each with its name: ``box 0.3100, mask 0.2800``."""
    if len(values) == 1:
        (value,) = values.values()
        return f"{value:{style}}"
    return ", ".join(f"{name} {value:{style}}" for name, value in values.items())


def against_targets(qualities: Mapping[str, float], targets: Mapping[str, float]) -> str:
    """Return ``quality 0.9259 of 0.95``; of several: ``box 0.3100 of 0.377, mask 0.2800 of 0.339``."""
    several = len(qualities) > 1
    return ", ".join(
        f"{name if several else 'quality'} {value:.4f} of {targets[name]:g}" for name, value in qualities.items()
    )


def certainty(found: Comparison) -> Iterator[str]:
    """Say how sure the figures are."""
    ours = found.ours
    if ours.score is not None:
        name = "score" if ours.score_is_official else f"mean of {_counted(ours.score.count, 'run')}, not a score"
        span = found.score_interval
        interval = f", 95 % interval {span[0]:.3f} to {span[1]:.3f}" if span else ""
        yield f"{name}: {ours.score.estimate:.3f} minutes{interval}"
    if found.confidence is not None:
        yield f"probability that the true ratio agrees with the verdict: {found.confidence:.0%}"
    if found.further_runs is not None and ours.score is not None:
        more = _counted(found.further_runs, "further run") if found.further_runs else "no further run"
        yield f"{more} needed to know your mean to within {found.within * 100:g} %"
    elif ours.score is not None and found.theirs is not None:
        yield "how many runs a claim needs is not known: more than 1000, or run at least twice to find out"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
