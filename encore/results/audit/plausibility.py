"""Physical limits: the training speed in a log compared with the peak rate of the accelerators."""

import functools
from collections.abc import Iterator, Mapping

from encore import peaks
from encore.catalogue import read_toml
from encore.results.audit.anomalies import Anomaly
from encore.results.audit.declarations import accelerators
from encore.results.logs.run_log import RunLog
from encore.results.logs.timing import deciding, length_of
from encore.results.published.published import DATA
from encore.results.scores.score import Score


@functools.cache
def _flops() -> Mapping[str, float]:
    return read_toml(DATA / "flops.toml")


def above_peak(score: Score) -> Iterator[Anomaly]:
    """Find runs that would need more than the peak rate of their accelerators, in any precision."""
    system, count = accelerators(score)
    sheet = peaks.highest_peak(system.accelerator or "") if system is not None else None
    flops = _flops().get(score.benchmark or "")
    # SSD is RetinaNet since v2.0.
    if sheet is None or count is None or flops is None or (score.benchmark == "ssd" and (score.round or "") >= "v2.0"):
        return
    for run in score.runs:
        rate = _samples_per_second(run)
        needed = rate * flops / count
        if needed > sheet[0]:
            message = f"{rate:.4g} samples/s on {count} accelerators: {peaks.written(needed)}/s each"
            yield Anomaly(f"{message}, {needed / sheet[0]:.1f} times the peak of {sheet[1]}", run.path)


# Trained samples until the evaluation that ended the run, per second since run_start; 0 if unknown
def _samples_per_second(run: RunLog) -> float:
    point, length = deciding(run), length_of(run)
    if point is None or length is None or point.time_s is None or run.start_s is None or point.time_s <= run.start_s:
        return 0.0
    # BERT and the language models count samples, and may call them epochs.
    in_epochs = run.benchmark in ("resnet", "ssd")
    samples = point.samples or length.value * ((run.train_samples or 0.0) if in_epochs else 1.0)
    return samples / (point.time_s - run.start_s)
