"""Was the published result reproduced? Time per epoch and epochs to the target, each against the submitted runs.

from encore.results.compare import compare
found = compare(side, "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet")
print(found.verdict, found.score.ratio, found.reasons)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from encore.results.digest import submission
from encore.results.nearest import SAME_SYSTEM, find_submission, same_target
from encore.results.published import PublishedResult
from encore.results.rules import data_size
from encore.results.sides import Side, load_side
from encore.results.statistics import (
    Sample,
    further_runs,
    interval,
    is_significant,
    ratio_draws,
    ratio_interval,
    z_score,
)
from encore.results.systems import family

WITHIN = 0.05
"""Difference that still counts as the same result, as users ask for it."""
_LEAST_SHARE_OF_DATA = {"dlrm": 0.4}
"""Else 0.99. Submitted DLRM logs give the samples trained, which differ, and not those of the data set."""
_RETINANET_SINCE = "v2.0"
"""From here on ssd is RetinaNet on Open Images, and train_samples holds iterations in most logs."""
_ROUNDED_MINUTES = 0.00006
"""published.csv gives scores to four places."""


class Verdict(str, Enum):
    """What a comparison comes to."""

    REPRODUCED = "reproduced"
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
    """Where the true ratio is, with a probability of 95 %."""
    z: float | None = None
    """Our mean's distance from theirs in standard errors, by the spread of the submitted runs."""
    beyond_spread: bool = True
    """Whether the spread of the submitted runs leaves the distance unexplained, at a level of 5 %."""
    note: str = ""

    def differs(self, within: float) -> bool:
        """Return whether the ratio is further from 1 than ``within``, and than the submitted spread explains."""
        if self.ratio is None or abs(self.ratio - 1) <= within:
            return False
        return self.beyond_spread


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run next to a submission."""

    ours: Side
    theirs: Side | None
    found_how: str
    within: float
    score: Factor | None
    per_length: Factor | None
    lengths: Factor | None
    verdict: Verdict
    reasons: tuple[str, ...]
    caveats: tuple[str, ...]
    confidence: float | None
    """Probability that the true ratio of the times is what the verdict says."""
    score_interval: tuple[float, float] | None
    """Where our true score is, minutes, with a probability of 95 %."""
    further_runs: int | None
    """Runs still needed to know our mean to ``within``; None where nothing shows how they vary."""

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The factors there are: the score, and the two it is the product of."""
        return tuple(each for each in (self.score, self.per_length, self.lengths) if each is not None)

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain data; the fields are described in docs/compare.md."""
        return {
            "run": str(self.ours.folder),
            "round": self.ours.round,
            "benchmark": self.ours.benchmark,
            "submission": self.theirs.label if self.theirs else None,
            "found": self.found_how,
            "verdict": self.verdict.value,
            "reasons": list(self.reasons),
            "caveats": list(self.caveats),
            "within": self.within,
            "confidence": self.confidence,
            "score_minutes": self.ours.score.estimate if self.ours.score else None,
            "score_is_official": self.ours.score_is_official,
            "score_interval": list(self.score_interval) if self.score_interval else None,
            "runs": self.ours.runs,
            "converged": self.ours.converged,
            "required": self.ours.required,
            "further_runs": self.further_runs,
            "ratio": self.score.ratio if self.score else None,
            "factors": [_factor_as_json(factor) for factor in self.factors],
        }


def _factor_as_json(factor: Factor) -> dict[str, Any]:
    return {
        "name": factor.name,
        "unit": factor.unit,
        "ours": factor.ours,
        "theirs": factor.theirs,
        "ratio": factor.ratio,
        "interval": list(factor.interval) if factor.interval else None,
        "z": factor.z,
        "note": factor.note,
    }


def compare_path(path: Path, name: str | None = None, logs: Path | None = None, within: float = WITHIN) -> Comparison:
    """Compare the one set of runs at ``path``; see ``compare``."""
    return compare(load_side(path), name, logs, within)


def compare(ours: Side, name: str | None = None, logs: Path | None = None, within: float = WITHIN) -> Comparison:
    """Compare a set of runs with the submission called ``name``, or with the nearest one.

    ``logs`` is a folder of submitted logs: where it holds those of the submission, they are used rather than
    what Encore keeps of them.
    """
    cell, how = find_submission(ours, name)
    theirs = submission(cell, logs) if cell is not None else None
    score = per_length = lengths = None
    if theirs is not None:
        score = _factor("time to the target", "min", ours.score, theirs.score)
        unit = ours.length_unit or "epochs"
        mine = ours.by_last_evaluation() if theirs.counts_last else ours
        if unit == theirs.length_unit:
            one = unit.split(" ")[0].rstrip("s")
            per_length = _factor(f"minutes per {one}", "min", mine.per_length, theirs.per_length)
            lengths = _factor(f"{unit} to the target", unit, mine.lengths, theirs.lengths)
            lengths = lengths or _ranged(mine, theirs)
    verdict, reasons = _judge(ours, theirs, cell, (score, per_length, lengths), within, how)
    borrowed = ours.score
    if borrowed is not None and theirs is not None and theirs.score is not None:
        borrowed = borrowed.with_spread_of(theirs.score)
    return Comparison(
        ours=ours,
        theirs=theirs,
        found_how=how,
        within=within,
        score=score,
        per_length=per_length,
        lengths=lengths,
        verdict=verdict,
        reasons=tuple(reasons),
        caveats=tuple(_caveats(ours, theirs)),
        confidence=_confidence(ours, theirs, verdict, within),
        score_interval=interval(borrowed) if borrowed else None,
        further_runs=further_runs(borrowed, within) if borrowed else None,
    )


def _factor(name: str, unit: str, ours: Sample | None, theirs: Sample | None) -> Factor | None:
    if ours is None or theirs is None:
        return None
    ours_known = ours.with_spread_of(theirs)
    note = ""
    if ours.spread is None and ours_known.spread is not None:
        note = "one run: its spread is taken from the submission"
    elif theirs.spread is None:
        note = "the spread of the submitted runs is not known"
    z = z_score(ours, theirs)
    return Factor(
        name=name,
        unit=unit,
        ours=ours.estimate,
        theirs=theirs.estimate,
        ratio=ours.estimate / theirs.estimate if theirs.estimate else None,
        interval=ratio_interval(ours_known, theirs),
        z=z,
        beyond_spread=z is None or is_significant(z, theirs.count),
        note=note,
    )


def _ranged(ours: Side, theirs: Side) -> Factor | None:
    """Return epochs where only the least and the most of the submission are known: the ratio to the nearer end."""
    if ours.lengths is None or theirs.length_range is None:
        return None
    low, high = theirs.length_range
    found = ours.lengths.estimate
    nearest = min(max(found, low), high)
    return Factor(
        name=f"{ours.length_unit} to the target",
        unit=ours.length_unit,
        ours=found,
        theirs=nearest,
        ratio=found / nearest,
        note=f"only the range {low:g} to {high:g} of the submitted runs is known: against its nearer end",
    )


def _judge(
    ours: Side,
    theirs: Side | None,
    cell: PublishedResult | None,
    factors: tuple[Factor | None, Factor | None, Factor | None],
    within: float,
    how: str,
) -> tuple[Verdict, list[str]]:
    """Return the verdict and what it rests on, in the order in which a reader would ask."""
    if theirs is None or cell is None:
        return Verdict.NOT_COMPARABLE, [how]
    obstacles = list(_obstacles(ours, theirs, cell, same_system=how in SAME_SYSTEM))
    if obstacles:
        return Verdict.NOT_COMPARABLE, obstacles
    if _missed_too_often(ours):
        why = ours.missing or f"none of {ours.runs} runs has a time"
        return Verdict.NOT_CONVERGED, [why, *_explanations(ours)]
    score, per_length, lengths = factors
    if score is None or score.ratio is None:
        return Verdict.NOT_COMPARABLE, [f"{theirs.label} has no published score"]
    if lengths is not None and lengths.differs(within):
        return Verdict.CONVERGES_DIFFERENTLY, [_in_words(lengths), *_beside(per_length, within)]
    for factor in (per_length, score):
        if factor is not None and factor.ratio is not None and factor.differs(within):
            faster = factor.ratio < 1
            return Verdict.FASTER if faster else Verdict.SLOWER, [_in_words(factor)]
    return Verdict.REPRODUCED, [_in_words(score, within)]


def _missed_too_often(ours: Side) -> bool:
    """Judge by the round's rule where the set is whole; a single run that missed is no score either."""
    if ours.score is None:
        return True
    return "missed the target" in ours.missing


def _explanations(ours: Side) -> list[str]:
    reasons = dict.fromkeys(run.explanation for run in ours.logs if run.explanation)
    return list(reasons)[:3]


def _in_words(factor: Factor, within: float | None = None) -> str:
    ratio = factor.ratio or 0.0
    text = f"{factor.name}: {factor.ours:.4g} against {factor.theirs:.4g}, ratio {ratio:.3f}"
    if factor.interval is not None:
        text += f" (95 %: {factor.interval[0]:.3f} to {factor.interval[1]:.3f})"
    if within is not None and abs(ratio - 1) > within:
        text += "; the spread of the submitted runs explains the difference"
    return text


def _beside(factor: Factor | None, within: float) -> list[str]:
    return [_in_words(factor)] if factor is not None and factor.differs(within) else []


def _obstacles(ours: Side, theirs: Side, cell: PublishedResult, *, same_system: bool) -> Iterator[str]:
    """Yield what keeps the two from being the same kind of run.

    ``same_system``: both bear the system's name, so that what the name seems to say of it does not matter.
    """
    if ours.benchmark != cell.benchmark:
        yield f"a run of {ours.benchmark}, a result of {cell.benchmark}"
    if not same_target(ours, cell):
        yield f"{ours.round or 'a round that is not known'} and {cell.round} have different quality targets"
    on_cpu = ours.is_cpu and theirs.hardware.accelerators != 0 and not same_system
    if on_cpu:
        yield "a run on a CPU is no reproduction of a result on accelerators"
    size = data_size(ours.benchmark)
    if size is not None and size.train is not None and _is_small(ours, theirs, cell, size.train):
        yield f"trained on {ours.train_samples:,.0f} samples; the benchmark's data set has {size.train:,}"
    if not on_cpu and not same_system:
        yield from _hardware_obstacles(ours, theirs)
    kind = str(ours.passport.get("submission") or "")
    if "a study, not a submission" in kind:
        yield kind


def _is_small(ours: Side, theirs: Side, cell: PublishedResult, full: int) -> bool:
    if not ours.train_samples or (cell.benchmark == "ssd" and cell.round >= _RETINANET_SINCE):
        return False
    least = _LEAST_SHARE_OF_DATA.get(cell.benchmark or "", 0.99)
    return ours.train_samples < least * min(full, theirs.train_samples or full)


def _hardware_obstacles(ours: Side, theirs: Side) -> Iterator[str]:
    mine, submitted = family(ours.hardware.accelerator), family(theirs.hardware.accelerator)
    if mine and submitted and mine != submitted:
        yield f"run on {mine}, submitted on {submitted}"
    count, wanted = ours.hardware.accelerators, theirs.hardware.accelerators
    if count and wanted and count != wanted:
        yield f"run on {count} accelerators, submitted on {wanted}"


def _caveats(ours: Side, theirs: Side | None) -> Iterator[str]:
    """Yield what a reader should know though it does not stop the comparison."""
    if ours.score is not None and not ours.score_is_official:
        yield f"no official score ({ours.missing}): compared by the mean of {ours.score.count} runs"
    if theirs is None:
        return
    if theirs.published is not None and _same_runs(ours, theirs):
        yield "these are the submitted runs themselves"
    elif family(ours.hardware.accelerator) is None and ours.hardware.accelerators != 0:
        yield "the logs do not say what they ran on: taken to be what was submitted"
    elif family(theirs.hardware.accelerator) is None and theirs.hardware.accelerators != 0:
        yield f"what {theirs.label} ran on is not known here"
    if ours.global_batch and theirs.global_batch and ours.global_batch != theirs.global_batch:
        yield f"global batch {ours.global_batch:g}, submitted with {theirs.global_batch:g}"
    deviations = ours.passport.get("deviations")
    for deviation in deviations if isinstance(deviations, list) else ():
        yield f"not as submitted: {deviation}"
    if theirs.published is not None and theirs.published.note:
        yield f"of the published result: {theirs.published.note}"
    yield from dict.fromkeys(flag for run in ours.logs for flag in run.flags if "by hand" in flag)


def _same_runs(ours: Side, theirs: Side) -> bool:
    return (
        ours.score_is_official
        and ours.score is not None
        and theirs.score is not None
        and ours.runs == theirs.runs
        and abs(ours.score.estimate - theirs.score.estimate) < _ROUNDED_MINUTES
    )


def _confidence(ours: Side, theirs: Side | None, verdict: Verdict, within: float) -> float | None:
    if theirs is None or ours.score is None or theirs.score is None:
        return None
    pair = (ours.score, theirs.score)
    if verdict is Verdict.CONVERGES_DIFFERENTLY:
        if ours.lengths is None or theirs.lengths is None:
            return None
        pair = (ours.lengths, theirs.lengths)
    draws = ratio_draws(pair[0].with_spread_of(pair[1]), pair[1])
    if draws is None:
        return None
    if verdict is Verdict.REPRODUCED:
        return float(((draws >= 1 - within) & (draws <= 1 + within)).mean())
    if verdict in (Verdict.FASTER, Verdict.SLOWER, Verdict.CONVERGES_DIFFERENTLY):
        below = float((draws < 1).mean())
        centre = pair[0].estimate < pair[1].estimate
        return below if centre else 1 - below
    return None
