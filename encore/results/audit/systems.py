"""Rules on what the runs of a set must have in common."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator

from encore.results.audit.oddities import Oddity, starting_line
from encore.results.logs.run_log import RunLog
from encore.results.scores.score import Score

_TUNED = re.compile(r"(?:opt|sgd|lars|adam|lamb)_|s_optimizer$|gradient_accumulation_steps$")
_DEFERRED = "DEFERRED"
"""Google's logs of v0.5 give some values later, under a name of their own."""


def _unlike(score: Score, what: str, value: Callable[[RunLog], str | None]) -> Iterator[Oddity]:
    """Yield the runs whose value differs from that of most of the set; None is no value."""
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
