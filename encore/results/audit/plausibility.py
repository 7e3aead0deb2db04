"""Plausible training speeds: below the peak rate of the accelerators, and near the public sets on them."""

import functools
from collections.abc import Callable, Iterator, Mapping

from encore import peaks
from encore.files import read_toml
from encore.results.audit.anomalies import Anomaly
from encore.results.audit.declarations import PRECISION, accelerators, declared_values
from encore.results.audit.kernels import BITS
from encore.results.audit.published_runs import PublicSpeed, speed_of, speed_range
from encore.results.logs.run_log import RunLog
from encore.results.logs.timing import deciding, length_of
from encore.results.published.published import DATA
from encore.results.published.systems import rounds_system
from encore.results.scores.score import Score

_PEAKS = {4: "fp4", 6: "fp8", 8: "fp8", 16: "bf16"}  # Names in peaks.toml by bits
MARGIN = 1.1  # Speed above the fastest public set; tools/planted_speeds.py measures the rates


@functools.cache
def _flops() -> Mapping[str, float]:
    return read_toml(DATA / "flops.toml")


def above_peak(score: Score) -> Iterator[Anomaly]:
    """Find runs that would need more than the peak rate of their accelerators."""
    system, count = accelerators(score)
    accelerator = (system.accelerator if system is not None else None) or ""
    flops = _flops().get(score.benchmark or "")
    # SSD is RetinaNet since v2.0.
    if count is None or flops is None or (score.benchmark == "ssd" and (score.round or "") >= "v2.0"):
        return
    # Logs of runs that did not converge may count the samples of the data set
    for run in score.converged:
        rate, sheet = _samples_per_second(run), peak_rate(accelerator, run)
        needed = rate * flops / count
        if sheet is not None and needed > sheet[0]:
            message = f"{rate:.4g} samples/s on {count} accelerators: {peaks.written(needed)}/s each"
            yield Anomaly(f"{message}, {needed / sheet[0]:.1f} times the peak of {sheet[1]}", run.path)


def peak_rate(accelerator: str, run: RunLog) -> tuple[float, str] | None:
    """Return FLOP/s and data sheet at the declared precision of linear layers, else in the fastest precision."""
    declared = declared_values(run).get(f"{PRECISION}linear")
    precision = _PEAKS.get(BITS.get(str(declared), 0), "")
    return peaks.peak_of(accelerator, precision) or peaks.highest_peak(accelerator)


# Trained samples until the evaluation that ended the run, per second since run_start; 0 if unknown
def _samples_per_second(run: RunLog) -> float:
    point, length, seconds = deciding(run), length_of(run), _seconds_to_last_evaluation(run)
    if point is None or length is None or not seconds:
        return 0.0
    # BERT and the language models count samples, and may call them epochs.
    in_epochs = run.benchmark in ("resnet", "ssd")
    samples = point.samples or length.value * ((run.train_samples or 0.0) if in_epochs else 1.0)
    return samples / seconds


def above_published(score: Score) -> Iterator[Anomaly]:
    """Find sets with a higher speed per accelerator than all public sets on the same accelerator."""
    return _compare(score, lambda rate, slowest, fastest: fastest if rate > MARGIN * fastest.rate else None)


def below_published(score: Score) -> Iterator[Anomaly]:
    """Find sets with a lower speed per accelerator than all public sets on similar systems."""
    return _compare(score, lambda rate, slowest, fastest: slowest if slowest and rate * MARGIN < slowest.rate else None)


def _compare(
    score: Score, outlier: Callable[[float, PublicSpeed | None, PublicSpeed], PublicSpeed | None]
) -> Iterator[Anomaly]:
    runs = score.converged
    if not runs:
        return
    system = accelerators(score)[0] or rounds_system(score.folder, score.round, runs[0].platform)
    lengths = [(length_of(run), _seconds_to_last_evaluation(run)) for run in runs]
    speed = speed_of(system, score.benchmark, score.round, runs[0].train_samples, runs[0].global_batch, lengths)
    if speed is None:
        return
    key, count, rate = speed
    slowest, fastest = speed_range(key, count)
    if fastest is not None and (public := outlier(rate, slowest, fastest)) is not None:
        message = f"{rate / public.rate:.2g} times the speed per accelerator of {public.name}"
        yield Anomaly(f"{count} x {key[1]}: {message} ({public.accelerators} accelerators)")


def _seconds_to_last_evaluation(run: RunLog) -> float | None:
    point = deciding(run)
    if point is None or point.time_s is None or run.start_s is None:
        return None
    return max(point.time_s - run.start_s, 0.0)
