"""Was the published result reproduced? Time per epoch and epochs to the target, each against the submitted runs.

from encore.results.compare.compare import compare
found = compare(side, "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet")
print(found.verdict, found.score.ratio, found.reasons)

Each verdict is shown at 5 %: "reproduced" needs the whole interval of the ratio inside the margin, a difference needs
it beyond the margin, and what is left is undecided. A difference that is significant but small is no difference to a
reader who allows 5 %, so significance alone decides nothing; and one interval for all three can never say two of them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Literal

from typing_extensions import TypedDict

from encore.results.compare.expected import Forecast
from encore.results.compare.nearest import How, Match, equally_near, find_submission, listed, same_target
from encore.results.compare.sides import Side, scores_compared, submission, with_official_scores
from encore.results.findings import FindingJson
from encore.results.published.systems import family
from encore.results.rules import data_size
from encore.results.scores.score import NOT_CONVERGED, Lack
from encore.results.statistics import (
    LEVEL,
    MOST_FURTHER_RUNS,
    Outcome,
    Ratio,
    Sample,
    further_runs,
    interval,
    ratio_of,
    z_score,
)
from encore.results.words import count_of, figure

WITHIN = 0.05  # Margin of a ratio that counts as the same result, from 1 / 1.05 to 1.05, as users ask for it
# Else 0.99. Submitted DLRM logs give the samples trained, which differ, and not those of the data set.
_LEAST_SHARE_OF_DATA = {"dlrm": 0.4}
# Two times of the same run, each rounded to a millisecond; digests keep nine digits of a run's minutes.
_ROUNDED_MINUTES = 0.0016 / 60
_DIGITS = 6  # Significant ones that a digest keeps of a quality
SAME_RUNS = "these are the submitted runs themselves: nothing was run again, so nothing was tested"
SAME_LOGS = "both are the same runs: nothing was run again, so nothing was tested"


class Verdict(str, Enum):
    REPRODUCED = "reproduced"
    SAME_RUNS = "same runs"  # Nothing was run again
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
    interval: tuple[float, float] | None = None  # Where the true ratio is, with a probability of 90 %
    z: float | None = None  # Our mean's distance from theirs in standard errors, by the spread of the submitted runs
    found: Ratio | None = None  # The ratio as it is tested; None where it decides nothing
    note: str = ""

    def outcome(self, within: float) -> Outcome:
        return self.found.outcome(within) if self.found is not None else Outcome.UNDECIDED

    def is_beyond(self, within: float) -> bool:
        return self.outcome(within) in (Outcome.BELOW, Outcome.ABOVE)


def factor_of(name: str, unit: str, ours: Sample | None, theirs: Sample | None) -> Factor | None:
    if ours is None or theirs is None:
        return None
    notes = {
        (True, False): "one run: its spread is taken from the submission",
        (False, True): "the spread of the submitted runs is not known and taken to be yours",
    }
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
        note=notes.get((ours.spread is None, theirs.spread is None), ""),
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
    percent = f"{within * 100:g} %"
    shown = {
        Verdict.REPRODUCED: f"shown to be within {percent}",
        Verdict.UNDECIDED: f"shown neither within {percent} nor beyond",
    }
    reasons = [f"{_factor_text(decisive)}: {shown.get(verdict, f'shown to be more than {percent} apart')}"]
    if verdict is not Verdict.REPRODUCED and per_length is not None and per_length.is_beyond(within):
        reasons.append(_factor_text(per_length))
    return reasons


def what_would_decide(ours: Sample, theirs: Sample, more: int | None, within: float) -> Iterator[str]:
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


def _factor_text(factor: Factor) -> str:
    text = f"{factor.name}: {figure(factor.ours)} against {figure(factor.theirs)}, ratio {factor.ratio or 0.0:.3f}"
    if factor.interval is not None:
        text += f" (90 %: {factor.interval[0]:.3f} to {factor.interval[1]:.3f})"
    return text


class FactorJson(TypedDict):
    """One quantity of both sides."""

    name: str
    unit: str
    ours: float | None
    theirs: float | None
    ratio: float | None  # Ours over theirs, below 1 is better
    interval: tuple[float, float] | None  # Where the true ratio is, with a probability of 90 %
    z: float | None  # Our mean's distance from theirs in standard errors, by the spread of the submitted runs
    note: str


class ComparisonJson(TypedDict):
    """A set of runs next to a submission or another set."""

    run: str
    round: str | None
    round_is_guess: bool
    benchmark: str | None
    submission: str | None
    found: str  # How the submission was found, or that there is none
    found_how: How  # The same as one word
    verdict: Verdict
    reasons: list[str]
    caveats: list[str]
    within: float  # Part of the time that still counts as the same result
    margin: tuple[float, float]  # Ratios that count as the same
    level: float  # Of the tests and intervals
    confidence: float | None  # One minus the p-value of the test that the verdict rests on; null without a test
    score_minutes: float | None
    official_minutes: float | None
    score_is_official: bool
    score_kind: Literal["raw", "official"]
    score_interval: tuple[float, float] | None  # Where our true score is, minutes, with a probability of 90 %
    runs: int
    converged: int
    required: int | None
    # About how many more runs decide, if mean and spread stay as they are; null where nothing shows how runs vary.
    further_runs: int | None
    ratio: float | None
    forecasts: list[Forecast]  # Of the runs that have not ended
    findings: list[FindingJson]  # Of the audit
    factors: list[FactorJson]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    ours: Side
    theirs: Side | None
    match: Match  # How the submission was found, or why there is none
    within: float
    score: Factor | None
    per_length: Factor | None
    lengths: Factor | None
    # The factors of the reference convergence, where official scores with different ones are compared.
    scaling: Factor | None
    verdict: Verdict
    reasons: tuple[str, ...]
    caveats: tuple[str, ...]
    # In the test that the verdict rests on: one minus its p-value, at least 0.95; None without a test.
    confidence: float | None
    score_interval: tuple[float, float] | None  # Where our true score is, minutes, with a probability of 90 %
    # About how many more runs decide between the same and not the same, if mean and spread stay as they are; None where
    # nothing shows how the runs vary, or more than MOST_FURTHER_RUNS are needed.
    further_runs: int | None
    forecasts: tuple[Forecast, ...] = ()  # Of the runs that have not ended

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The factors there are: the score, and the two or three that it is the product of."""
        every = (self.score, self.per_length, self.lengths, self.scaling)
        return tuple(each for each in every if each is not None)

    @property
    def published_minutes(self) -> float | None:
        """Their raw score, where ours can be compared with it."""
        if self.theirs is None or self.verdict is Verdict.NOT_COMPARABLE:
            return None
        return self.theirs.raw_minutes

    def as_json(self) -> ComparisonJson:
        return {
            "run": str(self.ours.folder),
            "round": self.ours.round,
            "round_is_guess": self.ours.round_is_guess,
            "benchmark": self.ours.benchmark,
            "submission": self.theirs.label if self.theirs else None,
            "found": self.match.text,
            "found_how": self.match.how,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "caveats": list(self.caveats),
            "within": self.within,
            "margin": (1 / (1 + self.within), 1 + self.within),
            "level": LEVEL,
            "confidence": self.confidence,
            "score_minutes": self.ours.raw_minutes,
            "official_minutes": self.ours.official_minutes,
            "score_is_official": self.ours.score_is_official,
            "score_kind": self.ours.score_kind,
            "score_interval": self.score_interval,
            "runs": self.ours.runs,
            "converged": self.ours.converged,
            "required": self.ours.required,
            "further_runs": self.further_runs,
            "ratio": self.score.ratio if self.score else None,
            "forecasts": [
                replace(each, expected=each.expects(self.published_minutes, self.within))
                if self.published_minutes
                else each
                for each in self.forecasts
            ],
            "findings": [finding.as_json() for finding in self.ours.findings],
            "factors": [
                {
                    "name": factor.name,
                    "unit": factor.unit,
                    "ours": factor.ours,
                    "theirs": factor.theirs,
                    "ratio": factor.ratio,
                    "interval": factor.interval,
                    "z": factor.z,
                    "note": factor.note,
                }
                for factor in self.factors
            ],
        }


def compare(ours: Side, name: str | None = None, logs: Path | None = None, within: float = WITHIN) -> Comparison:
    """Compare a set of runs with the submission called ``name``, or with the nearest one.

    ``logs`` is a folder of submitted logs: where it holds those of the submission, they are used rather than
    what Encore keeps of them.
    """
    cell, match = find_submission(ours, name)
    return compare_with(ours, submission(cell, logs) if cell is not None else None, match, within)


def compare_with(ours: Side, theirs: Side | None, match: Match, within: float = WITHIN) -> Comparison:
    """Compare two sets of runs; ``match`` is how the second was found, or why there is none."""
    ours, theirs = with_official_scores(ours, theirs)
    factors = _factors(ours, theirs)
    score, per_length, lengths = factors
    verdict, reasons, decisive = _judge(ours, theirs, factors, within, match)
    further = None
    borrowed = ours.score
    if ours.score is not None and theirs is not None and theirs.score is not None and score is not None:
        borrowed = ours.score.with_spread_of(theirs.score)
        further = further_runs(ours.score, theirs.score, within)
        # A single run whose time alone is different: a spread of its own takes two more.
        further = 2 if further == 0 and verdict is Verdict.UNDECIDED else further
        if verdict is Verdict.UNDECIDED:
            reasons += what_would_decide(ours.score, theirs.score, further, within)
    return Comparison(
        ours=ours,
        theirs=theirs,
        match=match,
        within=within,
        score=score,
        per_length=per_length,
        lengths=lengths,
        scaling=_scaling(ours, theirs) if lengths is not None else None,
        verdict=verdict,
        reasons=tuple(reasons),
        caveats=tuple(_caveats(ours, theirs, match.how)),
        confidence=decisive.found.confidence(within) if decisive and decisive.found else None,
        score_interval=interval(borrowed) if borrowed else None,
        further_runs=further,
        forecasts=_forecasts(ours),
    )


def _forecasts(ours: Side) -> tuple[Forecast, ...]:
    # A set with a score has ended: a run of it without an end is one that crashed.
    if ours.score_is_official:
        return ()
    # Here, since NumPy takes a tenth of a second to load, and every command imports this module.
    from encore.results.compare.forecast import forecasts_of

    return tuple(forecasts_of(ours.logs, ours.folder))


def certainty(found: Comparison) -> Iterator[str]:
    ours, span = found.ours, found.score_interval
    for each in found.forecasts:
        yield each.text(found.published_minutes, found.within)
        if each.minutes is not None:
            yield f"  {each.basis()}"
    if ours.score is not None:
        mean = f"mean of {count_of(ours.score.count, 'run')}, not a score"
        interval = f", 90 % interval {span[0]:.3f} to {span[1]:.3f}" if span else ""
        yield f"{ours.score_name if ours.score_is_official else mean}: {ours.score.estimate:.3f} minutes{interval}"
    if found.confidence is not None:
        yield f"confidence in the verdict: {100 * min(found.confidence, 0.999):.1f} %"


# Time to the target and the two factors that it is the product of.
def _factors(ours: Side, theirs: Side | None) -> tuple[Factor | None, Factor | None, Factor | None]:
    if theirs is None or _on_cpu(ours, theirs) or _on_small_data(ours, theirs):
        # A ratio of times that nothing makes comparable would be read as one.
        return None, None, None
    score = factor_of("time to the target", "min", ours.score, theirs.score)
    unit = ours.length_unit or "epochs"
    if unit != theirs.length_unit:
        return score, None, None
    one = " or ".join(each.rstrip("s") for each in unit.split(" or "))
    per_length = factor_of(f"minutes per {one}", "min", ours.per_length, theirs.per_length)
    return score, per_length, length_factor(unit, ours.lengths, theirs.lengths)


# Factors that the official scores have and minutes per epoch and epochs do not.
def _scaling(ours: Side, theirs: Side | None) -> Factor | None:
    mine, other = ours.scaling_factor, theirs.scaling_factor if theirs is not None else None
    if ours.score_kind == "raw" or not mine or not other or mine == other:
        return None
    return Factor(name="reference convergence", unit="", ours=mine, theirs=other, ratio=mine / other)


# Verdict, what it rests on and the factor that shows it, in the order in which a reader would ask.
def _judge(
    ours: Side,
    theirs: Side | None,
    factors: tuple[Factor | None, Factor | None, Factor | None],
    within: float,
    match: Match,
) -> tuple[Verdict, list[str], Factor | None]:
    if theirs is None:
        return Verdict.NOT_COMPARABLE, [match.text], None
    doubtful = ", ".join(sorted({each.rule for each in ours.findings if each.severity == "error"}))
    doubts = [f"the audit doubts these logs: {doubtful}"] if doubtful else []
    if same_runs(ours, theirs):
        return Verdict.SAME_RUNS, [SAME_RUNS if theirs.published else SAME_LOGS, *doubts], None
    obstacles = list(_obstacles(ours, theirs, match.how))
    if obstacles:
        return Verdict.NOT_COMPARABLE, obstacles, None
    # The round's rule decides where the set is whole; a single run that missed is no score either.
    if ours.score is None or ours.lack is Lack.NOT_CONVERGED:
        why = ours.missing or f"none of {ours.runs} runs has a time"
        unusable = any(not run.converged and run.reason not in NOT_CONVERGED for run in ours.logs)
        verdict = Verdict.NOT_COMPARABLE if unusable else Verdict.NOT_CONVERGED
        return verdict, [why, *list(dict.fromkeys(run.explanation for run in ours.logs if run.explanation))[:3]], None
    score, per_length, lengths = factors
    if score is None or score.ratio is None or ours.score is None:
        return Verdict.NOT_COMPARABLE, [f"{theirs.label} has no {'published ' if theirs.published else ''}score"], None
    if doubts:
        return Verdict.NOT_COMPARABLE, doubts, None
    verdict, decisive = decide(score, per_length, lengths, within, single=ours.score.count == 1)
    return verdict, reasons_for(verdict, decisive, per_length, within), decisive


# Yield what keeps the two from being the same kind of run.
def _obstacles(ours: Side, theirs: Side, how: How) -> Iterator[str]:
    # Where both bear the system's name, what the name seems to say of it does not matter.
    same_system = how.is_same_system
    if ours.benchmark != theirs.benchmark:
        yield f"a run of {ours.benchmark}, a result of {theirs.benchmark}"
    if ours.benchmark is None and theirs.benchmark is None:
        yield "neither set says which benchmark it is of"
    if not same_target(ours, theirs):
        unknown = "a round that is not known"
        yield f"{ours.round or unknown} and {theirs.round or unknown} have different quality targets"
    on_cpu = _on_cpu(ours, theirs) and not same_system
    if on_cpu:
        yield "a run on a CPU is no reproduction of a result on accelerators"
    full = _on_small_data(ours, theirs)
    if full:
        yield f"trained on {ours.train_samples:,.0f} samples; the benchmark's data set has {full:,}"
    if not on_cpu and not same_system:
        yield from _hardware_obstacles(ours, theirs)
    if how is How.NEAREST and not ours.is_cpu:
        yield from _unknown_hardware(ours, theirs)
    if ours.submission.get("kind") == "study":
        yield "a run of a study's system, which is no submission"


def _on_cpu(ours: Side, theirs: Side) -> bool:
    return ours.is_cpu and theirs.hardware.accelerators != 0


# Training samples of the benchmark's data set where ours has fewer; None where it is that set.
def _on_small_data(ours: Side, theirs: Side) -> int | None:
    # RetinaNet, which is "ssd" from v2.0 on, has no size: train_samples holds iterations in most of its logs.
    size = data_size(ours.benchmark, ours.round)
    if size is None or size.train is None or not ours.train_samples:
        return None
    least = _LEAST_SHARE_OF_DATA.get(ours.benchmark or "", 0.99)
    return size.train if ours.train_samples < least * min(size.train, theirs.train_samples or size.train) else None


def _hardware_obstacles(ours: Side, theirs: Side) -> Iterator[str]:
    mine, submitted = family(ours.hardware.accelerator), family(theirs.hardware.accelerator)
    if mine and submitted and mine != submitted:
        yield f"run on {mine}, submitted on {submitted}"
    count, wanted = ours.hardware.accelerators, theirs.hardware.accelerators
    if count and wanted and count != wanted:
        yield f"run on {count} accelerators, submitted on {wanted}"


# Yield that nobody knows whether run and submission are of the same hardware, where nothing but that chose it.
def _unknown_hardware(ours: Side, theirs: Side) -> Iterator[str]:
    pairs = {
        "accelerator": (family(ours.hardware.accelerator), family(theirs.hardware.accelerator)),
        "number of accelerators": (ours.ranks, theirs.hardware.accelerators),
    }
    mine = [name for name, (here, _) in pairs.items() if not here]
    others = [name for name, (here, there) in pairs.items() if here and not there]
    fitting = listed([theirs.label, *equally_near(ours, theirs.label)])
    if mine:
        yield f"{' and '.join(mine)} of this run not known; these fit: {fitting}; name one of them"
    if others:
        yield f"{' and '.join(others)} of {theirs.label} not known; name a submission"


# Yield what a reader should know though it does not stop the comparison.
def _caveats(ours: Side, theirs: Side | None, how: How) -> Iterator[str]:
    if ours.score is not None and not ours.score_is_official:
        count = ours.score.count
        what = "one run" if count == 1 else f"the mean of {count} runs"
        yield f"no official score ({ours.missing}): compared by {what}"
    if ours.hardware.caveat:
        yield f"the system description {ours.hardware.caveat}"
    if ours.round_is_guess:
        yield f"that the round is {ours.round} is a guess from the date or the keys of the logs"
    yield from (flag.text for flag in ours.flags)
    flagged = {flag.log for flag in ours.flags}
    without = [run for run in ours.logs if run.explanation and run.path not in flagged and ours.score is not None]
    yield from (f"{run.path.name} has no time: {run.explanation}" for run in without)
    if theirs is None:
        return
    if ours.division and theirs.division and ours.division != theirs.division:
        yield f"{ours.division} division against {theirs.division}, which has other rules"
    yield from scores_compared(ours, theirs)
    if not same_runs(ours, theirs):
        yield from _hardware_caveats(ours, theirs, how)
    if ours.global_batch and theirs.global_batch and ours.global_batch != theirs.global_batch:
        yield f"global batch {ours.global_batch:g}, submitted with {theirs.global_batch:g}"
    mine, other = ours.choices, theirs.choices
    different = [name for name in sorted({*mine} & {*other}) if mine[name] != other[name]]
    yield from (f"{name}: {mine[name]}, theirs {other[name]}" for name in different)
    yield from (f"not as submitted: {deviation}" for deviation in ours.deviations)
    if theirs.published is not None and theirs.published.note:
        yield f"of the published result: {theirs.published.note}"


def _hardware_caveats(ours: Side, theirs: Side, how: How) -> Iterator[str]:
    known = family(ours.hardware.accelerator) is not None
    chosen = how is How.NEAREST
    if not known and not chosen and not ours.is_cpu:
        taken = ": taken to be what was submitted" if theirs.published is not None else ""
        yield f"the logs do not say what they ran on{taken}"
    elif family(theirs.hardware.accelerator) is None and theirs.hardware.accelerators != 0:
        yield f"what {theirs.label} ran on is not known here"
    if chosen and known and ours.ranks and (others := equally_near(ours, theirs.label)):
        yield f"equally near: {listed(others)}; name one of them"


def same_runs(ours: Side, theirs: Side) -> bool:
    """Return whether both are the same runs: the times of all that converged are, and every quality of every run."""
    times = list(zip(sorted(ours.minutes), sorted(theirs.minutes), strict=False))
    mine, others = (
        sorted(
            [(name, [f"{each:.{_DIGITS}g}" for each in values]) for name, values in sorted(curve.values.items())]
            for curve in side.curves
        )
        for side in (ours, theirs)
    )
    return (
        bool(times)
        and (ours.runs, len(ours.minutes)) == (theirs.runs, len(theirs.minutes))
        and all(math.isclose(*pair, rel_tol=1e-8, abs_tol=_ROUNDED_MINUTES) for pair in times)
        and mine == others
    )
