"""Rules on the evaluations of one log."""

from __future__ import annotations

from collections.abc import Iterator

from encore.results.audit.oddities import OFF_THE_CLOCK, Oddity, in_words
from encore.results.logs.run_log import RunLog
from encore.results.rules import BLEU_BENCHMARKS

_SLACK_S = 1.0
_UNBOUNDED = ("perplexity", "entropy", "loss", "FID")
"""Parts of the units of targets that are no fractions."""
_PERCENT = 100.0


def target_after_stop(run: RunLog) -> Iterator[Oddity]:
    """Yield a log whose target was met by no evaluation before run_stop, but by one after it."""
    if run.stop_s is None or not run.targets or not run.converged or run.benchmark in OFF_THE_CLOCK:
        return
    met = [point for point in run.quality if all(target.met_by(point.values) for target in run.targets)]
    times = [point.time_s for point in met if point.time_s is not None]
    if met and len(times) == len(met) and min(times) > run.stop_s + _SLACK_S:
        first = min(met, key=lambda point: point.time_s or 0.0)
        yield Oddity(f"{in_words(min(times) - run.stop_s)} after run_stop", run.path, first.line)


def quality_units(run: RunLog) -> Iterator[Oddity]:
    """Yield a quality outside of what its metric can be, such as per cent in place of a fraction."""
    most = _PERCENT if run.benchmark in BLEU_BENCHMARKS else 1.0
    for target in run.targets:
        values = [(point.values[target.name], point.line) for point in run.quality if target.name in point.values]
        if any(unit in target.unit for unit in _UNBOUNDED):
            wrong = [each for each in values if each[0] < 0]
        elif target.higher_is_better:
            wrong = [each for each in values if not 0 <= each[0] <= most]
        else:
            # A word error rate may begin above 1, and ends below it.
            wrong = [each for each in values if each[0] < 0] or (values[-1:] if values and min(values)[0] > 1 else [])
        if wrong:
            percent = ": per cent?" if 1 < wrong[0][0] <= _PERCENT else ""
            yield Oddity(f"{wrong[0][0]:g} for {target.unit}{percent}", run.path, wrong[0][1])
