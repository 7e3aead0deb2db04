"""What a comparison's figures mean, in sentences, the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Iterator

from encore.results.compare import Comparison


def certainty(found: Comparison) -> Iterator[str]:
    """How sure the figures are."""
    ours = found.ours
    if ours.score is not None:
        name = (
            "score" if ours.score_is_official else f"mean of {_counted(ours.score.count, 'run')}, not a score"
        )
        span = found.score_interval
        interval = f", 95 % interval {span[0]:.3f} to {span[1]:.3f}" if span else ""
        yield f"{name}: {ours.score.estimate:.3f} minutes{interval}"
    if found.confidence is not None:
        yield f"probability that the true ratio agrees with the verdict: {found.confidence:.0%}"
    if found.further_runs is not None and ours.score is not None:
        more = _counted(found.further_runs, "further run") if found.further_runs else "no further run"
        yield f"{more} needed to know your mean to within {found.within * 100:g} %"
    elif ours.score is not None and found.theirs is not None:
        yield "how many runs a claim needs is not known: more than 1000, or run at least twice to tell"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
