"""Verdicts from factors: the same within a margin, different beyond it, or undecided.

    from encore.results.compare.verdicts import decide, factor_of
    score = factor_of("time to the target", "min", ours.score, theirs.score)
    verdict, decisive = decide(score, None, None, within=0.05, single=False)

Each verdict is shown at 5 %: "reproduced" needs the whole interval of the ratio inside the margin, a difference needs
it beyond the margin, and what is left is undecided. A difference that is significant but small is no difference to a
reader who allows 5 %, so significance alone decides nothing; and one interval for all three can never say two of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from encore.results.statistics import MOST_FURTHER_RUNS, Outcome, Ratio, Sample, further_runs, ratio_of, z_score


class Verdict(str, Enum):
    """What a comparison comes to."""

    REPRODUCED = "reproduced"
    SAME_RUNS = "same runs"
    """Nothing was run again."""
    UNDECIDED = "undecided"
    FASTER = "faster"
    SLOWER = "slower"
    CONVERGES_DIFFERENTLY = "converges differently"
    NOT_CONVERGED = "not converged"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One quantity of both sides; ``ratio`` is ours over theirs, below 1 is better."""

    name: str
    unit: str
    ours: float | None
    theirs: float | None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    """Where the true ratio is, with a probability of 90 %."""
    z: float | None = None
    """Our mean's distance from theirs in standard errors, by the spread of the submitted runs."""
    found: Ratio | None = None
    """The ratio as it is tested; None where it decides nothing."""
    note: str = ""

    def outcome(self, within: float) -> Outcome:
        """Return whether the ratio is shown to be inside the margin or beyond it."""
        return self.found.outcome(within) if self.found is not None else Outcome.UNDECIDED

    def is_beyond(self, within: float) -> bool:
        """Return whether the ratio is shown to be beyond the margin."""
        return self.outcome(within) in (Outcome.BELOW, Outcome.ABOVE)


def factor_of(name: str, unit: str, ours: Sample | None, theirs: Sample | None) -> Factor | None:
    """Return the factor of two samples; None where one is not known."""
    if ours is None or theirs is None:
        return None
    note = ""
    if ours.spread is None and theirs.spread is not None:
        note = "one run: its spread is taken from the submission"
    elif ours.spread is not None and theirs.spread is None:
        note = "the spread of the submitted runs is not known and taken to be yours"
    found = ratio_of(ours, theirs)
    return Factor(
        name=name,
        unit=unit,
        ours=ours.estimate,
        theirs=theirs.estimate,
        ratio=found.value if found else None,
        interval=found.interval() if found else None,
        z=z_score(ours, theirs),
        found=found,
        note=note,
    )


def length_factor(unit: str, ours: Sample | None, theirs: Sample | None) -> Factor | None:
    """Return epochs to the target: of one run they show no difference, however alike the submitted ones are."""
    factor = factor_of(f"{unit} to the target", unit, ours, theirs)
    if factor is None or ours is None or ours.count > 1:
        return factor
    known = factor.found is not None and factor.found.error
    return replace(factor, found=None, interval=factor.interval if known else None)


def decide(
    score: Factor, per_length: Factor | None, lengths: Factor | None, within: float, *, single: bool
) -> tuple[Verdict, Factor]:
    """Return the verdict and the factor it rests on; ``single``: ours is one run.

    One run that took an epoch more may be chance, even where the submitted runs all took the same: its time is
    different only where its time per epoch is.
    """
    if lengths is not None and lengths.is_beyond(within):
        return Verdict.CONVERGES_DIFFERENTLY, lengths
    outcome = score.outcome(within)
    if outcome is Outcome.WITHIN:
        return Verdict.REPRODUCED, score
    by_chance = single and per_length is not None and per_length.outcome(within) is not outcome
    if outcome is Outcome.UNDECIDED or by_chance:
        return Verdict.UNDECIDED, score
    return Verdict.FASTER if outcome is Outcome.BELOW else Verdict.SLOWER, score


def reasons_for(verdict: Verdict, decisive: Factor, per_length: Factor | None, within: float) -> list[str]:
    """Return what a verdict rests on, in words."""
    percent = f"{within * 100:g} %"
    shown = {
        Verdict.REPRODUCED: f"shown to be within {percent}",
        Verdict.UNDECIDED: f"shown neither within {percent} nor beyond",
    }
    reasons = [f"{_in_words(decisive)}: {shown.get(verdict, f'shown to be more than {percent} apart')}"]
    if verdict is not Verdict.REPRODUCED and per_length is not None and per_length.is_beyond(within):
        reasons.append(_in_words(per_length))
    return reasons


def runs_to_decide(ours: Sample, theirs: Sample, verdict: Verdict, within: float) -> int | None:
    """Return about how many more runs decide; see ``further_runs``."""
    more = further_runs(ours, theirs, within)
    # A single run whose time alone is different: a spread of its own takes two more.
    return 2 if more == 0 and verdict is Verdict.UNDECIDED else more


def what_would_decide(ours: Sample, theirs: Sample, more: int | None, within: float) -> Iterator[str]:
    """Say what an undecided comparison needs."""
    found = ratio_of(ours, theirs)
    if found is None:
        return
    if more is not None:
        runs = "1 more run" if more == 1 else f"{more} more runs"
        yield f"about {runs} would decide, if mean and spread stay as they are"
    elif found.error is None:
        yield "one run, and no spread of the submission is known: run at least twice more"
    else:
        alone = ratio_of(replace(ours, spread=0.0), theirs)
        half = alone.half_width if alone is not None else None
        why = f"the ratio is too near {1 + within:g} or its inverse"
        if half is not None and half <= math.log1p(within) < (found.half_width or 0.0):
            why = f"your own runs vary by {(ours.cv or 0.0) * 100:.1f} %"
        if half is not None and half > math.log1p(within):
            percent = min(math.expm1(half), 1.0) * 100
            why = f"the spread of the submitted runs alone leaves {percent:.1f} % or more either way"
        yield f"even {MOST_FURTHER_RUNS} more runs would not decide, if mean and spread stay as they are: {why}"


def _in_words(factor: Factor) -> str:
    text = f"{factor.name}: {factor.ours:.4g} against {factor.theirs:.4g}, ratio {factor.ratio or 0.0:.3f}"
    if factor.interval is not None:
        text += f" (90 %: {factor.interval[0]:.3f} to {factor.interval[1]:.3f})"
    return text
