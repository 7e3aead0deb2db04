"""Rules on runs that are unlike the other runs of their set."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from encore.results.audit.oddities import OFF_THE_CLOCK, Oddity, milliseconds, starting_line
from encore.results.logs.timing import length_of
from encore.results.scores.score import Score

_OUTLIER = 5.0
_PACE = 1.5
_APART = 1.2
_ROUND_MS = 100_000
_LEAST_RUNS = 3


def outlier(score: Score) -> Iterator[Oddity]:
    """Yield a run that took five times as long as the others, or a fifth."""
    minutes = [(run, run.minutes) for run in score.runs if run.minutes]
    for run, taken in minutes:
        others = sorted(value for other, value in minutes if other is not run)
        ratio = taken / others[len(others) // 2] if others else 1.0
        if not 1 / _OUTLIER < ratio < _OUTLIER:
            yield Oddity(f"took {ratio:.4g} times as long as the other runs", run.path)


def different_pace(score: Score) -> Iterator[Oddity]:
    """Yield a run whose epochs took much longer, or shorter, than those of the other runs."""
    if score.benchmark in OFF_THE_CLOCK:
        return
    lengths = [(run, length_of(run)) for run in score.converged]
    known = [(run, length) for run, length in lengths if length is not None and length.value > 0]
    if len(known) <= _LEAST_RUNS:
        return
    unit = Counter(length.unit for _, length in known).most_common(1)[0][0]
    paces = [(run, (run.minutes or 0.0) / length.value) for run, length in known if length.unit == unit]
    usual = statistics.median(pace for _, pace in paces)
    for run, pace in paces:
        ratio = pace / usual if usual > 0 else 1.0
        if not 1 / _PACE < ratio < _PACE:
            one = unit.split(" ")[0].rstrip("s")
            yield Oddity(f"{ratio:.4g} times the minutes per {one} of the other runs", run.path)


def edited_outlier(score: Score) -> Iterator[Oddity]:
    """Yield a dropped run, far from the counted ones, whose clock starts or stops at a round number."""
    if not score.score_minutes:
        return
    for run in score.dropped:
        ratio = (run.minutes or 0.0) / score.score_minutes
        if 1 / _APART < ratio < _APART or not run.minutes or run.start_s is None or run.stop_s is None:
            continue
        if "mlperf" not in run.dialects and 0 in (milliseconds(each) % _ROUND_MS for each in (run.start_s, run.stop_s)):
            found = f"{ratio:.4g} times the score, and run_start or run_stop is a round number"
            yield Oddity(found, run.path, starting_line(run))
