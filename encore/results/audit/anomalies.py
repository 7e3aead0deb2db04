"""Rules and anomalies of the audit, and conversion of times."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from encore.results.findings import Severity
from encore.results.logs.run_log import RunLog
from encore.results.scores.score import Score

# Their checkpoints may be evaluated after the run, as their rules allow.
OFF_THE_CLOCK = frozenset({"minigo", "stable_diffusion"})
ROUND_MS = 100_000  # Multiples are round numbers, which clocks rarely show
_LARGEST_S = 1e12
_DAY_S = 86400.0
_MINUTES_FROM_S = 1000.0


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One violation of a rule; without a file it is about the set."""

    found: str
    path: Path | None = None
    line: int | None = None


Check = Callable[[Score], Iterator[Anomaly]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    name: str
    meaning: str  # Description for the documentation
    severity: Severity  # Highest severity; lowered if the rule fires too often on public sets
    expected: str
    hint: str
    check: Check | None = None  # None: it needs other sets, and is in ``audit.audit_scores``
    in_digests: bool = False  # Whether the check looks into the digests of the public sets, which take a second to read


def per_log(check: Callable[[RunLog], Iterator[Anomaly]]) -> Check:
    """Convert a check of single logs to a check of a set."""

    def check_set(score: Score) -> Iterator[Anomaly]:
        for run in score.runs:
            yield from check(run)

    return check_set


def milliseconds(seconds: float) -> int:
    """Convert to integer milliseconds; values beyond 30,000 years are clipped."""
    return round(max(-_LARGEST_S, min(seconds, _LARGEST_S)) * 1000)


def duration(seconds: float) -> str:
    """Return ``12.3 s``, ``75.2 min`` or ``13.7 days``."""
    if abs(seconds) < _MINUTES_FROM_S:
        return f"{seconds:.4g} s"
    return f"{seconds / 60:.4g} min" if abs(seconds) < _DAY_S else f"{seconds / _DAY_S:.4g} days"


def starting_line(run: RunLog) -> int | None:
    return run.starts[0][0] if run.starts else None
