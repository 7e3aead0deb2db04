"""Compare a run set with a published result: time to target, minutes per epoch and epochs to target.

    from encore.results.compare.compare import compare
    comparison = compare(run_set, "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet")
    print(comparison.verdict, comparison.score.ratio, comparison.reasons)

Verdicts are tested at a level of 5 %. "reproduced": the confidence interval of the ratio is inside the margin. A
difference: the interval is outside the margin. Otherwise the comparison is undecided. Significance without a margin
is not enough, since a significant difference may be smaller than the tolerated 5 %. All three outcomes use the same
interval, so two of them cannot be true at once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Literal

from typing_extensions import TypedDict

from encore.results.compare.expected import Forecast
from encore.results.compare.nearest import How, Match, equally_near, find_submission, same_target
from encore.results.compare.run_set import RunSet, score_caveats, submission, use_official_scores
from encore.results.findings import FindingJson
from encore.results.format import count_of, figure, join_names
from encore.results.logs.timing import ROUNDED_S
from encore.results.published.published import DIGEST_DIGITS
from encore.results.published.systems import family
from encore.results.rules import data_size
from encore.results.scores.score import NOT_CONVERGED, Lack
from encore.results.statistics import (
    LEVEL,
    MAX_FURTHER_RUNS,
    Outcome,
    Ratio,
    Sample,
    further_runs,
    interval,
    ratio_of,
    z_score,
)

WITHIN = 0.05  # Margin of the ratio that counts as the same result: 1 / 1.05 to 1.05
# Default 0.99. In submitted DLRM logs, train_samples is the number of trained samples, which varies between runs.
_LEAST_SHARE_OF_DATA = {"dlrm": 0.4}
SAME_RUNS = "these are the submitted runs: without new runs, nothing was tested"
SAME_LOGS = "both sets contain the same runs: without new runs, nothing was tested"


class Verdict(str, Enum):
    REPRODUCED = "reproduced"
    SAME_RUNS = "same runs"  # No new runs
    UNDECIDED = "undecided"
    FASTER = "faster"
    SLOWER = "slower"
    CONVERGES_DIFFERENTLY = "converges differently"
    NOT_CONVERGED = "not converged"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, kw_only=True)
class FactorJson:
    """One quantity in both run sets."""

    name: str
    unit: str
    ours: float | None
    theirs: float | None
    ratio: float | None = None  # ``ours`` over ``theirs``, below 1 is better
    interval: tuple[float, float] | None = None  # Confidence interval (90 %) of the true ratio
    z: float | None = None  # Distance between the means in standard errors, from the spread of the submitted runs
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Factor(FactorJson):
    """One quantity in both run sets. ``ratio`` is ``ours`` over ``theirs``; below 1 is better."""

    tested_ratio: Ratio | None = None  # Tested ratio; None if it does not decide the verdict

    def outcome(self, within: float) -> Outcome:
        return self.tested_ratio.outcome(within) if self.tested_ratio is not None else Outcome.UNDECIDED

    def is_beyond(self, within: float) -> bool:
        return self.outcome(within) in (Outcome.BELOW, Outcome.ABOVE)


def make_factor(name: str, unit: str, current: Sample | None, baseline: Sample | None) -> Factor | None:
    if current is None or baseline is None:
        return None
    notes = {
        (True, False): "one run: its spread is taken from the submission",
        (False, True): "the spread of the submitted runs is unknown; assumed to equal yours",
    }
    ratio = ratio_of(current, baseline)
    return Factor(
        name=name,
        unit=unit,
        ours=current.estimate,
        theirs=baseline.estimate,
        ratio=ratio.value if ratio else None,
        interval=ratio.interval() if ratio else None,
        z=z_score(current, baseline),
        tested_ratio=ratio,
        note=notes.get((current.spread is None, baseline.spread is None), ""),
    )


def length_factor(unit: str, current: Sample | None, baseline: Sample | None) -> Factor | None:
    """Return the factor for epochs to the target. A single run never shows a difference."""
    factor = make_factor(f"{unit} to the target", unit, current, baseline)
    if factor is None or current is None or current.count > 1:
        return factor
    has_error = factor.tested_ratio is not None and factor.tested_ratio.error
    return replace(factor, tested_ratio=None, interval=factor.interval if has_error else None)


def decide(
    score: Factor, per_length: Factor | None, lengths: Factor | None, within: float, *, single: bool
) -> tuple[Verdict, Factor]:
    """Return the verdict and the deciding factor. ``single``: the current set is one run.

    A single run may need an epoch more by chance, even if all submitted runs took the same number. Its time only
    differs if its time per epoch differs.
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
    conclusions = {
        Verdict.REPRODUCED: f"shown to be within {percent}",
        Verdict.UNDECIDED: f"shown neither within {percent} nor beyond",
    }
    reasons = [f"{_factor_text(decisive)}: {conclusions.get(verdict, f'shown to be more than {percent} apart')}"]
    if verdict is not Verdict.REPRODUCED and per_length is not None and per_length.is_beyond(within):
        reasons.append(_factor_text(per_length))
    return reasons


def explain_undecided(current: Sample, baseline: Sample, more_runs: int | None, within: float) -> Iterator[str]:
    ratio = ratio_of(current, baseline)
    if ratio is None:
        return
    if more_runs is not None:
        runs = "1 more run" if more_runs == 1 else f"{more_runs} more runs"
        yield f"about {runs} would decide, if mean and spread stay as they are"
    elif ratio.error is None:
        yield "one run, and the spread of the submission is unknown: add at least two runs"
    else:
        fixed_ratio = ratio_of(replace(current, spread=0.0), baseline)
        half = fixed_ratio.half_width if fixed_ratio is not None else None
        reason = f"the ratio is too near {1 + within:g} or its inverse"
        if half is not None and half <= math.log1p(within) < (ratio.half_width or 0.0):
            reason = f"your runs vary by {(current.cv or 0.0) * 100:.1f} %"
        if half is not None and half > math.log1p(within):
            percent = min(math.expm1(half), 1.0) * 100
            reason = f"the spread of the submitted runs alone leaves {percent:.1f} % or more in both directions"
        yield f"even {MAX_FURTHER_RUNS} more runs would not decide, if mean and spread stay as they are: {reason}"


def _factor_text(factor: Factor) -> str:
    text = f"{factor.name}: {figure(factor.ours)} against {figure(factor.theirs)}, ratio {factor.ratio or 0.0:.3f}"
    if factor.interval is not None:
        text += f" (90 %: {factor.interval[0]:.3f} to {factor.interval[1]:.3f})"
    return text


class ComparisonJson(TypedDict):
    """Comparison of a run set with a submission or another run set."""

    run: str
    round: str | None
    round_is_guess: bool
    benchmark: str | None
    submission: str | None
    found: str  # How the submission was selected, or the reason why it is missing
    found_how: How  # Same as one word
    verdict: Verdict
    reasons: list[str]
    caveats: list[str]
    within: float  # Tolerated difference as a fraction of the time
    margin: tuple[float, float]  # Ratios that count as the same result
    level: float  # Level of the tests and intervals
    confidence: float | None  # One minus the p-value of the deciding test; null without a test
    score_minutes: float | None
    official_minutes: float | None
    score_is_official: bool
    score_kind: Literal["raw", "official"]
    score_interval: tuple[float, float] | None  # Confidence interval (90 %) of the true score in minutes
    runs: int
    converged: int
    required: int | None
    # Further runs that would decide, if mean and spread do not change; null if the spread is unknown
    further_runs: int | None
    ratio: float | None
    forecasts: list[Forecast]  # Forecasts for unfinished runs
    findings: list[FindingJson]  # Findings of the audit
    factors: list[FactorJson]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    current: RunSet
    baseline: RunSet | None
    match: Match  # How the submission was selected, or the reason why it is missing
    within: float
    score: Factor | None
    per_length: Factor | None
    lengths: Factor | None
    # Factors of the reference convergence, if official scores with different factors are compared
    scaling: Factor | None
    verdict: Verdict
    reasons: tuple[str, ...]
    caveats: tuple[str, ...]
    # One minus the p-value of the deciding test, at least 0.95; None without a test
    confidence: float | None
    score_interval: tuple[float, float] | None  # Confidence interval (90 %) of the true score in minutes
    # Number of further runs that would decide between same and different, if mean and spread do not change. None if the
    # spread is unknown or more than MAX_FURTHER_RUNS are needed.
    further_runs: int | None
    forecasts: tuple[Forecast, ...] = ()  # Forecasts for unfinished runs

    @property
    def factors(self) -> tuple[Factor, ...]:
        """Factors that are not None: the score and the two or three factors whose product it is"""
        factors = (self.score, self.per_length, self.lengths, self.scaling)
        return tuple(factor for factor in factors if factor is not None)

    @property
    def published_minutes(self) -> float | None:
        """Raw score of the baseline, if the sets are comparable"""
        if self.baseline is None or self.verdict is Verdict.NOT_COMPARABLE:
            return None
        return self.baseline.raw_minutes

    def as_json(self) -> ComparisonJson:
        return {
            "run": str(self.current.folder),
            "round": self.current.round,
            "round_is_guess": self.current.round_is_guess,
            "benchmark": self.current.benchmark,
            "submission": self.baseline.label if self.baseline else None,
            "found": self.match.text,
            "found_how": self.match.how,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "caveats": list(self.caveats),
            "within": self.within,
            "margin": (1 / (1 + self.within), 1 + self.within),
            "level": LEVEL,
            "confidence": self.confidence,
            "score_minutes": self.current.raw_minutes,
            "official_minutes": self.current.official_minutes,
            "score_is_official": self.current.score_is_official,
            "score_kind": self.current.score_kind,
            "score_interval": self.score_interval,
            "runs": self.current.runs,
            "converged": self.current.converged,
            "required": self.current.required,
            "further_runs": self.further_runs,
            "ratio": self.score.ratio if self.score else None,
            "forecasts": [
                replace(forecast, expected=forecast.expects(self.published_minutes, self.within))
                if self.published_minutes
                else forecast
                for forecast in self.forecasts
            ],
            "findings": [finding.as_json() for finding in self.current.findings],
            "factors": [
                FactorJson(**{name: value for name, value in vars(factor).items() if name != "tested_ratio"})
                for factor in self.factors
            ],
        }


def compare(current: RunSet, name: str | None = None, logs: Path | None = None, within: float = WITHIN) -> Comparison:
    """Compare a run set with the submission ``name``, or with the nearest one.

    Logs of the submission in the folder ``logs`` are used instead of its digest.
    """
    cell, match = find_submission(current, name)
    return compare_with(current, submission(cell, logs) if cell is not None else None, match, within)


def compare_with(current: RunSet, baseline: RunSet | None, match: Match, within: float = WITHIN) -> Comparison:
    """Compare two sets of runs. ``match``: how the baseline was selected, or the reason why it is None."""
    current, baseline = use_official_scores(current, baseline)
    factors = _factors(current, baseline)
    score, per_length, lengths = factors
    verdict, reasons, decisive = _reach_verdict(current, baseline, factors, within, match)
    further, borrowed = None, current.score
    if current.score is not None and baseline is not None and baseline.score is not None and score is not None:
        borrowed = current.score.with_spread_of(baseline.score)
        further = further_runs(current.score, baseline.score, within)
        # Only the time of this single run differs: a spread needs two more runs.
        further = 2 if further == 0 and verdict is Verdict.UNDECIDED else further
        if verdict is Verdict.UNDECIDED:
            reasons += explain_undecided(current.score, baseline.score, further, within)
    return Comparison(
        current=current,
        baseline=baseline,
        match=match,
        within=within,
        score=score,
        per_length=per_length,
        lengths=lengths,
        scaling=_scaling(current, baseline) if lengths is not None else None,
        verdict=verdict,
        reasons=tuple(reasons),
        caveats=tuple(_caveats(current, baseline, match.how)),
        confidence=decisive.tested_ratio.confidence(within) if decisive and decisive.tested_ratio else None,
        score_interval=interval(borrowed) if borrowed else None,
        further_runs=further,
        forecasts=_forecasts(current),
    )


def _forecasts(current: RunSet) -> tuple[Forecast, ...]:
    # A set with a score is finished: runs without run_stop crashed.
    if current.score_is_official:
        return ()
    # Imported here: NumPy takes 0.1 s to load, and all commands import this module.
    from encore.results.compare.forecast import forecast_runs

    return tuple(forecast_runs(current.logs, current.folder))


def format_certainty(comparison: Comparison) -> Iterator[str]:
    current, span = comparison.current, comparison.score_interval
    for forecast in comparison.forecasts:
        yield forecast.text(comparison.published_minutes, comparison.within)
        if forecast.minutes is not None:
            yield f"  {forecast.basis()}"
    if current.score is not None:
        mean = f"mean of {count_of(current.score.count, 'run')}, not a score"
        interval = f", 90 % interval {span[0]:.3f} to {span[1]:.3f}" if span else ""
        name = current.score_name if current.score_is_official else mean
        yield f"{name}: {current.score.estimate:.3f} minutes{interval}"
    if comparison.confidence is not None:
        yield f"confidence in the verdict: {100 * min(comparison.confidence, 0.999):.1f} %"


# Time to the target and its two factors
def _factors(current: RunSet, baseline: RunSet | None) -> tuple[Factor | None, Factor | None, Factor | None]:
    if baseline is None or _is_cpu_run(current, baseline) or _full_data_size(current, baseline):
        # The ratio of incomparable times would be misleading.
        return None, None, None
    score = make_factor("time to the target", "min", current.score, baseline.score)
    unit = current.length_unit or "epochs"
    if unit != baseline.length_unit:
        return score, None, None
    singular = " or ".join(word.rstrip("s") for word in unit.split(" or "))
    per_length = make_factor(f"minutes per {singular}", "min", current.per_length, baseline.per_length)
    return score, per_length, length_factor(unit, current.lengths, baseline.lengths)


# Reference convergence factors, which are part of official scores, but not of times and epochs
def _scaling(current: RunSet, baseline: RunSet | None) -> Factor | None:
    current_factor, baseline_factor = current.scaling_factor, baseline.scaling_factor if baseline is not None else None
    if current.score_kind == "raw" or not current_factor or not baseline_factor or current_factor == baseline_factor:
        return None
    return Factor(
        name="reference convergence",
        unit="",
        ours=current_factor,
        theirs=baseline_factor,
        ratio=current_factor / baseline_factor,
    )


# Verdict, reasons and deciding factor. Checks run in the order in which a reader would ask.
def _reach_verdict(
    current: RunSet,
    baseline: RunSet | None,
    factors: tuple[Factor | None, Factor | None, Factor | None],
    within: float,
    match: Match,
) -> tuple[Verdict, list[str], Factor | None]:
    if baseline is None:
        return Verdict.NOT_COMPARABLE, [match.text], None
    failed_rules = ", ".join(sorted({finding.rule for finding in current.findings if finding.severity == "error"}))
    doubts = [f"the audit doubts these logs: {failed_rules}"] if failed_rules else []
    if same_runs(current, baseline):
        return Verdict.SAME_RUNS, [SAME_RUNS if baseline.published else SAME_LOGS, *doubts], None
    obstacles = list(_obstacles(current, baseline, match.how))
    if obstacles:
        return Verdict.NOT_COMPARABLE, obstacles, None
    # The round's rules apply to complete sets. A single run that missed its target does not have a score either.
    if current.score is None or current.lack is Lack.NOT_CONVERGED:
        reason = current.missing or f"none of {current.runs} runs has a time"
        unusable = any(not run.converged and run.reason not in NOT_CONVERGED for run in current.logs)
        verdict = Verdict.NOT_COMPARABLE if unusable else Verdict.NOT_CONVERGED
        return (
            verdict,
            [reason, *list(dict.fromkeys(run.explanation for run in current.logs if run.explanation))[:3]],
            None,
        )
    score, per_length, lengths = factors
    if score is None or score.ratio is None or current.score is None:
        return (
            Verdict.NOT_COMPARABLE,
            [f"{baseline.label} does not have a {'published ' if baseline.published else ''}score"],
            None,
        )
    if doubts:
        return Verdict.NOT_COMPARABLE, doubts, None
    verdict, decisive = decide(score, per_length, lengths, within, single=current.score.count == 1)
    return verdict, reasons_for(verdict, decisive, per_length, within), decisive


# Reasons why the sets are not the same kind of run
def _obstacles(current: RunSet, baseline: RunSet, how: How) -> Iterator[str]:
    # If both have the same system name, hardware derived from the name is ignored.
    same_system = how.is_same_system
    if current.benchmark != baseline.benchmark:
        yield f"a run of {current.benchmark}, a result of {baseline.benchmark}"
    if current.benchmark is None and baseline.benchmark is None:
        yield "neither set identifies its benchmark"
    if not same_target(current, baseline):
        unknown = "an unknown round"
        yield f"{current.round or unknown} and {baseline.round or unknown} have different quality targets"
    on_cpu = _is_cpu_run(current, baseline) and not same_system
    if on_cpu:
        yield "a CPU run cannot reproduce a result on accelerators"
    full = _full_data_size(current, baseline)
    if full:
        yield f"trained on {current.train_samples:,.0f} samples; the benchmark's data set has {full:,}"
    if not on_cpu and not same_system:
        accelerator, submitted = family(current.hardware.accelerator), family(baseline.hardware.accelerator)
        if accelerator and submitted and accelerator != submitted:
            yield f"run on {accelerator}, submitted on {submitted}"
        count, submitted_count = current.hardware.accelerators, baseline.hardware.accelerators
        if count and submitted_count and count != submitted_count:
            yield f"run on {count} accelerators, submitted on {submitted_count}"
    if how is How.NEAREST and not current.is_cpu:
        yield from _unknown_hardware(current, baseline)
    if current.submission.get("kind") == "study":
        yield "the system is from a study, not from a submission"


def _is_cpu_run(current: RunSet, baseline: RunSet) -> bool:
    return current.is_cpu and baseline.hardware.accelerators != 0


# Size of the real data set if the current run used fewer training samples, else None
def _full_data_size(current: RunSet, baseline: RunSet) -> int | None:
    # RetinaNet ("ssd" since v2.0) is listed without a data set size: train_samples is the number of iterations in most
    # logs.
    size = data_size(current.benchmark, current.round)
    if size is None or size.train is None or not current.train_samples:
        return None
    least = _LEAST_SHARE_OF_DATA.get(current.benchmark or "", 0.99)
    return size.train if current.train_samples < least * min(size.train, baseline.train_samples or size.train) else None


# Unknown hardware in a run whose submission was selected by hardware only
def _unknown_hardware(current: RunSet, baseline: RunSet) -> Iterator[str]:
    pairs = {
        "accelerator": (family(current.hardware.accelerator), family(baseline.hardware.accelerator)),
        "number of accelerators": (current.ranks, baseline.hardware.accelerators),
    }
    unknown_current = [name for name, (value, _) in pairs.items() if not value]
    unknown_baseline = [name for name, (value, baseline_value) in pairs.items() if value and not baseline_value]
    candidates = join_names([baseline.label, *equally_near(current, baseline.label)])
    if unknown_current:
        yield f"{' and '.join(unknown_current)} of this run unknown; matches: {candidates}; specify a submission"
    if unknown_baseline:
        yield f"{' and '.join(unknown_baseline)} of {baseline.label} unknown; specify a submission"


# Notes that do not prevent the comparison
def _caveats(current: RunSet, baseline: RunSet | None, how: How) -> Iterator[str]:
    if current.score is not None and not current.score_is_official:
        count = current.score.count
        measure = "one run" if count == 1 else f"the mean of {count} runs"
        yield f"no official score ({current.missing}): compared by {measure}"
    if current.hardware.caveat:
        yield f"the system description {current.hardware.caveat}"
    if current.round_is_guess:
        yield f"round {current.round} is inferred from the date or the keys of the logs"
    yield from (flag.text for flag in current.flags)
    flagged = {flag.log for flag in current.flags}
    untimed = [run for run in current.logs if run.explanation and run.path not in flagged and current.score is not None]
    yield from (f"{run.path.name} has no time: {run.explanation}" for run in untimed)
    if baseline is None:
        return
    if current.division and baseline.division and current.division != baseline.division:
        yield f"{current.division} division against {baseline.division}, which has other rules"
    yield from score_caveats(current, baseline)
    if not same_runs(current, baseline):
        yield from _hardware_caveats(current, baseline, how)
    if current.global_batch and baseline.global_batch and current.global_batch != baseline.global_batch:
        yield f"global batch {current.global_batch:g}, submitted with {baseline.global_batch:g}"
    choices, baseline_choices = current.choices, baseline.choices
    different = [name for name in sorted({*choices} & {*baseline_choices}) if choices[name] != baseline_choices[name]]
    yield from (f"{name}: {choices[name]}, theirs {baseline_choices[name]}" for name in different)
    yield from (f"not as submitted: {deviation}" for deviation in current.deviations)
    if baseline.published is not None and baseline.published.note:
        yield f"of the published result: {baseline.published.note}"


def _hardware_caveats(current: RunSet, baseline: RunSet, how: How) -> Iterator[str]:
    has_accelerator = family(current.hardware.accelerator) is not None
    is_nearest = how is How.NEAREST
    if not has_accelerator and not is_nearest and not current.is_cpu:
        assumption = ": assumed to be the submitted hardware" if baseline.published is not None else ""
        yield f"the logs do not identify their hardware{assumption}"
    elif family(baseline.hardware.accelerator) is None and baseline.hardware.accelerators != 0:
        yield f"the hardware of {baseline.label} is unknown"
    if is_nearest and has_accelerator and current.ranks and (candidates := equally_near(current, baseline.label)):
        yield f"equally near: {join_names(candidates)}; specify a submission"


def same_runs(current: RunSet, baseline: RunSet) -> bool:
    """Return whether both sets are the same runs: equal times of all converged runs and equal qualities of all runs."""
    # Digests store minutes with nine digits.
    times = list(zip(sorted(current.minutes), sorted(baseline.minutes), strict=False))
    curves, baseline_curves = (
        sorted(
            [
                (name, [f"{value:.{DIGEST_DIGITS}g}" for value in values])
                for name, values in sorted(curve.values.items())
            ]
            for curve in run_set.curves
        )
        for run_set in (current, baseline)
    )
    return (
        bool(times)
        and (current.runs, len(current.minutes)) == (baseline.runs, len(baseline.minutes))
        and all(math.isclose(*pair, rel_tol=1e-8, abs_tol=ROUNDED_S / 60) for pair in times)
        and curves == baseline_curves
    )
