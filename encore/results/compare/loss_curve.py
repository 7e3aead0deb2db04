"""Decide whether the training losses of runs, which may be unfinished, are those of a submission or of other runs.

    from encore.results.compare.loss_curve import loss_verdict
    print(loss_verdict(current, baseline))

The range that all tested runs have trained is divided into PARTS parts of equally many samples. For each part, the mean
log losses of the tested runs are compared with those of the reference runs: a t test with the variance between the
reference runs, plus TOLERANCE, the standard deviation between public sets with equal hyperparameters but different
code. Bonferroni's correction over the parts keeps false alarms near 1 %. Measured error rates: docs/compare.md.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from encore.results.compare.expected import LossVerdict
from encore.results.compare.noise import losses_of
from encore.results.compare.run_set import LossCurve, RunSet
from encore.results.format import count_of

Numbers = NDArray[np.float64]

PARTS = 4
LEVEL = 0.997  # Losses have more outliers than a normal distribution: 1 % of false alarms were measured
TOLERANCE = 0.006  # In log loss: 0.6 % of the loss
MIN_REFERENCES = 3
_MIN_RECORDS = 4  # Losses of each run in the compared range
CAUSES = {
    "above": "a higher or lower learning rate, a missing warm-up, or another batch size",
    "below": "a missing warm-up, repeated or easier samples, other initial weights, or another batch size",
}


def loss_verdict(current: RunSet, baseline: RunSet) -> LossVerdict | None:
    """Compare the losses of two run sets; None if one has none, or the benchmarks differ."""
    runs, references = loss_curves(current), loss_curves(baseline)
    if current.benchmark != baseline.benchmark or not runs or not references:
        return None
    return compare_losses(runs, references)


def loss_curves(run_set: RunSet) -> list[LossCurve]:
    """Return the losses by samples, of each experiment of an Encore run, or of each log."""
    curves: list[LossCurve] = [
        ([step * batch for step in run.at], run.values)
        for run in losses_of(run_set)
        if (batch := run.batch or run_set.global_batch)
    ]
    return curves or list(run_set.losses)


def compare_losses(runs: Sequence[LossCurve], references: Sequence[LossCurve]) -> LossVerdict:
    """Compare loss curves up to the last sample that all ``runs`` have trained."""
    samples = min(curve[0][-1] for curve in runs)
    usable = [curve for curve in references if curve[0][-1] >= samples]
    edges = np.linspace(0, samples, PARTS + 1)
    counts = f"{count_of(len(runs), 'run')} against {len(usable)}"
    if len(usable) < MIN_REFERENCES:
        text = f"{counts}; at least {MIN_REFERENCES} must have trained {samples:,.0f} samples"
        return LossVerdict(verdict="not enough data", runs=len(runs), references=len(usable), text=text)
    if any(np.searchsorted(curve[0], samples, side="right") < _MIN_RECORDS for curve in (*runs, *usable)):
        text = f"fewer than {_MIN_RECORDS} losses in {samples:,.0f} samples"
        return LossVerdict(verdict="not enough data", runs=len(runs), references=len(usable), text=text)
    ours, theirs = (np.array([_part_means(curve, edges) for curve in curves]) for curves in (runs, usable))
    theirs = theirs[np.isfinite(theirs).all(1)]
    differences, limits = ours.mean(0) - theirs.mean(0), _limits(theirs, len(runs))
    beyond = np.flatnonzero(~(np.abs(differences) <= limits))
    if len(beyond):
        text = f"{counts}: {_difference_text(differences, limits, edges, int(beyond[0]))}"
    else:
        text = f"{counts} in {samples:,.0f} samples; a difference of {math.expm1(limits[-1]):.1%} would show"
    return LossVerdict(
        verdict="differs" if len(beyond) else "matches",
        runs=len(runs),
        references=len(usable),
        samples=float(samples),
        differences=tuple(value if math.isfinite(value) else None for value in differences.tolist()),
        limits=tuple(map(float, limits)),
        text=text,
    )


def _difference_text(differences: Numbers, limits: Numbers, edges: Numbers, part: int) -> str:
    difference, end = float(differences[part]), f"{edges[part + 1]:,.0f} samples"
    if not math.isfinite(difference):
        return f"not finite within {end}"
    side = "below" if difference < 0 else "above"
    limit = f"more than {math.expm1(limits[part]):.1%}"
    return f"{abs(math.expm1(difference)):.1%} {side} up to {end}, {limit}; possible causes: {CAUSES[side]}"


# Smallest significant difference of the mean of ``runs`` runs and the mean of the references (runs x parts)
def _limits(references: Numbers, runs: int) -> Numbers:
    from scipy.special import stdtrit

    count = len(references)
    variance = references.var(0, ddof=1) * (1 / runs + 1 / count)
    total = variance + TOLERANCE**2
    # Welch and Satterthwaite: the tolerance is known, and does not limit the degrees of freedom.
    freedom = (count - 1) * (total / np.maximum(variance, 1e-12)) ** 2
    return np.asarray(stdtrit(freedom, 1 - (1 - LEVEL) / 2 / PARTS) * np.sqrt(total))


# Logarithm of the mean loss in each part; a record is the mean since the previous one
def _part_means(curve: LossCurve, edges: Numbers) -> Numbers:
    samples, losses = np.array([0.0, *curve[0]]), np.array(curve[1])
    total = np.concatenate([[0.0], np.cumsum(np.diff(samples) * losses)])
    means = np.diff(np.interp(edges, samples, total)) / np.diff(edges)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.log(means))
