"""Scores sets of runs by the rules of their round.

    from encore.results.score import score_folder
    for score in score_folder("results/dgxa100/resnet"):
        print(score.round, score.benchmark, score.score_minutes, score.missing)

A score is the mean of the runs without the fastest and the slowest (training_rules.adoc, benchmark results).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from encore.errors import EncoreError
from encore.results.rules import Rule, rule_for
from encore.results.run_log import Reason, RunLog, read_run

_RESULT = re.compile(r"result.*\.txt(\.gz)?", re.IGNORECASE)
_OTHER_LOG = re.compile(r".*\.(txt|log|out)(\.gz)?", re.IGNORECASE)
_OUTLIER = 10


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of one set of runs, or what it lacks."""

    folder: Path
    round: str | None
    benchmark: str | None
    runs: tuple[RunLog, ...]
    required: int | None
    """Runs the round asks for; None where round or benchmark is not known."""
    counted: tuple[RunLog, ...] = ()
    dropped: tuple[RunLog, ...] = ()
    score_minutes: float | None = None
    missing: str = ""
    """Why there is no score, in words."""
    flags: tuple[str, ...] = ()

    @property
    def converged(self) -> tuple[RunLog, ...]:
        """The runs that have a time."""
        return tuple(run for run in self.runs if run.converged)

    def as_json(self) -> dict[str, object]:
        """Return the score as plain data; the fields are described in docs/results.md."""
        counted, dropped = set(map(id, self.counted)), set(map(id, self.dropped))
        return {
            "folder": str(self.folder),
            "round": self.round,
            "benchmark": self.benchmark,
            "score_minutes": _rounded(self.score_minutes),
            "required": self.required,
            "runs": [
                {**_run_as_json(run), "counted": id(run) in counted, "dropped": id(run) in dropped} for run in self.runs
            ],
            "counted": [run.path.name for run in self.counted],
            "dropped": [run.path.name for run in self.dropped],
            "converged": len(self.converged),
            "missing": self.missing,
            "flags": list(self.flags),
        }


def _rounded(minutes: float | None) -> float | None:
    """Round to the millionth of a minute: the rest is what floating point makes of seconds since 1970."""
    return None if minutes is None else round(minutes, 6)


def _run_as_json(run: RunLog) -> dict[str, object]:
    return {
        "file": run.path.name,
        "minutes": _rounded(run.minutes),
        "reason": run.reason.value if run.reason else None,
        "explanation": run.explanation,
        "elapsed_minutes": _rounded(run.elapsed_minutes),
        "quality": dict(run.best_quality),
        "epochs": run.epochs,
        "seeds": list(run.seeds),
        "flags": list(run.flags),
    }


def score_folder(path: str | PathLike[str], round_: str | None = None) -> list[Score]:
    """Score every set of logs at or below ``path``: a file, a folder of results, or a submission tree."""
    root = Path(path)
    if not root.exists():
        raise EncoreError(f"there is no {root}", expected="a folder of result files", remedy="check the path")
    scores = [score for folder, files in find_sets(root) for score in _score_files(folder, files, round_)]
    if not scores:
        raise EncoreError(
            f"no MLPerf log in {root}",
            expected="result_0.txt, result_1.txt ... with :::MLLOG, :::MLL or :::MLPv0.5.0 lines",
            remedy="name the folder that holds the result files of one benchmark, or a folder above it",
        )
    return scores


def find_sets(root: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yield folders with result files, each with its files in order of their numbers.

    Where no file is named like a result, any log will do, but not below a folder that has results: those are
    raw logs of the same runs.
    """
    if root.is_dir():
        yield from _sets_below(root, True, set())
    else:
        yield root.parent, [root]


def _sets_below(root: Path, any_log: bool, seen: set[Path]) -> Iterator[tuple[Path, list[Path]]]:
    real = root.resolve()
    if real in seen:
        return
    seen.add(real)
    try:
        entries = sorted(root.iterdir())
    except OSError as error:
        raise EncoreError(f"cannot read {root}: {error.strerror}", remedy="check the folder's permissions") from error
    files = [entry for entry in entries if entry.is_file()]
    named = [entry for entry in files if _RESULT.fullmatch(entry.name)]
    found = named or [entry for entry in files if any_log and _OTHER_LOG.fullmatch(entry.name)]
    if found:
        yield root, sorted(found, key=_natural)
    if named and (root / "run.json").is_file():
        # Encore's own run folder: what is deeper are the parts that its result files were made of.
        return
    for entry in entries:
        if entry.is_dir():
            yield from _sets_below(entry, any_log and not named, seen)


def score_runs(folder: Path, runs: Sequence[RunLog]) -> Score:
    """Score the runs of one benchmark and round, in the order of their files."""
    round_, benchmark, batch = _common(runs)
    rule = rule_for(round_, benchmark, batch)
    score = Score(
        folder=folder,
        round=round_,
        benchmark=benchmark,
        runs=tuple(runs),
        required=rule.runs if rule else None,
        flags=(*_outliers(runs), *_duplicates(runs)),
    )
    if rule is None:
        return replace(score, missing=_no_rule(runs, round_, benchmark))
    return _apply(rule, score)


def _apply(rule: Rule, score: Score) -> Score:
    runs, converged = score.runs, score.converged
    if len(runs) < rule.runs:
        lacking = rule.runs - len(runs)
        missing = f"{len(runs)} of {rule.runs} runs: {lacking} more needed"
        return replace(score, missing=missing)
    if rule.first_converging:
        if len(converged) < rule.first_converging:
            missing = f"{len(converged)} runs converged, {rule.first_converging} must"
            return replace(score, missing=missing)
        return _olympic(rule, score, converged[: rule.first_converging], 0)
    missed = len(runs) - len(converged)
    broken = [run for run in runs if run.reason not in _MISSED and not run.converged]
    if broken:
        names = ", ".join(f"{run.path.name} ({run.explanation})" for run in broken)
        return replace(score, missing=f"not to be judged: {names}")
    if missed > rule.may_miss:
        missing = f"{missed} runs missed the target; {rule.round} lets {rule.may_miss} of {rule.runs} do so"
        return replace(score, missing=missing)
    return _olympic(rule, score, converged, missed)


_MISSED = frozenset({Reason.ABORTED, Reason.TARGET_MISSED})
"""What counts as a run that did not converge; anything else is a log that says nothing about the run."""


def _olympic(rule: Rule, score: Score, runs: Sequence[RunLog], missed: int) -> Score:
    """Return the mean without the fastest and the slowest; runs that missed the target are the slowest."""
    ordered = sorted(runs, key=lambda run: run.minutes or 0.0)
    fastest = ordered[: rule.dropped_each_side]
    slowest_left = max(rule.dropped_each_side - missed, 0)
    counted = ordered[rule.dropped_each_side : len(ordered) - slowest_left]
    if not counted:
        return replace(score, missing="no run is left after dropping the fastest and the slowest")
    not_converged = [run for run in score.runs if not run.converged] if missed else []
    dropped = [*fastest, *ordered[len(ordered) - slowest_left :], *not_converged]
    minutes = math.fsum(run.minutes for run in counted if run.minutes is not None) / len(counted)
    return replace(score, counted=tuple(counted), dropped=tuple(dropped), score_minutes=minutes)


def _score_files(folder: Path, files: list[Path], round_: str | None) -> Iterator[Score]:
    sets: dict[tuple[str | None, str | None], list[RunLog]] = {}
    strays: list[RunLog] = []
    for file in files:
        run = read_run(file, round_)
        if run.reason in (Reason.NO_EVENTS, Reason.UNREADABLE):
            if _RESULT.fullmatch(file.name):
                strays.append(run)
            continue
        sets.setdefault((run.round, run.benchmark), []).append(run)
    if len(sets) == 1:
        # An empty or unreadable result file among good ones is a run of this set that cannot be judged.
        runs = next(iter(sets.values()))
        yield score_runs(folder, sorted([*runs, *strays], key=lambda run: _natural(run.path)))
        return
    for runs in sets.values():
        yield score_runs(folder, runs)
    if strays and not sets:
        yield score_runs(folder, strays)


def _common(runs: Sequence[RunLog]) -> tuple[str | None, str | None, float | None]:
    events = [run for run in runs if run.events]
    first = events[0] if events else None
    if first is None:
        return None, None, None
    return first.round, first.benchmark, first.global_batch


def _duplicates(runs: Sequence[RunLog]) -> Iterator[str]:
    """Report the same log under a second name: public sets have that, so it is not refused."""
    seen: dict[tuple[float, float], str] = {}
    for run in runs:
        if run.start_s is None or run.stop_s is None:
            continue
        first = seen.setdefault((run.start_s, run.stop_s), run.path.name)
        if first != run.path.name:
            yield f"{run.path.name} is the same run as {first}, to the millisecond"


def _no_rule(runs: Sequence[RunLog], round_: str | None, benchmark: str | None) -> str:
    if not any(run.events for run in runs):
        return "; ".join(sorted({f"{run.path.name}: {run.explanation}" for run in runs}))
    if benchmark is None:
        return "the logs do not say which benchmark they are of"
    if round_ is None:
        return f"the round is not known: {next(run.round_found for run in runs if run.events)}"
    return f"{round_} had no {benchmark}"


def _outliers(runs: Sequence[RunLog]) -> Iterator[str]:
    for run in runs:
        others = [other.minutes for other in runs if other is not run and other.minutes is not None]
        if run.minutes is None or not others:
            continue
        ratio = run.minutes / sorted(others)[len(others) // 2]
        if ratio >= _OUTLIER or ratio <= 1 / _OUTLIER:
            times = f"{ratio:.0f}" if ratio >= 1 else f"{ratio:.2g}"
            yield f"{run.path.name} took {times} times as long as the other runs"


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """Return a key that sorts result_2 before result_10."""
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts]
