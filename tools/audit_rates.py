"""Measure how often each rule of the audit fires on the public sets, and which fakes made of them it finds.

    python -m tools.audit_rates training_results_v0.5 ... training_results_v5.1

writes encore/results/data/audit_rates.json. Each DIR is a checkout of one round. A log that a later round has again
is no copy: the rules allow that.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from encore.results.audit.judge import audit_path, audit_score
from encore.results.audit.rates import FILE
from encore.results.audit.rules import RULES
from encore.results.run_log import RunLog
from encore.results.score import Score, score_runs

EXAMPLES = 3
LEAST_RUNS = 3
LATE_S = 600.0
STRETCH = 1.18
ERRORS = {rule.name for rule in RULES if rule.severity == "error"}

Change = Callable[[float], float]


def late(run: RunLog) -> RunLog:
    """The log with run_start 10 minutes later, or a quarter of the run where that is less."""
    start, stop = run.start_s or 0.0, run.stop_s or 0.0
    moved = start + min(LATE_S, (stop - start) / 4)
    return replace(run, start_s=moved, starts=((run.starts[0][0], moved),), minutes=(stop - moved) / 60)


def late_and_cut(run: RunLog) -> RunLog:
    """The same, without the training events and evaluations before the new run_start."""
    moved = late(run)
    start = moved.start_s or 0.0
    phases = tuple(phase for phase in run.phases if phase.time_s >= start or phase.name.startswith(("init", "run")))
    quality = tuple(point for point in run.quality if point.time_s is None or point.time_s >= start)
    return replace(moved, phases=phases, quality=quality)


def retimed(run: RunLog, number: int, change: Change) -> RunLog:
    """A copy of the log under another name, its times changed and rounded to milliseconds as a file would."""

    def at(seconds: float) -> float:
        return round(change(seconds) * 1000) / 1000

    start, stop = at(run.start_s or 0.0), at(run.stop_s or 0.0)
    return replace(
        run,
        path=run.path.with_name(f"result_{number}.txt"),
        start_s=start,
        stop_s=stop,
        minutes=(stop - start) / 60,
        phases=tuple(type(each)(each.name, at(each.time_s), each.epoch, each.line) for each in run.phases),
        quality=tuple(replace(each, time_s=at(each.time_s)) if each.time_s else each for each in run.quality),
    )


def fakes(runs: Sequence[RunLog]) -> dict[str, list[RunLog]]:
    """Sets as somebody might fake them, by what was done."""
    first, count = runs[0], range(len(runs))
    start = first.start_s or 0.0
    shifted = [retimed(first, number, lambda t, n=number: t + 3600.0 * n) for number in count]  # type: ignore[misc]
    stretched = [retimed(first, number, lambda t, n=number: start + (t - start) * STRETCH**n) for number in count]  # type: ignore[misc]
    return {
        "every `run_start` 10 minutes later, or a quarter of the run": [late(run) for run in runs],
        "the same, and the training events before it taken out": [late_and_cut(run) for run in runs],
        "one log for all runs, each an hour later than the one before": shifted,
        f"one log for all runs, each with all times multiplied by {STRETCH:g}": stretched,
    }


def errors(score: Score, runs: Sequence[RunLog]) -> set[str]:
    """The rules for errors that find something, once the runs of the set are these."""
    return {each.rule for each in audit_score(score_runs(score.folder, runs))} & ERRORS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", metavar="DIR", type=Path, nargs="+")
    folders: list[Path] = parser.parse_args().folders
    sets = logs = tried = 0
    with_finding: dict[str, list[str]] = {rule.name: [] for rule in RULES}
    files: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for folder in folders:
        for audit in audit_path(folder):
            sets, logs = sets + 1, logs + len(audit.score.runs)
            name = f"{folder.name}/{audit.score.folder.relative_to(folder).as_posix()}"
            for rule in {finding.rule for finding in audit.findings}:
                found = [finding for finding in audit.findings if finding.rule == rule]
                with_finding[rule].append(name)
                files[rule] += len({finding.path for finding in found if finding.path is not None})
            runs = [run for run in audit.score.converged if run.starts]
            if len(runs) >= LEAST_RUNS:
                tried += 1
                before = errors(audit.score, runs)
                seen.update({what: bool(errors(audit.score, fake) - before) for what, fake in fakes(runs).items()})
    rules = {
        name: {"sets": len(found), "logs": files[name], "examples": found[:EXAMPLES]}
        for name, found in with_finding.items()
    }
    counts = {"sets": sets, "logs": logs, "rules": rules, "fakes": {"sets": tried, "found": dict(seen)}}
    content = {"from": [folder.name for folder in folders], **counts}
    FILE.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    print(f"{sets} sets, {logs} logs")


if __name__ == "__main__":
    main()
