"""Compare epochs to the target with the reference convergence points (RCP) for a round, using mlperf-logging.

    from encore.results.compliance.convergence import convergence_of
    convergence = convergence_of(score)
    print(convergence.outcome, convergence.factor, convergence.explanation)

Points are runs of the reference implementation at some global batches. A submission must not need significantly
fewer epochs than the reference at its batch. If it needs fewer than the mean, its score is multiplied by the ratio.
"""

import functools
import importlib.util
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from encore.results.compliance.official import version
from encore.results.findings import ComplianceReport, Finding
from encore.results.logs.run_log import RunLog
from encore.results.rules import ROUNDS, benchmark_of, is_before
from encore.results.scores.score import Score, read_scaling
from encore.results.table import cell_text

# Earlier rounds had the points, and did not multiply scores by the factor: of v2.0 one set has a scaling.json.
_SCALED_SINCE = "v2.1"
_FIRST_ROUND = "v1.0"
FIRST_RULESET = "1.0.0"
_INFINITE = 1e9  # Epochs for a run that did not converge, as in mlperf-logging
_LARGEST_LOG = 1 << 28
_SAME_FACTOR = 1e-6
_LARGEST_FACTOR = 10  # Above it the logs count epochs where the reference counts samples, as two of v3.1 do


class Outcome(str, Enum):
    PASSED = "passed"
    TOO_FEW = "too few epochs"
    NO_POINT = "no reference point"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One reference convergence point: epochs of the reference at a global batch."""

    batch: float
    mean: float
    least: float  # The fewest epochs, as a mean, that chance explains at a level of 5 %


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """Comparison of a set's epochs to the target with the points of its round."""

    folder: Path
    round: str | None
    benchmark: str | None
    outcome: Outcome
    explanation: tuple[str, ...]
    unit: str = "epochs"
    global_batch: float | None = None
    mean: float | None = None  # Mean of the set's runs without the fastest and the slowest
    point: Point | None = None  # Reference point for the comparison
    between: tuple[Point, ...] = ()  # The two points used for interpolation
    # Factor for the raw score, at least 1. With too few epochs: factor if a review accepts the set.
    factor: float | None = None


def convergence_of(score: Score) -> Convergence | None:
    """Compare a set with its round's points; None before v1.0, in the open division, or with too few runs."""
    if score.round not in ROUNDS or is_before(score.round, _FIRST_ROUND):
        return None
    if len(score.runs) < 3 or any(run.division == "open" for run in score.runs):
        return None
    # Keep mlperf-logging from writing to the terminal: it logs without a handler, and so installs one.
    root, silent = logging.getLogger(), logging.NullHandler()
    root.addHandler(silent)
    try:
        return _compare(score, f"{score.round.removeprefix('v')}.0")
    except Exception as error:  # Any exception of the library on a log that it cannot read
        return _not_checked(score, f"mlperf-logging's checker failed on these logs: {type(error).__name__}: {error}")
    finally:
        root.removeHandler(silent)


def report_of(convergence: Convergence) -> ComplianceReport:
    """Convert the comparison to a report on the set's folder."""
    return ComplianceReport(
        path=convergence.folder,
        ruleset=f"{(convergence.round or '').removeprefix('v')}.0",
        ruleset_found="that of the set's logs",
        checker=f"the reference convergence points of {version()}",
        findings=(*_point_finding(convergence), *_factor_finding(convergence)),
    )


def _point_finding(convergence: Convergence) -> Iterator[Finding]:
    if convergence.outcome in (Outcome.TOO_FEW, Outcome.NO_POINT):
        yield Finding(
            line=None,
            rule=f"{version()}, rcp_checker: a reference convergence point for the set's global batch",
            expected=f"not significantly fewer {convergence.unit} to the target than the reference",
            found="; ".join(convergence.explanation),
            hint="run at a batch of the reference, with its hyperparameters; a review may accept the set as it is",
            # Every round accepted such sets: the review bypasses the checker.
            severity="warning",
        )


def _factor_finding(convergence: Convergence) -> Iterator[Finding]:
    submitted, computed = read_scaling(convergence.folder).factor, convergence.factor
    if convergence.round is None or is_before(convergence.round, _SCALED_SINCE) or computed is None:
        return
    if submitted is None and convergence.outcome is not Outcome.PASSED:
        return
    if abs((submitted or 1.0) - computed) > _SAME_FACTOR:
        yield Finding(
            line=None,
            rule=f"{version()}, rcp_checker: scaling.json",
            expected=f"scaling.json with a factor of {computed:.6f}" if computed > 1 else "no scaling.json",
            found=f"a factor of {submitted:.6f}" if submitted is not None else "no scaling.json",
            hint="let mlperf-logging's package checker write it: encore archive; the points of a round do change",
            severity="warning",
        )


def _not_checked(score: Score, reason: str) -> Convergence:
    return _outcome(score, Outcome.NOT_CHECKED, [reason[:300]])


def _outcome(score: Score, outcome: Outcome, explanation: Iterable[str], **figures: Any) -> Convergence:
    return Convergence(
        folder=score.folder,
        round=score.round,
        benchmark=score.benchmark,
        outcome=outcome,
        explanation=tuple(explanation),
        **figures,
    )


def points_folder() -> Path:
    """Return the folder of the points in the installed mlperf-logging, with one folder per round."""
    spec = importlib.util.find_spec("mlperf_logging.rcp_checker")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("mlperf_logging.rcp_checker")
    return Path(spec.origin).parent


@functools.cache
def benchmarks_with_points(ruleset: str) -> tuple[str, ...]:
    """Return the benchmarks for which the installed mlperf-logging has points of the round."""
    files = (points_folder() / f"training_{ruleset}").glob("rcps_*.json")
    return tuple(sorted(file.stem.removeprefix("rcps_") for file in files))


def _compare(score: Score, ruleset: str) -> Convergence:
    benchmark = score.benchmark or ""
    if benchmark not in benchmarks_with_points(ruleset):
        available = ", ".join(benchmarks_with_points(ruleset)) or "none"
        return _not_checked(
            score, f"{version()} has no points for {benchmark or 'its benchmark'} in {score.round}: {available}"
        )
    batch: Any
    batch, lengths = _logged_lengths(score.runs, benchmark)
    if lengths is None:
        files = [run.path for run in score.runs]
        if any(file.suffix == ".gz" or file.stat().st_size > _LARGEST_LOG for file in files):
            return _not_checked(score, "a log is compressed or larger than 256 MiB: mlperf-logging reads plain files")
        batch, lengths = _read_lengths([str(file) for file in files], ruleset, benchmark)
    if not _is_number(batch) or batch <= 0:
        return _not_checked(score, "the logs do not agree on a global_batch_size")
    if lengths is None or sum(length == _INFINITE for length in lengths) > _dropped_runs(benchmark):
        return _not_checked(score, "too many runs did not converge")
    if not all(_is_number(length) and length > 0 for length in lengths):
        return _not_checked(score, "an evaluation has no number of epochs or samples")
    return _compare_with_point(_checker(ruleset, benchmark), score, float(batch), lengths)


# Global batch, and epochs or samples to the target per run, as mlperf-logging reads them. None if missing in a log's
# summary: mlperf-logging then reads the logs, which is four times slower.
def _logged_lengths(runs: Sequence[RunLog], benchmark: str) -> tuple[float | None, list[float] | None]:
    batches = {run.global_batch for run in runs}
    lengths = [_length(run, benchmark) for run in runs]
    logged_lengths = [length for length in lengths if length is not None]
    epoch_says_nothing = benchmark == "bert" and all(length in (0, 1, _INFINITE) for length in logged_lengths)
    if len(batches) > 1 or len(logged_lengths) < len(lengths) or epoch_says_nothing:
        return None, None
    return batches.pop(), logged_lengths


# Epochs or samples of the last evaluation before run_stop; later evaluations are ignored.
def _length(run: RunLog, benchmark: str) -> float | None:
    if benchmark == "stable_diffusion" or not run.quality:
        return None
    if run.status != "success":
        return _INFINITE
    stop = run.stops[-1][0] if run.stops else math.inf
    last = next((evaluation for evaluation in reversed(run.quality) if evaluation.line < stop), run.quality[-1])
    if (info := benchmark_of(benchmark)) and info.samples_count:
        return last.samples
    return None if last.epoch is None else round(last.epoch, 3)


# Global batch, and epochs or samples to the target per run, read by mlperf-logging
def _read_lengths(files: Sequence[str], ruleset: str, benchmark: str) -> tuple[Any, list[Any] | None]:
    from mlperf_logging.rcp_checker.rcp_checker import get_submission_epochs as read

    batch, lengths, _ = read(files, ruleset, False)
    if benchmark == "bert" and lengths and all(length in (0, 1, _INFINITE) for length in lengths):
        # Such logs have epoch 1 in all evaluations, and the samples in train_samples (--rcp-bert-train-samples).
        batch, lengths, _ = read(files, ruleset, True)
    return batch, lengths


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@functools.lru_cache(maxsize=32)
def _checker(ruleset: str, benchmark: str) -> Any:
    from mlperf_logging.benchmark_meta import get_result_file_counts
    from mlperf_logging.rcp_checker import rcp_checker

    # dlrm has points from v1.0 to v2.1, but was removed from the checker's table of run counts.
    rcp_checker.submission_runs["training"].setdefault(benchmark, get_result_file_counts("training")[benchmark])
    return rcp_checker.RCP_Checker("training", ruleset, benchmark, False)


# Choose the point as mlperf-logging's ``check_directory`` does: same batch, interpolated, or smallest batch.
def _compare_with_point(checker: Any, score: Score, batch: float, lengths: list[float]) -> Convergence:
    table = "pruned_rcps"
    record = checker._find_rcp(batch, table)
    between: tuple[Point, ...] = ()
    source = f"the reference was run at a global batch of {batch:g}"
    if record is None:
        below, above = checker._find_top_min_rcp(batch, table), checker._find_bottom_max_rcp(batch, table)
        if above is None:
            largest = (
                f"the largest batch of the reference is {below['BS']:g}" if below else "the reference has no batch"
            )
            reason = f"{largest}: the round requires a reference run at {batch:g}"
            return _outcome(score, Outcome.NO_POINT, [reason], global_batch=batch)
        if below is None:
            record = checker._find_min_rcp(table)
            source = (
                f"the smallest batch of the reference is {record['BS']:g}: compared with it, the set's is {batch:g}"
            )
        else:
            record = checker._create_interp_rcp(batch, below, above)[1]
            between = (_point(below), _point(above))
            source = f"between the reference's batches {below['BS']:g} and {above['BS']:g}, interpolated for {batch:g}"
    passed, factor = checker._eval_submission_record(record, list(lengths), "")
    point, dropped = _point(record), _dropped_runs(score.benchmark)
    remaining = sorted(lengths)[dropped : len(lengths) - dropped]
    mean = math.fsum(remaining) / len(remaining) if remaining else math.nan
    if factor > _LARGEST_FACTOR:
        counts = f"the logs count {cell_text(mean)} to the target where the reference counts {cell_text(point.mean)}"
        return _not_checked(score, f"{counts}: another unit")
    info = benchmark_of(score.benchmark)
    unit = info.points_in if info else "epochs"
    return _outcome(
        score,
        Outcome.PASSED if passed else Outcome.TOO_FEW,
        (source, *_conclusions(mean, point, unit, float(factor), bool(passed))),
        unit=unit,
        global_batch=batch,
        mean=mean,
        point=point,
        between=between,
        factor=float(factor),
    )


def _point(record: Mapping[str, Any]) -> Point:
    mean = float(record["RCP Mean"])
    # "Max Speedup" and not "Min Epochs": the allowance for llama31_405b is only in the former.
    return Point(batch=float(record["BS"]), mean=mean, least=mean / float(record["Max Speedup"]))


def _dropped_runs(benchmark: str | None) -> int:
    info = benchmark_of(benchmark)
    return info.dropped if info else 1


def _conclusions(mean: float, point: Point, unit: str, factor: float, passed: bool) -> Iterator[str]:
    limit = f"a mean of fewer than {cell_text(point.least)} would be too few"
    yield f"{cell_text(mean)} {unit} to the target, the reference {cell_text(point.mean)}; {limit}"
    if not passed:
        yield f"fewer {unit} than chance explains at a level of 5 %: the package checker does not accept the set"
        yield f"a review that does multiplies the score by {cell_text(point.mean)} / {cell_text(mean)} = {factor:.4f}"
    elif factor > 1:
        yield f"the score is multiplied by {cell_text(point.mean)} / {cell_text(mean)} = {factor:.4f}"
    else:
        yield f"no fewer {unit} than the reference: the score stays as it is"
