"""Rules on the files of a set and on damage in them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from encore.results.audit.oddities import Oddity
from encore.results.logs.run_log import RunLog
from encore.results.scores.score import Score
from encore.results.words import count_of

_SHOWN = 8


def surplus_files(score: Score) -> Iterator[Oddity]:
    """Yield a set with more runs than the round scores: the best ones can be chosen from it."""
    if score.required is not None and len(score.runs) > score.required:
        yield Oddity(count_of(len(score.runs), "result file"))


def missing_files(score: Score) -> Iterator[Oddity]:
    """Yield a set with too few runs for a score."""
    if score.required is not None and len(score.runs) < score.required:
        yield Oddity(count_of(len(score.runs), "result file"))


def skipped_numbers(score: Score) -> Iterator[Oddity]:
    """Yield a set whose files are numbered with gaps, as if some had been taken out."""
    numbers = []
    for run in score.runs:
        match = re.fullmatch(r"result_(\d{1,6})\.txt(\.gz)?", run.path.name, re.ASCII)
        if match is None:
            return
        numbers.append(int(match[1]))
    if not numbers:
        return
    gaps = sorted(set(range(min(min(numbers), 1), max(numbers))) - set(numbers))
    if gaps:
        more = f" and {len(gaps) - _SHOWN} more" if len(gaps) > _SHOWN else ""
        yield Oddity(f"no result_ file with the number {', '.join(map(str, gaps[:_SHOWN]))}{more}")


def odd_name(score: Score) -> Iterator[Oddity]:
    """Yield the files that are named differently from most of the set."""
    forms = [re.sub(r"\d+", "0", run.path.name) for run in score.runs]
    if len(set(forms)) < 2:
        return
    usual = Counter(forms).most_common(1)[0][0]
    for run, form in zip(score.runs, forms, strict=True):
        if form != usual:
            yield Oddity(f"most files are named like {usual}", run.path)


def empty_file(run: RunLog) -> Iterator[Oddity]:
    """Yield a result file without any event."""
    if run.events == 0:
        yield Oddity(run.explanation or "no MLPerf event", run.path)


def damaged_events(run: RunLog) -> Iterator[Oddity]:
    """Yield a log with damaged events other than those that give the time."""
    if run.damaged_events:
        harmless = "; the time is not touched" if run.minutes is not None else ""
        yield Oddity(f"{count_of(run.damaged_events, 'damaged event')}{harmless}", run.path)


def no_status(run: RunLog) -> Iterator[Oddity]:
    """Yield a log whose run_stop does not say whether the run succeeded."""
    if run.stops and run.status is None:
        yield Oddity("success was inferred from the evaluations", run.path, run.stops[0][0])
