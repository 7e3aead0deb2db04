"""Rules on the runs and files of a set: what they have in common, which is unlike the others, which is missing."""

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator

from encore.results.audit.oddities import OFF_THE_CLOCK, Oddity, milliseconds, starting_line
from encore.results.logs.run_log import RunLog
from encore.results.logs.timing import length_of
from encore.results.scores.score import Score
from encore.results.words import count_of

_TUNED = re.compile(r"(?:opt|sgd|lars|adam|lamb)_|s_optimizer$|gradient_accumulation_steps$")
_DEFERRED = "DEFERRED"  # Google's logs of v0.5 give some values later, under a name of their own


# Yield the runs whose value differs from that of most of the set; None is no value.
def _unlike(score: Score, what: str, value: Callable[[RunLog], str | None]) -> Iterator[Oddity]:
    known = [(run, text) for run in score.runs if run.events and (text := value(run))]
    if len({text for _, text in known}) < 2:
        return
    usual = Counter(text for _, text in known).most_common(1)[0][0]
    for run, text in known:
        if text != usual:
            yield Oddity(f"{what} {text}, in most runs of the set {usual}", run.path, None)


def different_system(score: Score) -> Iterator[Oddity]:
    """Yield runs that name another system, submitter or division than most of the set."""
    yield from _unlike(score, "submission_platform", lambda run: run.platform)
    yield from _unlike(score, "submission_org", lambda run: run.org)
    yield from _unlike(score, "submission_division", lambda run: run.division)


def different_batch(score: Score) -> Iterator[Oddity]:
    """Yield runs with another global batch than most of the set."""
    yield from _unlike(
        score, "global batch", lambda run: f"{run.global_batch:g}" if run.global_batch is not None else None
    )


def different_hyperparameters(score: Score) -> Iterator[Oddity]:
    """Yield runs with other optimizer settings than most of the set."""
    keys = dict.fromkeys(key for run in score.runs for key in run.hyperparameters if _TUNED.match(key))
    for key in keys:
        yield from _unlike(score, key, lambda run, key=key: _value(run, key))  # type: ignore[misc]


def _value(run: RunLog, key: str) -> str | None:
    if key not in run.hyperparameters:
        return None
    text = json.dumps(run.hyperparameters[key], sort_keys=True)
    return None if _DEFERRED in text else text


def different_program(score: Score) -> Iterator[Oddity]:
    """Yield runs whose run_start was logged from another line of the program than in most of the set."""
    for oddity in _unlike(score, "run_start was logged from", lambda run: run.source):
        run = next(each for each in score.runs if each.path == oddity.path)
        yield Oddity(oddity.found, oddity.path, starting_line(run))


def different_format(score: Score) -> Iterator[Oddity]:
    """Yield runs whose lines are in another dialect than those of most of the set."""
    yield from _unlike(score, "lines in the dialect", lambda run: " and ".join(sorted(run.dialects)))


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
