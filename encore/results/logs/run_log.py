"""One log, summed up: what ran, how long, whether it reached its target, and why not where it did not.

from encore.results.logs.run_log import read_run
run = read_run("result_0.txt")
print(run.benchmark, run.minutes, run.reason, run.explanation)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from os import PathLike
from pathlib import Path

from encore.results.logs.evaluations import Quality
from encore.results.logs.gather import Gathered, Phase, Stated, Untimely, gather
from encore.results.logs.reader import Dialect, ReadEvents, read_events
from encore.results.rules import BLEU_BENCHMARKS, Target, canonical, targets_of
from encore.results.words import apart

__all__ = ["Phase", "Quality", "Reason", "RunLog", "Stated", "read_run"]

_LARGEST_FRACTION = 1.0
_LONGEST_DAYS = 60
"""The longest public run took 8 days."""
_MINUTES_PER_DAY = 1440
_EARLIEST_DATE_S, _LATEST_DATE_S = 631_152_000, 7_258_118_400
"""The years 1990 and 2200: such a time is one of a clock, though a wrong one."""


class Reason(str, Enum):
    """Why a log has no time."""

    NO_EVENTS = "no_events"
    NO_START = "no_run_start"
    NO_STOP = "no_run_stop"
    ABORTED = "aborted"
    TARGET_MISSED = "target_missed"
    NO_QUALITY = "no_quality"
    CLOCK = "clock"
    SEVERAL_RUNS = "several_runs"
    SEVERAL_BENCHMARKS = "several_benchmarks"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """What one log says. ``minutes`` is there exactly when the run converged and the log is whole."""

    path: Path
    round: str | None = None
    round_found: str = ""
    round_is_guess: bool = False
    """Whether the round was taken from the date or the keys, which neighbouring rounds share."""
    benchmark: str | None = None
    division: str | None = None
    org: str | None = None
    platform: str | None = None
    status: str | None = None
    start_s: float | None = None
    stop_s: float | None = None
    last_stop_line: int | None = None
    """Line of the last run_stop: what is evaluated after it is not of the run."""
    elapsed_minutes: float | None = None
    """Minutes from run_start to run_stop, whether or not the run converged."""
    minutes: float | None = None
    reason: Reason | None = None
    explanation: str = ""
    quality: tuple[Quality, ...] = ()
    """Evaluations in file order, BLEU as 0 to 100 in every round."""
    targets: tuple[Target, ...] = ()
    seeds: tuple[int, ...] = ()
    global_batch: float | None = None
    train_samples: float | None = None
    eval_samples: float | None = None
    hyperparameters: Mapping[str, object] = field(default_factory=dict)
    init_seconds: float | None = None
    phases: tuple[Phase, ...] = ()
    stated: tuple[Stated, ...] = ()
    """What the log states of its own speed, in file order."""
    starts: tuple[tuple[int, float], ...] = ()
    """Line and time of every run_start; the first one counts, as of the stops."""
    stops: tuple[tuple[int, float], ...] = ()
    untimely_line: int | None = None
    """Line of the first run_start or run_stop without a time at which a run can have been."""
    dialects: frozenset[Dialect] = frozenset()
    source: str = ""
    """File and line of the program that logged run_start."""
    damaged_events: int = 0
    """Damaged events that do not touch the time."""
    events: int = 0

    @property
    def converged(self) -> bool:
        """Whether the run reached its target and so has a time."""
        return self.minutes is not None

    @property
    def epochs(self) -> float | None:
        """Epoch of the last evaluation, in the unit of the log (BERT: samples, or 1)."""
        known = [point.epoch for point in self.quality if point.epoch is not None]
        return known[-1] if known else None

    @property
    def best_quality(self) -> Mapping[str, float]:
        """The values of the last evaluation that met the targets, else of the last one."""
        met = [point for point in self.quality if all(target.met_by(point.values) for target in self.targets)]
        chosen = (met or list(self.quality))[-1:]
        return chosen[0].values if chosen else {}


def read_run(path: str | PathLike[str], round_: str | None = None, read: ReadEvents = read_events) -> RunLog:
    """Read the log at ``path``; never raises, neither on what is in it nor where it cannot be opened."""
    path = Path(path)
    try:
        gathered = gather(path, read)
    except OSError as error:
        return RunLog(path=path, reason=Reason.UNREADABLE, explanation=error.strerror or type(error).__name__)
    found, how, guess = (round_, "as asked for", False) if round_ else gathered.evidence.decide(path)
    benchmark = gathered.evidence.benchmark or canonical(path.absolute().parent.name)
    quality = _one_unit(gathered.evaluations.kept(), benchmark, found, "mllog" in gathered.evidence.dialects)
    open_division = gathered.division == "open"
    known = found is not None and benchmark is not None and not open_division
    targets = targets_of(found, benchmark, gathered.global_batch) if known and found and benchmark else ()
    run = RunLog(
        path=path,
        round=found,
        round_found=how,
        round_is_guess=guess,
        benchmark=benchmark,
        quality=quality,
        targets=targets,
    )
    return _timed(_described(run, gathered), gathered)


def _timed(run: RunLog, gathered: Gathered) -> RunLog:
    start, stop, elapsed = _clock(gathered)
    reason, explanation = _judge(gathered, run.quality, run.targets, elapsed)
    if elapsed is not None and elapsed > _LONGEST_DAYS * _MINUTES_PER_DAY:
        start = stop = elapsed = None
    return replace(
        run,
        status=gathered.status,
        start_s=start,
        stop_s=stop,
        last_stop_line=gathered.stops[-1][0] if gathered.stops else None,
        elapsed_minutes=elapsed,
        minutes=elapsed if reason is None else None,
        reason=reason,
        explanation=explanation,
    )


def _described(run: RunLog, gathered: Gathered) -> RunLog:
    return replace(
        run,
        division=gathered.division,
        org=gathered.org,
        platform=gathered.platform,
        seeds=tuple(gathered.seeds),
        global_batch=gathered.global_batch,
        train_samples=gathered.train_samples,
        eval_samples=gathered.eval_samples,
        hyperparameters=gathered.hyperparameters,
        init_seconds=gathered.init_seconds,
        phases=tuple(gathered.phases),
        stated=tuple(gathered.stated),
        starts=tuple(gathered.starts),
        stops=tuple(gathered.stops),
        untimely_line=gathered.untimely.line if gathered.untimely else None,
        dialects=frozenset(gathered.evidence.dialects),
        source=gathered.source,
        damaged_events=gathered.harmless_damaged,
        events=gathered.events,
    )


def _clock(gathered: Gathered) -> tuple[float | None, float | None, float | None]:
    start = gathered.starts[0][1] if gathered.starts else None
    stop = gathered.stops[0][1] if gathered.stops else None
    if start is not None and gathered.eval_result_s is not None:
        # Minigo of v0.6 is evaluated off the clock: eval_result holds the seconds to the checkpoint that won,
        # and there is no run_stop, or one that was written after the evaluation.
        stop = start + gathered.eval_result_s
        return start, stop, gathered.eval_result_s / 60
    elapsed = (stop - start) / 60 if start is not None and stop is not None else None
    return start, stop, elapsed


def _judge(
    gathered: Gathered, quality: tuple[Quality, ...], targets: tuple[Target, ...], elapsed: float | None
) -> tuple[Reason | None, str]:
    """Return why the log has no time, in the order in which a reader would ask."""
    if gathered.events == 0 and gathered.last_damaged:
        return (
            Reason.DAMAGED,
            f"no whole MLPerf event in the file: {_damage(*(gathered.damaged or [gathered.last_damaged])[0])}",
        )
    if gathered.events == 0:
        return Reason.NO_EVENTS, "no MLPerf event (:::MLLOG, :::MLL, :::MLPv0.5.0 or MLPerf:) in the file"
    if gathered.damaged:
        return Reason.DAMAGED, _damage(*gathered.damaged[0])
    if len(gathered.benchmarks) > 1:
        return Reason.SEVERAL_BENCHMARKS, f"events of {', '.join(sorted(gathered.benchmarks))} in one file"
    if gathered.untimely:
        return Reason.CLOCK, _untimely(gathered.untimely)
    if not gathered.starts:
        return Reason.NO_START, "no run_start event"
    if not gathered.stops and gathered.eval_result_s is None:
        if gathered.last_damaged:
            return Reason.DAMAGED, f"no run_stop event, and {_damage(*gathered.last_damaged)}"
        return Reason.NO_STOP, "no run_stop event: the run ended early, or the log is cut off"
    if gathered.restarted is not None:
        return Reason.SEVERAL_RUNS, f"line {gathered.restarted} starts a second run after the first one's end"
    if elapsed is None:
        return Reason.CLOCK, "run_start or run_stop has no time"
    if elapsed <= 0:
        return Reason.CLOCK, f"run_stop is {-elapsed * 60:.3f} s before run_start"
    if elapsed > _LONGEST_DAYS * _MINUTES_PER_DAY:
        days = elapsed / _MINUTES_PER_DAY
        return Reason.CLOCK, f"run_stop is {days:.0f} days after run_start: no run takes more than {_LONGEST_DAYS}"
    return _judge_quality(gathered, quality, targets)


def _damage(line: int, text: str) -> str:
    """Name the damage; that of a compressed file is in no line of it."""
    return f"line {line} holds a damaged event: {text[:80].strip()}" if line else text.removeprefix(":::ML ")


def _untimely(found: Untimely) -> str:
    place, seconds = f"{found.key} in line {found.line}", found.time_s
    if seconds is None:
        return (
            f"{place} has the time {found.refused_time}, which is none"
            if found.refused_time
            else f"{place} has no time"
        )
    if _EARLIEST_DATE_S <= seconds <= _LATEST_DATE_S:
        date = time.strftime("%Y-%m-%d", time.gmtime(seconds))
        return f"{place} is on {date}, which is not in the years 2017 to 2100: is the clock right?"
    return f"{place} is at {seconds:.6g} s, which is not in the years 2017 to 2100: in another unit?"


def _judge_quality(
    gathered: Gathered, quality: tuple[Quality, ...], targets: tuple[Target, ...]
) -> tuple[Reason | None, str]:
    if gathered.status is not None and gathered.status != "success":
        return Reason.ABORTED, f"run_stop says {gathered.status!r}"
    if not quality and gathered.evaluations.numberless is not None:
        return Reason.NO_QUALITY, f"eval_accuracy in line {gathered.evaluations.numberless} has no number"
    if not quality:
        return Reason.NO_QUALITY, "no eval_accuracy event, so nothing shows that the target was reached"
    reached = any(all(target.met_by(point.values) for target in targets) for point in quality)
    if targets and not reached:
        wanted = ", ".join(f"{target.name} {target.value:g} ({target.unit})" for target in targets)
        last = apart(quality[-1].values, {target.name: target.value for target in targets})
        explanation = f"target {wanted}; the last evaluation has {last or 'no number'}"
        return Reason.TARGET_MISSED, "; ".join([explanation, *_other_units(quality, targets)])
    if gathered.status is None and not targets and gathered.eval_result_s is None:
        return Reason.NO_QUALITY, "run_stop has no status, and the target of this log is not known"
    return None, ""


def _other_units(quality: tuple[Quality, ...], targets: tuple[Target, ...]) -> Iterator[str]:
    """Name the first value of each target that its unit does not have."""
    for target in targets:
        values = [(point.values[target.name], point.line) for point in quality if target.name in point.values]
        odd = next(((value, line) for value, line in values if target.out_of_range(value)), None)
        if odd:
            side = "below" if target.higher_is_better else "above"
            what = f"{odd[0]:.5g} in line {odd[1]} is no {target.unit}"
            yield f"{what}, which is {side} {target.limit:g}: in another unit, such as per cent?"


def _one_unit(
    quality: list[Quality], benchmark: str | None, round_: str | None, has_new_lines: bool
) -> tuple[Quality, ...]:
    """Return BLEU as 0 to 100. Logs of v0.7 write fractions; so does any log whose values never pass 1.

    But for one of v0.5 or v0.6 in the lines of its round: there, so little is BLEU of a run that learns nothing.
    """
    values = [value for point in quality for value in point.values.values()]
    if benchmark not in BLEU_BENCHMARKS or not values or max(values) > _LARGEST_FRACTION:
        return tuple(quality)
    if round_ in ("v0.5", "v0.6") and max(values) < 0.1 and not has_new_lines:
        return tuple(quality)
    return tuple(
        Quality(
            epoch=point.epoch,
            samples=point.samples,
            time_s=point.time_s,
            line=point.line,
            values={name: value * 100 for name, value in point.values.items()},
        )
        for point in quality
    )
