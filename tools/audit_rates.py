"""Measure how often each audit rule fires on the public sets, and how many generated fakes are detected.

    python -m tools.audit_rates training_results_v0.5 ... training_results_v5.1

writes encore/results/data/audit_rates.json. DIR: checkout of a round. A log that occurs again in a later
round is not a copy: the rules allow it. --rule NAME (repeatable) measures new rules only, and keeps all other figures.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from encore.results.audit.audit import RULES, audit_path, audit_score
from encore.results.findings import file_of, measured
from encore.results.logs.run_log import Phase, Quality, RunLog, Stated
from encore.results.scores.score import Score, score_runs
from tools import Folders, run

EXAMPLES = 3
LEAST_RUNS = 3
LATE_S = 600.0
STRETCH = 1.18
EVERY = 10  # One set in ten is faked: a set has some 30 fakes
RENAMED = "the logs of another system, in a folder of one's own"
LOOKED_UP = frozenset(rule.name for rule in RULES if rule.in_digests)

Change = Callable[[float], float]


def filter_events(run: RunLog, is_kept: Callable[[float], bool]) -> RunLog:
    # Keep only the events at selected times; events before the run remain
    return replace(
        run,
        phases=tuple(event for event in run.phases if is_kept(event.time_s)),
        quality=tuple(event for event in run.quality if is_kept(event.time_s or 0.0)),
        stated=tuple(event for event in run.stated if is_kept(event.time_s)),
    )


def late(run: RunLog) -> RunLog:
    # run_start 10 minutes later, or a quarter of the run where that is less
    start, stop = run.start_s or 0.0, run.stop_s or 0.0
    return moved(run, start + min(LATE_S, (stop - start) / 4))


def late_and_cut(run: RunLog) -> RunLog:
    # The same, without the training events and evaluations before the new run_start
    after = late(run)
    start = after.start_s or 0.0
    phases = tuple(phase for phase in run.phases if phase.time_s >= start or phase.name.startswith(("init", "run")))
    quality = tuple(point for point in run.quality if point.time_s is None or point.time_s >= start)
    return replace(filter_events(after, lambda time: time >= start), phases=phases, quality=quality)


def retimed(run: RunLog, number: int, change: Change) -> RunLog:
    # Copy a log under a new name with changed times, rounded to milliseconds as in a file

    def new_time(seconds: float) -> float:
        return round(change(seconds) * 1000) / 1000

    start, stop = new_time(run.start_s or 0.0), new_time(run.stop_s or 0.0)
    return replace(
        run,
        path=run.path.with_name(f"result_{number}.txt"),
        start_s=start,
        stop_s=stop,
        minutes=(stop - start) / 60,
        phases=tuple(type(event)(event.name, new_time(event.time_s), event.epoch, event.line) for event in run.phases),
        quality=tuple(
            replace(event, time_s=new_time(event.time_s)) if event.time_s else event for event in run.quality
        ),
        stated=tuple(event._replace(time_s=new_time(event.time_s)) for event in run.stated),
    )


def moved(run: RunLog, start: float, squeeze: bool = False) -> RunLog:
    # Change run_start; ``squeeze`` also moves later events, so that none precedes it
    old, stop = run.start_s or 0.0, run.stop_s or 0.0
    if not squeeze:
        return replace(run, start_s=start, starts=((run.starts[0][0], start),), minutes=(stop - start) / 60)
    share = (stop - start) / (stop - old)
    return retimed(run, _number(run), lambda t: stop - (stop - t) * share if t >= old else t + start - old)


def stopped_before(run: RunLog) -> RunLog:
    # End the log at the second-to-last evaluation, with the quality of the last
    *_, previous, last = run.quality
    end = previous.time_s or 0.0
    quality = (*run.quality[:-2], replace(previous, values=last.values))
    minutes = (end - (run.start_s or 0.0)) / 60
    truncated = replace(filter_events(run, lambda time: time <= end), quality=quality)
    return replace(truncated, stop_s=end, minutes=minutes, elapsed_minutes=minutes)


def cut(run: RunLog) -> RunLog:
    # Remove a fifth of the run, from the middle
    start, stop = run.start_s or 0.0, run.stop_s or 0.0
    cut_start, cut_end = start + 0.4 * (stop - start), start + 0.6 * (stop - start)
    remaining = filter_events(run, lambda time: not cut_start < time < cut_end)
    return retimed(remaining, _number(run), lambda t: t - (cut_end - cut_start) if t >= cut_end else t)


def shuffled(run: RunLog) -> RunLog:
    # Shuffle the lines between run_start and run_stop
    events: list[Phase | Quality | Stated] = [*run.phases, *run.quality, *run.stated]
    timed_events = [event for event in events if (run.start_s or 0.0) < (event.time_s or 0.0) < (run.stop_s or 0.0)]
    lines = [event.line for event in timed_events]
    random.Random(len(lines)).shuffle(lines)
    new = {id(event): line for event, line in zip(timed_events, lines, strict=True)}
    return replace(
        run,
        phases=tuple(sorted((e._replace(line=new.get(id(e), e.line)) for e in run.phases), key=lambda e: e.line)),
        quality=tuple(sorted((replace(e, line=new.get(id(e), e.line)) for e in run.quality), key=lambda e: e.line)),
        stated=tuple(sorted((e._replace(line=new.get(id(e), e.line)) for e in run.stated), key=lambda e: e.line)),
    )


def jumped(run: RunLog) -> RunLog:
    # Set the clock back by a twentieth of the run, in the middle
    start, stop = run.start_s or 0.0, run.stop_s or 0.0
    return retimed(run, _number(run), lambda t: t - 0.05 * (stop - start) if t > (start + stop) / 2 else t)


def jittered(run: RunLog, number: int, noise: float = 0.0) -> RunLog:
    # Shift the log by a day, jitter the times by up to a second and the qualities by up to ``noise``
    dice = random.Random(number)
    copy = retimed(run, number, lambda t: t + 86400.0 + dice.uniform(0.0, 1.0))
    quality = tuple(
        replace(point, values={name: value * (1 + dice.uniform(-noise, noise)) for name, value in point.values.items()})
        for point in copy.quality
    )
    return replace(copy, quality=quality if noise else copy.quality, seeds=(number,))


def restated(run: RunLog, factor: float) -> RunLog:
    # Scale the throughput figures in the log for times multiplied by ``factor``
    return replace(
        run, stated=tuple(e._replace(value=e.value * factor ** (1 if "time" in e.name else -1)) for e in run.stated)
    )


def _number(run: RunLog) -> int:
    return int(re.sub(r"\D", "", run.path.stem) or 0)


def fakes(runs: Sequence[RunLog]) -> dict[str, list[RunLog]]:
    # Plausible fakes for a set, by description
    first, *other_runs = runs
    start, count = first.start_s or 0.0, len(runs)
    slow, fast = max(runs, key=_minutes), min(runs, key=_minutes)
    rest = [run for run in runs if run is not slow]
    shifted = [retimed(first, number, lambda t, n=number: t + 3600.0 * n) for number in range(count)]  # type: ignore[misc]
    stretched = [retimed(first, n, lambda t, n=n: start + (t - start) * STRETCH**n) for n in range(count)]  # type: ignore[misc]

    def scaled(run: RunLog, factor: float) -> RunLog:
        run_start = run.start_s or 0.0
        return retimed(run, _number(run), lambda t: run_start + (t - run_start) * factor)

    def rounded(unit: float) -> list[RunLog]:
        return [retimed(run, _number(run), lambda t: round(t / unit) * unit) for run in runs]

    def later(share: float, seconds: float = 0.0, squeeze: bool = False) -> list[RunLog]:
        return [moved(run, (run.start_s or 0.0) + share * _minutes(run) * 60 + seconds, squeeze) for run in runs]

    fake_sets = {
        "every `run_start` 10 minutes later, or a quarter of the run": [late(run) for run in runs],
        "the same, and the training events before it taken out": [late_and_cut(run) for run in runs],
        "every `run_start` 5 % of the run later": later(0.05),
        "every `run_start` 0.9 s later": later(0.0, 0.9),
        "every `run_start` 5 % later, the events after it squeezed": later(0.05, squeeze=True),
        "every `run_stop` 10 % earlier": [
            replace(run, stop_s=(run.start_s or 0.0) + 54 * _minutes(run), minutes=0.9 * _minutes(run)) for run in runs
        ],
        "one log for all runs, each with another seed": [
            replace(first, path=run.path, seeds=(n,)) for n, run in enumerate(runs)
        ],
        "one log for all runs, each an hour later than the one before": shifted,
        f"one log for all runs, each with all times multiplied by {STRETCH:g}": stretched,
        "one log for all runs, each time up to a second away": [jittered(first, n) for n in range(count)],
        "the same, and qualities up to 0.1 % away": [jittered(first, n, 0.001) for n in range(count)],
        "the same, and the speeds that the logs state too": [
            restated(jittered(first, n, 0.001), 1 + 0.001 * n) for n in range(count)
        ],
        "the fastest run stretched over the slowest": [
            *rest, retimed(fast, _number(slow), lambda t: (slow.start_s or 0.0) + (t - (fast.start_s or 0.0)) * 1.02)
        ],
        "a run more than the round scores": [*runs, jittered(fast, 90 + count, 0.001)],
        "the slowest run left out": rest,
        "all times of all runs multiplied by 0.9": [scaled(run, 0.9) for run in runs],
        "the same, and the speeds that the logs state changed to match": [
            restated(scaled(run, 0.9), 0.9) for run in runs
        ],
        "all times of each run multiplied by a factor of its own": [
            scaled(run, 0.9 + 0.01 * n) for n, run in enumerate(runs)
        ],
        "all times of one run multiplied by 0.6": [scaled(first, 0.6), *other_runs],
        "another platform in one log": [replace(first, platform="another"), *other_runs],
        "another platform in all logs": [replace(run, platform="another") for run in runs],
        "a fifth cut out of the middle of each run": [cut(run) for run in runs],
        "a clock that goes back by a twentieth of the run": [jumped(run) for run in runs],
        "the lines of each log in another order": [shuffled(run) for run in runs],
        "all times whole seconds": rounded(1.0),
        "all times multiples of 30 s": rounded(30.0),
        "one seed in all logs": [replace(run, seeds=(1,)) for run in runs],
        "qualities as per cent": [
            replace(
                run,
                quality=tuple(
                    replace(point, values={name: value * 100 for name, value in point.values.items()})
                    for point in run.quality
                ),
            )
            for run in runs
        ],
    }  # fmt: skip
    if all(len(run.quality) > 2 and run.quality[-2].time_s for run in runs):
        fake_sets["stopped at the evaluation before, with the quality of the last"] = [
            stopped_before(run) for run in runs
        ]
    return fake_sets


def _minutes(run: RunLog) -> float:
    return run.minutes or 0.0


def errors(folder: Path, runs: Sequence[RunLog]) -> set[str]:
    # The rules with errors or warnings for these runs
    findings = audit_score(score_runs(folder, runs), in_digests=True)
    return {finding.rule for finding in findings if finding.severity != "note"}


def tries(score: Score) -> Iterator[tuple[str, bool, bool]]:
    # Yield the set's fakes, whether a fake is detected, and whether it is detected without the look-up
    runs = [run for run in score.converged if run.starts]
    genuine = errors(score.folder, runs)
    candidates = [(title, score.folder, fake) for title, fake in fakes(runs).items()]
    candidates.append((RENAMED, Path("results", "another", score.folder.name), runs))
    for title, folder, fake in candidates:
        new = errors(folder, fake) - genuine
        yield title, bool(new), bool(new - LOOKED_UP)


def main(folders: Folders, rule: Annotated[list[str] | None, typer.Option()] = None) -> None:
    sets = logs = tried = 0
    names = rule or [entry.name for entry in RULES]
    with_finding: dict[str, list[str]] = {name: [] for name in names}
    files, detected, of, without_lookup = (Counter[str]() for _ in range(4))
    for folder in folders:
        for audit in audit_path(folder):
            sets, logs = sets + 1, logs + len(audit.score.runs)
            name = f"{folder.name}/{audit.score.folder.relative_to(folder).as_posix()}"
            for fired in {finding.rule for finding in audit.findings} & with_finding.keys():
                findings = [finding for finding in audit.findings if finding.rule == fired]
                with_finding[fired].append(name)
                files[fired] += len({finding.path for finding in findings if finding.path is not None})
            runs = [run for run in audit.score.converged if run.starts]
            if len(runs) >= LEAST_RUNS and sets % EVERY == 0 and not rule:
                tried += 1
                for title, is_found, without in tries(audit.score):
                    of[title] += 1
                    detected[title] += is_found
                    without_lookup[title] += without
    rules = {
        name: {"sets": len(findings), "logs": files[name], "examples": findings[:EXAMPLES]}
        for name, findings in with_finding.items()
    }
    content: dict[str, Any] = {
        "from": [folder.name for folder in folders],
        "sets": sets,
        "logs": logs,
        "rules": rules,
        "fakes": {"sets": tried, "of": dict(of), "found": dict(detected), "alone": dict(without_lookup)},
    }
    if rule:
        content = measured("audit")
        content["rules"] |= rules
    file_of("audit").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    print(f"{sets} sets, {logs} logs")


if __name__ == "__main__":
    run(main, __doc__)
