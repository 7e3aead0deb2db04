"""Compare a run's losses with runs of other seeds, and find the first step outside their band.

    from encore.results.compare.noise import noise_of
    for noise in noise_of(current, baseline):
        print(*noise.lines(), sep="\\n")

The band is a prediction interval for one further run: mean of the reference runs, plus and minus a multiple of their
standard deviation at that step, times sqrt(1 + 1/N). With this multiple, 95 % of further runs stay inside at ALL
steps. The multiple is simulated with 1,000 sets of N + 1 Gaussian curves that have the spectrum of the reference
runs' deviations (surrogate data: Theiler et al., Physica D 58, 1992). In each set, one curve is tested against the
other curves, so the result accounts for few runs, many steps and correlated steps. Unlike Gaussians, real runs have
outliers: with three or more reference runs, the multiple is large enough to keep every reference run inside the band
of the remaining runs. Error rates: docs/compare.md.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from encore.results.compare.explain import NOT_REPORTED, explain
from encore.results.compare.run_set import RunSet
from encore.results.format import count_of, join_names, percent
from encore.results.logs.metrics import Record, lines_of, record_of
from encore.results.logs.timing import MOST_POINTS, curve_of
from encore.results.published.published import DIGEST_DIGITS
from encore.results.table import grouped

Rows = NDArray[np.float64]

LEVEL = 0.95
MIN_RUNS = 3  # Minimum for a band. With two runs, 20 % of further runs were outside instead of 5 %: docs/compare.md
_SAMPLES = 1000
_MAX_STEPS = 128  # Longer curves are averaged to this number of parts
_SPAN_SHARE, _POOLED_SHARE = 32, 16  # Number of steps over span of the moving mean, and over reach of pooled spread
_LARGEST = 1e100  # Larger values have diverged; their squares may overflow
# Settings that explain lists elsewhere, but that change the training
_TRAINED = ("data.", "implementation", "nodes", "ranks")


@dataclass(frozen=True, kw_only=True)
class Series:
    """Losses or qualities of one run. ``number`` counts from 1, as in printed output."""

    number: int
    at: tuple[int, ...]  # Steps, or evaluation numbers from 1, increasing
    values: tuple[float, ...]
    epochs: tuple[int, ...] = ()
    seed: object = None
    batch: float = 0.0  # Samples per step; 0: not recorded

    def finite(self) -> "Series":
        """Return the part before the first value that is not finite."""
        good = next((n for n, value in enumerate(self.values) if not abs(value) < _LARGEST), len(self.at))
        return replace(self, at=self.at[:good], values=self.values[:good])


@dataclass(frozen=True, kw_only=True)
class Point:
    """First step outside the band. Without ``value``: the value is not finite."""

    at: int
    epoch: int | None
    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tested:
    """One run compared with the reference runs, at the steps that all of them have."""

    number: int
    at: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()  # Mean of the reference runs
    half_width: tuple[float, ...] = ()  # Half width of the band; empty without a band
    outside: int = 0  # Number of steps outside the band
    first: Point | None = None
    twin: int | None = None  # Number of a reference run with the same seed, else of one with the same first losses
    twin_until: int = 0  # Last step up to which both are equal bit for bit
    twin_differs: int | None = None  # First step at which they differ; None if one of the runs ends before
    is_identical: bool = False  # Equal at all steps of the run

    @property
    def verdict(self) -> str:
        if self.first is not None:
            return "outside"
        return "identical" if self.is_identical else "inside" if self.half_width else "no band"


@dataclass(frozen=True, kw_only=True)
class Noise:
    """One quantity, such as the loss by step, of a run set compared with another run set."""

    quantity: str
    unit: Literal["step", "evaluation"]
    tested: str  # Name of the tested run set
    reference: str
    runs: tuple[Tested, ...]
    references: int
    settings: tuple[str, ...] | None  # Settings that differ; null if the configuration of one set is unknown
    note: str = ""  # Reason for a missing band, or excluded reference runs

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "level": LEVEL,
            "runs": [{**asdict(run), "verdict": run.verdict} for run in self.runs],
        }

    def lines(self) -> Iterator[str]:
        same = "configuration not known" if self.settings is None else "no difference of configuration is known"
        differing = f"configurations differ: {join_names(self.settings, 5)}" if self.settings else same
        yield f"{self.quantity} by {self.unit}, {self.tested} against {self.reference} ({differing})"
        yield from [f"  {self.note}"] if self.note else []
        for outcome, runs in grouped(self.runs, lambda run: "; ".join(self._outcomes(run))).items():
            yield f"  run{'s' * (len(runs) > 1)} {', '.join(str(run.number) for run in runs)}: {outcome}"

    def _outcomes(self, run: Tested) -> Iterator[str]:
        steps, references = count_of(len(run.at), self.unit), count_of(self.references, "run")
        if run.twin is not None:
            twin = f"run {run.twin} of {self.reference}"
            if run.is_identical:
                yield f"identical to a run of {self.reference} at all of {steps}"
            elif run.twin_until:
                ending = "the last that both have" if run.twin_differs is None else "then different"
                yield f"identical to {twin} up to {self.unit} {run.twin_until}, {ending}"
            else:
                yield f"different from {twin}, which has the same seed, from the first {self.unit} on"
        if run.first is not None:
            epoch = f" (epoch {run.first.epoch})" if run.first.epoch is not None else ""
            position = f"first outside at {self.unit} {run.first.at}{epoch}"
            if run.first.value is None:
                yield f"{position}: not finite"
            else:
                band = f"{percent(LEVEL)} band {run.first.low:.5g} to {run.first.high:.5g} from {references}"
                yield f"{position}: {run.first.value:.5g}, {band}; outside at {run.outside} of {steps}"
        elif run.half_width:
            yield f"inside the {percent(LEVEL)} band of {references} at all of {steps}"
        elif run.at and not run.is_identical:
            distances = [abs(value - mean) for value, mean in zip(run.values, run.mean, strict=True)]
            n = distances.index(max(distances))
            yield f"furthest at {self.unit} {run.at[n]}: {run.values[n]:.5g} against {run.mean[n]:.5g}"
        elif not run.at:
            yield f"no {self.unit} in common"


def noise_of(current: RunSet, baseline: RunSet) -> list[Noise]:
    """Compare losses and qualities between the runs of two sets.

    The band is computed from the baseline's runs, or from the current runs if the baseline has too few. For two
    Encore runs, different configurations are compared as well: the first step outside the band shows a setting's
    effect.
    """
    if current.benchmark is None or current.benchmark != baseline.benchmark:
        return []
    has_settings = bool(current.hyperparameters) and bool(baseline.hyperparameters)
    differences = explain(current, baseline).differences if has_settings else ()
    settings = [
        difference.name
        for difference in differences
        if (
            difference.area in ("configuration", "hyperparameters")
            and NOT_REPORTED not in (difference.ours, difference.theirs)
        )
        or difference.name.startswith(_TRAINED)
    ]
    series, baseline_series = ({"loss": losses_of(run_set), **qualities_of(run_set)} for run_set in (current, baseline))
    if (settings or not has_settings) and not (series["loss"] and baseline_series["loss"]):
        return []
    results = []
    for quantity in (name for name in series if series[name] and baseline_series.get(name)):
        swapped = len(baseline_series[quantity]) < MIN_RUNS <= len(series[quantity])
        runs, references = (baseline_series, series) if swapped else (series, baseline_series)
        blank = Noise(
            quantity="quality" if quantity == "value" else quantity,
            unit="step" if quantity == "loss" else "evaluation",
            tested="theirs" if swapped else "yours",
            reference="yours" if swapped else baseline.label,
            runs=(),
            references=0,
            settings=tuple(dict.fromkeys(settings)) if has_settings else None,
        )
        results.append(compare_with_band(blank, runs[quantity], references[quantity]))
    return results


def compare_with_band(blank: Noise, runs: Sequence[Series], references: Sequence[Series]) -> Noise:
    """Return ``blank`` with all runs tested against the band of the usable reference runs."""
    lengths = sorted(len(reference.at) for reference in references)
    complete = [
        reference
        for reference in references
        if reference.finite() == reference and 2 * len(reference.at) >= lengths[len(lengths) // 2]
    ]
    usable = list({(reference.at, reference.values): reference for reference in complete}.values())
    excluded = len(references) - len(usable)
    reason = "much shorter, not finite, or equal to another"
    note = f"{count_of(excluded, 'run')} of {blank.reference} left out: {reason}" if excluded else ""
    if len(usable) < MIN_RUNS:
        note = f"no band: at least {MIN_RUNS} different runs of one set are required, better 6: encore run --runs 6"
    level = 1 - (1 - LEVEL) / max(len(runs), 1)
    band_runs = usable if len(usable) >= MIN_RUNS else [*usable, *references][:1]
    bands: dict[tuple[int, ...], Rows] = {}
    tested = (run_in_band(run, band_runs, blank.unit == "step", level, references, bands) for run in runs)
    return replace(blank, runs=tuple(tested), references=len(usable), note=note)


def run_in_band(
    run: Series,
    references: Sequence[Series],
    is_loss: bool,
    level: float,
    twins: Sequence[Series],
    bands: dict[tuple[int, ...], Rows],
) -> Tested:
    """Test a run against the band of ``references``. Losses are smoothed, and their spread is pooled over nearby steps.

    ``twins``: runs that it may repeat. ``bands`` caches the half widths by common steps, for further runs against the
    same references at the same level.
    """
    finite = run.finite()
    result = replace(_find_twin(run, twins, is_loss), number=run.number)
    steps, rows = align([finite, *(reference.finite() for reference in references)])
    if steps and is_loss:
        rows = _smooth(rows, max(1, len(steps) // _SPAN_SHARE))
    mean, half_widths = rows[1:].mean(0), np.zeros(0)
    if steps and len(references) > 1 and not result.is_identical:
        if steps not in bands:
            bands[steps] = half_width(rows[1:], len(steps) // _POOLED_SHARE if is_loss else 0, level)
        half_widths = bands[steps]
    values, means, widths = (tuple(row.tolist()) for row in (rows[0], mean, half_widths))
    result = replace(result, at=steps, values=values, mean=means, half_width=widths)
    beyond = np.flatnonzero(np.abs(rows[0] - mean) > half_widths * (1 + 1e-9)) if len(half_widths) else half_widths
    epochs = dict(zip(run.at, run.epochs, strict=False))
    if len(beyond):
        n = int(beyond[0])
        lower, upper = float(mean[n] - half_widths[n]), float(mean[n] + half_widths[n])
        first = Point(at=steps[n], epoch=epochs.get(steps[n]), value=float(rows[0, n]), low=lower, high=upper)
        return replace(result, outside=len(beyond), first=first)
    if len(finite.at) < len(run.at):
        step = run.at[len(finite.at)]
        return replace(result, outside=1, first=Point(at=step, epoch=epochs.get(step)))
    return result


def half_width(reference: Rows, reach: int, level: float) -> Rows:
    """Return the half width of the band per step, from runs x steps; empty if the runs do not differ."""
    count, steps = reference.shape
    spread = _spread(reference, reach)
    if not spread.all():
        return np.zeros(0)
    power = np.abs(np.fft.rfft((reference - reference.mean(0)) / spread, 2 * steps)) ** 2
    real, imaginary = np.random.default_rng(0).standard_normal((2, _SAMPLES, count + 1, steps + 1))
    samples = np.fft.irfft(np.sqrt(power.mean(0)) * (real + 1j * imaginary), 2 * steps)[..., :steps]
    widest = float(np.quantile(_max_distance(samples[:, 0], samples[:, 1:], reach), level))
    if count > 2:  # Leaving one out of two runs leaves no spread
        without = (_max_distance(reference[n], np.delete(reference, n, 0), reach) for n in range(count))
        widest = max(widest, *map(float, without))
    return np.asarray(widest * spread * math.sqrt(1 + 1 / count))


# Largest distance between a run (... x steps) and the mean of the references (... x runs x steps), in standard errors
def _max_distance(run: Rows, references: Rows, reach: int) -> Rows:
    error = _spread(references, reach) * math.sqrt(1 + 1 / references.shape[-2])
    return np.asarray((np.abs(run - references.mean(-2)) / np.where(error > 0, error, np.inf)).max(-1))


# Standard deviation over the runs per step. The mean variance within ``reach`` steps counts as one more degree of
# freedom (moderated variance: Smyth, Stat. Appl. Genet. Mol. Biol. 3, 2004). Qualities have few distinct values, so
# runs may agree by chance: the lower bound is 3 % of the median spread and 0.1 % of the mean spread.
def _spread(rows: Rows, reach: int) -> Rows:
    variance = rows.var(-2, ddof=1)
    if reach:
        total = np.cumsum(np.insert(variance, 0, 0.0, -1), -1)
        index = np.arange(variance.shape[-1])
        first, last = np.maximum(index - reach, 0), np.minimum(index + reach, index[-1]) + 1
        near = np.maximum(total[..., last] - total[..., first], 0.0) / (last - first)
        variance = (variance * (rows.shape[-2] - 1) + near) / rows.shape[-2]
    least = 1e-3 * np.median(variance, -1, keepdims=True) + 1e-6 * variance.mean(-1, keepdims=True)
    return np.asarray(np.sqrt(variance + least))


def align(runs: Sequence[Series]) -> tuple[tuple[int, ...], Rows]:
    """Return the common steps, and each run's mean value since the previous common step.

    A record is a mean since the previous record, so runs with different logging intervals are comparable.
    """
    common = sorted(set.intersection(*(set(run.at) for run in runs)))
    if len(common) > _MAX_STEPS:
        common = [common[(n + 1) * len(common) // _MAX_STEPS - 1] for n in range(_MAX_STEPS)]
    rows = np.zeros((len(runs), len(common)))
    for row, run in zip(rows, runs if common else (), strict=False):
        steps = [step for step in run.at if step <= common[-1]]
        starts = np.searchsorted(steps, [0, *common[:-1]], side="right")
        widths = np.diff(steps, prepend=0).astype(float)
        row[:] = np.add.reduceat(widths * run.values[: len(steps)], starts) / np.add.reduceat(widths, starts)
    return tuple(common), rows


# Exponentially weighted moving mean over the previous steps, as in control charts (Roberts, Technometrics 1, 1959)
def _smooth(rows: Rows, span: int) -> Rows:
    weight, total, weights, columns = 2 / (span + 1), np.zeros(len(rows)), 0.0, []
    for column in rows.T:
        total, weights = (1 - weight) * total + weight * column, (1 - weight) * weights + weight
        columns.append(total / weights)
    return np.stack(columns, -1)


# Reference run that this run repeats, and the last equal step. Qualities with few distinct values may be equal by
# chance: only complete matches count.
def _find_twin(run: Series, references: Sequence[Series], is_loss: bool) -> Tested:
    best = Tested(number=run.number)
    for reference in references:
        pairs = list(
            zip(zip(run.at, run.values, strict=True), zip(reference.at, reference.values, strict=True), strict=False)
        )
        equal = next((n for n, (value, reference_value) in enumerate(pairs) if value != reference_value), len(pairs))
        is_identical, same_seed = equal == len(run.at) > 1, run.seed is not None and run.seed == reference.seed
        until, differs = run.at[equal - 1] if equal else 0, run.at[equal] if equal < len(pairs) else None
        if (is_identical or (is_loss and (equal > 1 or same_seed))) and (best.twin is None or until > best.twin_until):
            best = replace(
                best, twin=reference.number, twin_until=until, twin_differs=differs, is_identical=is_identical
            )
    return best


# -- input files ------------------------------------------------------------------------------------------------------


def losses_of(run_set: RunSet) -> list[Series]:
    """Return the losses per experiment in an Encore run folder, if recorded in its metrics."""
    paths = run_set.folder.glob("experiment_*/metrics.jsonl") if run_set.folder else ()
    files = {int(path.parent.name[11:]): path for path in paths if path.parent.name[11:].isdecimal()}
    listed = run_set.passport.get("seeds")
    seeds = dict(enumerate(listed if isinstance(listed, list) else ()))
    series = [replace(_losses(path), number=n + 1, seed=seeds.get(n)) for n, path in sorted(files.items())]
    return [losses for losses in series if losses.at]


# Loss by step in one metrics file. A resumed run repeats steps; the last record per step counts.
def _losses(path: Path) -> Series:
    records: dict[int, Record] = {}
    batch = 0.0
    for record in filter(None, map(record_of, lines_of(path))):
        if record.kind == "start":
            batch = record.global_batch_size
            records = {step: earlier for step, earlier in records.items() if step <= record.resumed_step}
        elif record.loss is not None and record.step:
            records[record.step] = record
    steps = [records[step] for step in sorted(records)]
    return Series(
        number=1,
        at=tuple(record.step for record in steps),
        values=tuple(record.loss if record.loss is not None else math.nan for record in steps),
        epochs=tuple(record.epoch for record in steps),
        batch=batch,
    )


def qualities_of(run_set: RunSet) -> dict[str, list[Series]]:
    """Return each quality by evaluation number; empty for a digest that does not contain all evaluations."""
    curves = [curve_of(run, max_points=_MAX_STEPS**2) for run in run_set.logs] or list(run_set.curves)
    if not run_set.logs and any(len(curve.minutes) >= MOST_POINTS for curve in curves):
        return {}
    qualities: dict[str, list[Series]] = {}
    for number, curve in enumerate(curves, 1):
        for name, values in curve.values.items():
            rounded = tuple(float(f"{value:.{DIGEST_DIGITS}g}") for value in values)
            series = Series(number=number, at=tuple(range(1, len(values) + 1)), values=rounded)
            qualities.setdefault(name, []).extend([series] if values else [])
    return qualities
