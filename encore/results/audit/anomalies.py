"""What a rule of the audit is and what it hands out, and how times become texts and whole numbers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from encore.results.findings import Severity
from encore.results.logs.run_log import RunLog
from encore.results.scores.score import Score

# Their checkpoints may be evaluated after the run, which the rules of their rounds allow.
OFF_THE_CLOCK = frozenset({"minigo", "stable_diffusion"})
_LARGEST_S = 1e12
_DAY_S = 86400.0
_MINUTES_FROM_S = 1000.0


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One place where a rule found something; without a file it is about the whole set."""

    found: str
    path: Path | None = None
    line: int | None = None


Check = Callable[[Score], Iterator[Anomaly]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    name: str
    meaning: str  # What it finds, for the page
    severity: Severity  # The most that a finding is; the rate on public sets may lower it
    expected: str
    hint: str
    check: Check | None = None  # None: it needs other sets, and is in ``audit.audit_scores``
    in_digests: bool = False  # Whether the check looks into the digests of the public sets, which take a second to read


def per_log(check: Callable[[RunLog], Iterator[Anomaly]]) -> Check:
    """Return a check of a set that looks at each log by itself."""

    def check_set(score: Score) -> Iterator[Anomaly]:
        for run in score.runs:
            yield from check(run)

    return check_set


def milliseconds(seconds: float) -> int:
    """Return whole milliseconds of any finite number: what is beyond 30,000 years is all the same."""
    return round(max(-_LARGEST_S, min(seconds, _LARGEST_S)) * 1000)


def duration(seconds: float) -> str:
    """Return ``12.3 s``, ``75.2 min`` or ``13.7 days``."""
    if abs(seconds) < _MINUTES_FROM_S:
        return f"{seconds:.4g} s"
    return f"{seconds / 60:.4g} min" if abs(seconds) < _DAY_S else f"{seconds / _DAY_S:.4g} days"


def starting_line(run: RunLog) -> int | None:
    return run.starts[0][0] if run.starts else None
