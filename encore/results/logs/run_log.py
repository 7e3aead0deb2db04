"""Summary of one log: benchmark, duration, whether the target was reached, and the reason if it was not.

from encore.results.logs.run_log import read_run
run = read_run("result_0.txt")
print(run.benchmark, run.minutes, run.reason, run.explanation)
"""

import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from encore.results.format import format_distinct
from encore.results.logs.reader import Dialect, Event, ReadEvents, number_of, read_events
from encore.results.rules import BLEU_BENCHMARKS, ROUND_KEYS, Target, canonical, find_round, targets_of

_MOST_EVALUATIONS = 100_000  # Public logs have a few hundred; the limit bounds the memory
_RECENT = 8  # Evaluations that are compared for duplicates from several ranks
_VALUES = 16

_BOX_AND_MASK = ("BBOX", "SEGM")
_NAMED_VALUES = {"value", *_BOX_AND_MASK, "FID", "CLIP"}
_Position = tuple[float | None, float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One evaluation: values by name ("value"; Mask R-CNN's "BBOX" and "SEGM", Stable Diffusion's "FID" and "CLIP")."""

    epoch: float | None
    samples: float | None
    time_s: float | None
    line: int
    values: Mapping[str, float]


# Evaluation values; Mask R-CNN's v0.6 logs have pairs, some of them nested under "accuracy".
def _values(value: object, name: str) -> dict[str, float]:
    if isinstance(value, list) and len(value) == len(_BOX_AND_MASK):
        value = dict(zip(_BOX_AND_MASK, value, strict=True))
    if isinstance(value, dict):
        inner = value.get("accuracy", value.get("value", value))
        if isinstance(inner, dict):
            entries = [(key, entry) for key, entry in inner.items() if key != "epoch"][:_VALUES]
            numbers = {str(key)[:_TEXT_LIMIT]: number_of(entry) for key, entry in entries}
            return {key: number for key, number in numbers.items() if number is not None}
        value = inner
    number = number_of(value)
    return {} if number is None else {name[:_TEXT_LIMIT]: number}


def is_nonnumeric(event: Event) -> bool:
    """Return whether an evaluation is not a number. Logs before v0.7 have numbers as text."""
    if event.key != "eval_accuracy" or event.dialect != "mllog":
        return False
    return isinstance(event.value, str) or not _NAMED_VALUES & _values(event.value, "value").keys()


_LIMIT = 4096
_TEXT_LIMIT = 400
_KEYS = 400
_PHASES = frozenset(
    {f"{name}_{edge}" for name in ("init", "run", "epoch", "block", "eval") for edge in ("start", "stop")}
    | {"train_epoch"}
)
_DAMAGED_KEY = re.compile(r'"key":\s*"(\w+)"|:::MLL [\d.]+ (\w+):|:::MLPv\S+ \S+ [\d.]+ \(.*?:\d+\) (\w+)')
_NAMING_DIALECTS = frozenset({"v0.5", "mlperf"})
EARLIEST_S = 1_483_228_800  # Year 2017: MLPerf started in 2018
# HugeCTR's v0.7 converter adds milliseconds to Unix seconds: only differences are correct.
_HUGECTR = "format_ctr_output.py"
# Events that report training progress between evaluations
_PROGRESS = frozenset({"block_stop", "tracked_stats", "train_loss", "throughput"})
_LOSSES = ("reduced_train_loss", "train_loss", "loss")  # Names of the training loss in train_loss and tracked_stats
# Speeds and durations in logs: samples per second, and seconds per step and per validation.
STATED = frozenset({"throughput", "imgs_sec", "train_step_time", "validation_time"})
_DECIDING = frozenset({"run_start", "run_stop", "eval_result"})
_NO_HYPERPARAMETER = re.compile(
    r"submission_|(?:init|run|epoch|block|eval|train)_(?:start|stop|epoch|loop|final|iteration)|eval_accuracy"
    r"|eval_iteration|eval_result|cache_clear|run_clear_caches|model_hp_|tracked_stats|save_model|train_checkpoint"
    r"|throughput|power_|step_|actual_selfplay"
)
_LONGEST_DAYS = 60  # The longest public run took 8 days
# The years 1990 and 2200: times between them are clock times, even if the clock is wrong.
_EARLIEST_DATE_S, _LATEST_DATE_S = 631_152_000, 7_258_118_400
_TEXTS = {"submission_division": "division", "submission_org": "org", "submission_platform": "platform"}
# Events whose first value is a field of RunLog; the figures are hyperparameters, too.
_FIGURES = {
    "global_batch_size": "global_batch",
    "train_samples": "train_samples", "preproc_num_train_examples": "train_samples",
    "eval_samples": "eval_samples", "preproc_num_eval_examples": "eval_samples",
}  # fmt: skip


class Reason(str, Enum):
    """Reason for a missing time in a log."""

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


class Phase(NamedTuple):
    """One boundary in a run: ``name`` is the event's key, such as ``epoch_start``."""

    name: str
    time_s: float
    epoch: float | None = None
    line: int = 0


class Progress(NamedTuple):
    """Training progress in the log between evaluations; ``step`` counts samples in some logs."""

    time_s: float
    epoch: float | None
    samples: float | None
    step: float | None


class Stated(NamedTuple):
    """A speed or duration reported by the log, such as ``throughput``."""

    name: str
    value: float
    time_s: float
    line: int = 0


@dataclass(kw_only=True)
class RunLog:
    """Summary of a log. ``minutes`` is set only if the run converged and the log is complete."""

    path: Path
    round: str | None = None
    round_found: str = ""
    # Whether the round was taken from the date or the keys, which neighbouring rounds share.
    round_is_guess: bool = False
    benchmark: str | None = None
    unknown_benchmark: str = ""  # Benchmark name in the log if it is unknown
    division: str | None = None
    org: str | None = None
    platform: str | None = None
    status: str | None = None
    start_s: float | None = None
    stop_s: float | None = None
    elapsed_minutes: float | None = None  # Minutes from run_start to run_stop, whether or not the run converged
    minutes: float | None = None
    reason: Reason | None = None
    explanation: str = ""
    quality: Sequence[Quality] = ()  # Evaluations in file order, BLEU as 0 to 100 in every round
    targets: tuple[Target, ...] = ()
    seeds: Sequence[int] = ()
    global_batch: float | None = None
    train_samples: float | None = None
    eval_samples: float | None = None
    hyperparameters: dict[str, object] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    stated: list[Stated] = field(default_factory=list)  # Speeds reported by the log, in file order
    progress: list[Progress] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)  # Samples trained, and the training loss
    last_s: float | None = None  # Time of the latest event
    # Line and time of every run_start; the first one counts, as of the stops.
    starts: list[tuple[int, float]] = field(default_factory=list)
    stops: list[tuple[int, float]] = field(default_factory=list)
    # Line and value of non-numeric evaluations in logs since v0.7: text, null, NaN.
    nonnumeric: list[tuple[int, str]] = field(default_factory=list)
    # Line of the first run_start or run_stop without a time at which a run can have been.
    untimely_line: int | None = None
    dialects: set[Dialect] = field(default_factory=set)
    source: str = ""  # File and line of the program that logged run_start
    damaged_events: int = 0  # Damaged events that do not touch the time
    events: int = 0

    @property
    def converged(self) -> bool:
        return self.minutes is not None

    @property
    def has_impossible_values(self) -> bool:
        """Whether times are impossible or a quality is not a number: errors of `score`, `check` and `audit`."""
        return self.reason is Reason.CLOCK or bool(self.nonnumeric)

    @property
    def epochs(self) -> float | None:
        """Epoch of the last evaluation, in the unit of the log (BERT: samples, or 1)."""
        return next((point.epoch for point in reversed(self.quality) if point.epoch is not None), None)

    @property
    def met(self) -> list[Quality]:
        """Evaluations that met the targets; all evaluations if the target is unknown."""
        return [point for point in self.quality if all(target.met_by(point.values) for target in self.targets)]

    @property
    def best_quality(self) -> Mapping[str, float]:
        """Values of the last evaluation that met the targets, or of the last evaluation."""
        evaluations = self.met or self.quality
        return evaluations[-1].values if evaluations else {}


ORG_PLACEHOLDER = "SUBMISSION_ORG_PLACEHOLDER"  # Default of the reference implementations


def submitter_of(runs: Iterable[RunLog]) -> str | None:
    """Return the most frequent submitter in the logs, or None."""
    names = [run.org for run in runs if run.org and run.org != ORG_PLACEHOLDER]
    return statistics.mode(names) if names else None


# Parser state for one log, and evidence that decides whether its time counts.
@dataclass
class _Reading:
    run: RunLog
    benchmarks: dict[str, None] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    # Unique evaluations in file order, up to _MOST_EVALUATIONS.
    evaluations: list[Quality] = field(default_factory=list)
    numberless: int | None = None  # Line of the first evaluation without a number, such as NaN
    # Indices into ``evaluations`` by epoch, samples and step, for metrics logged in separate events.
    newest: dict[_Position, int] = field(default_factory=dict)
    # One per rank: a dictionary keeps the order and finds duplicates quickly.
    seeds: dict[int, None] = field(default_factory=dict)
    restarted: int | None = None
    untimely: Event | None = None  # The first run_start or run_stop without a time at which a run can have been
    eval_result_s: float | None = None
    damaged: list[tuple[int, str]] = field(default_factory=list)
    last_damaged: tuple[int, str] | None = None

    def note_damaged(self, line: int, text: str) -> None:
        """Record a damaged event, and whether it invalidates the log.

        It does if the event is, or may be, the start or end of the run. Other damaged events can only hide an
        evaluation, and the remaining evaluations must reach the target.
        """
        self.last_damaged = (line, text[:_TEXT_LIMIT])
        match = _DAMAGED_KEY.search(text)
        key = next((group for group in match.groups() if group), "") if match else ""
        if key not in _DECIDING and (key or self.run.starts):
            self.run.damaged_events += 1
        elif len(self.damaged) < _LIMIT:
            self.damaged.append((line, text[:_TEXT_LIMIT]))

    def note(self, events: Iterable[Event]) -> None:
        """Process the events of the log."""
        run, handlers = self.run, dict[str, tuple[_Note, ...]]()
        latest = -math.inf
        for event in events:
            seconds, key = event.time_s, event.key
            run.events += 1
            if seconds is None or not EARLIEST_S <= seconds <= _latest_s():
                event = self._drop_invalid_time(event)
                seconds = event.time_s
            run.dialects.add(event.dialect)
            if event.dialect in _NAMING_DIALECTS:
                self._name(event.metadata.get("benchmark"))
            notes = handlers.get(key)
            if notes is None:
                notes = _handlers_for(key)
                self.keys |= {key} & ROUND_KEYS
                if len(handlers) < _KEYS:
                    handlers[key] = notes
            for note in notes:
                note(self, event)
            if seconds is not None and seconds > latest:
                run.last_s = latest = seconds

    def _name(self, name: object) -> None:
        benchmark = canonical(name) if isinstance(name, str) else None
        if benchmark:
            self.benchmarks.setdefault(benchmark)
        elif isinstance(name, str) and not self.run.unknown_benchmark:
            self.run.unknown_benchmark = name[:_TEXT_LIMIT]

    def text(self, event: Event) -> None:
        if event.value is not None and getattr(self.run, _TEXTS[event.key]) is None:
            setattr(self.run, _TEXTS[event.key], str(event.value)[:_TEXT_LIMIT])

    def hyperparameter(self, event: Event) -> None:
        key, value, hyperparameters = event.key, event.value, self.run.hyperparameters
        if value is None or key in hyperparameters or len(hyperparameters) >= _LIMIT:
            return
        if not (isinstance(value, list | dict) and len(str(value)) > _TEXT_LIMIT):
            hyperparameters[key[:_TEXT_LIMIT]] = value[:_TEXT_LIMIT] if isinstance(value, str) else value

    def figure(self, event: Event) -> None:
        if getattr(self.run, _FIGURES[event.key]) is None:
            setattr(self.run, _FIGURES[event.key], number_of(event.value))

    # Remove invalid times, which must not be used to measure the run.
    def _drop_invalid_time(self, event: Event) -> Event:
        if 0 < (event.time_s or 0) < EARLIEST_S and str(event.metadata.get("file")).endswith(_HUGECTR):
            return event
        if event.key in ("run_start", "run_stop") and self.untimely is None:
            self.untimely, self.run.untimely_line = event, event.line
        return event._replace(time_s=None)

    def start(self, event: Event) -> None:
        run = self.run
        if event.time_s is None:
            return
        if run.stops and event.time_s > run.stops[0][1]:
            self.restarted = self.restarted or event.line
        elif len(run.starts) < _LIMIT:
            run.starts.append((event.line, event.time_s))
        if not run.source and "file" in event.metadata:
            name = str(event.metadata["file"])[:_TEXT_LIMIT].rpartition("/")[2]
            run.source = f"{name}:{str(event.metadata.get('lineno', ''))[:_TEXT_LIMIT]}"

    def stop(self, event: Event) -> None:
        run, status = self.run, event.metadata.get("status")
        if status is None and isinstance(event.value, dict):
            success = str(event.value.get("success", "")).lower()
            status = {"true": "success", "false": "aborted"}.get(success)
        if run.status is None and status is not None:
            run.status = str(status)[:_TEXT_LIMIT].lower()
        elif status is not None and str(status).lower() != run.status:
            # If processes disagree on the outcome, use the worse one.
            run.status = "aborted" if "success" in (run.status, str(status).lower()) else run.status
        if event.time_s is not None and len(run.stops) < _LIMIT:
            run.stops.append((event.line, event.time_s))

    def eval_accuracy(self, event: Event) -> None:
        """Add an evaluation unless it is a duplicate."""
        metadata, value, batch = event.metadata, event.value, self.run.global_batch
        if isinstance(value, dict) and event.dialect in _NAMING_DIALECTS:
            metadata = value
        steps, samples = number_of(metadata.get("step_num")), number_of(metadata.get("samples_count"))
        if samples is None and steps is not None and batch is not None:
            samples = steps * batch
        metric = metadata.get("metric")
        point = Quality(
            epoch=number_of(metadata.get("epoch_num", metadata.get("epoch"))),
            samples=samples,
            time_s=event.time_s,
            line=event.line,
            values=_values(value, str(metric or "value")),
        )
        if is_nonnumeric(event):
            if len(self.run.nonnumeric) < _LIMIT:
                self.run.nonnumeric.append((event.line, json.dumps(value)[:_VALUES]))
            return
        if not point.values or len(self.evaluations) == _MOST_EVALUATIONS:
            self.numberless = self.numberless or event.line
            return
        repeats = any((point.epoch, point.values) == (old.epoch, old.values) for old in self.evaluations[-_RECENT:])
        if not repeats and (metric is None or not self._merge_metrics(point, (point.epoch, samples, steps))):
            self.evaluations.append(point)

    # Merge metrics of the same checkpoint that are logged separately, as by Stable Diffusion. Returns whether it was
    # merged.
    def _merge_metrics(self, point: Quality, position: _Position) -> bool:
        index = self.newest.get(position)
        if index is None or not self.evaluations[index].values.keys().isdisjoint(point.values):
            self.newest[position] = len(self.evaluations)
            return False
        previous = self.evaluations[index]
        times = [seconds for seconds in (previous.time_s, point.time_s) if seconds is not None]
        self.evaluations[index] = replace(
            point, values={**previous.values, **point.values}, time_s=max(times, default=None)
        )
        return True

    def eval_result(self, event: Event) -> None:
        seconds = number_of(event.metadata.get("timestamp"))
        if event.dialect == "mll" and seconds is not None and seconds > 0 and self.eval_result_s is None:
            self.eval_result_s = seconds
            self.run.status = self.run.status or "success"

    def state(self, event: Event) -> None:
        value, stated = event.value, self.run.stated
        if event.time_s is None or len(stated) >= _LIMIT:
            return
        values = value if isinstance(value, dict) else {event.key: value}
        for name in values:
            number = number_of(values[name]) if name in STATED else None
            if number is not None and number > 0:
                stated.append(Stated(name, number, event.time_s, event.line))

    def loss(self, event: Event) -> None:
        value, batch = event.value, self.run.global_batch or 0.0
        values = value if isinstance(value, dict) else {event.key: value}
        loss = next((number_of(values[name]) for name in _LOSSES if name in values), None)
        samples, step = number_of(event.metadata.get("samples_count")), number_of(event.metadata.get("step"))
        if not samples and step and batch:
            # NeMo's v5.1 logs have samples in ``step``, other logs have steps.
            samples = step if step % batch == 0 else step * batch
        losses = self.run.losses
        if loss is not None and samples and samples > (losses[-1][0] if losses else 0.0) and len(losses) < _LIMIT:
            losses.append((samples, loss))

    def seed(self, event: Event) -> None:
        seed = number_of(event.value)
        if seed is not None and seed == int(seed) and len(self.seeds) < _LIMIT:
            self.seeds.setdefault(int(seed))

    def phase(self, event: Event) -> None:
        if event.time_s is None:
            return
        epoch = number_of(event.metadata.get("epoch_num", event.metadata.get("first_epoch_num")))
        if epoch is None and event.dialect == "v0.5" and not isinstance(event.value, dict):
            epoch = number_of(event.value)
        phases = self.run.phases
        # One per boundary, not one per rank.
        if len(phases) < _LIMIT and not (phases and phases[-1].name == event.key and phases[-1].epoch == epoch):
            phases.append(Phase(event.key, event.time_s, epoch, event.line))

    def note_progress(self, event: Event) -> None:
        if event.time_s is None:
            return
        metadata, is_block = event.metadata, event.key == "block_stop"
        epoch = number_of(metadata.get("epoch_num", metadata.get("first_epoch_num"))) if is_block else None
        samples, step = number_of(metadata.get("samples_count")), number_of(metadata.get("step"))
        if epoch or samples or step:
            self.run.progress.append(Progress(event.time_s, epoch, samples, step))
        if len(self.run.progress) == _LIMIT:
            del self.run.progress[::2]  # Keep the latest entries and the start

    def finish(self, round_: str | None) -> RunLog:
        """Return the run, evaluated by the rules of ``round_``, by default the round of the log."""
        run = self.run
        benchmark = next(iter(self.benchmarks), None)
        evidence = (run.dialects, benchmark, run.division, self.keys, run.starts[0][1] if run.starts else None)
        round_source = (round_, "as asked for", False) if round_ else find_round(run.path, *evidence)
        run.round, run.round_found, run.round_is_guess = round_source
        run.benchmark = benchmark or canonical(run.path.absolute().parent.name)
        run.quality = _bleu_to_percent(self.evaluations, run.benchmark, run.round, "mllog" in run.dialects)
        run.seeds = tuple(self.seeds)
        if run.round and run.benchmark and run.division != "open":
            run.targets = targets_of(run.round, run.benchmark, run.global_batch)
        run.start_s, run.stop_s, run.elapsed_minutes = self._clock()
        run.reason, run.explanation = self._judge()
        if run.elapsed_minutes is not None and run.elapsed_minutes > _LONGEST_DAYS * 1440:
            run.start_s = run.stop_s = run.elapsed_minutes = None
        run.minutes = run.elapsed_minutes if run.reason is None else None
        return run

    # Seconds of start and stop, and the minutes in between.
    def _clock(self) -> tuple[float | None, float | None, float | None]:
        start = self.run.starts[0][1] if self.run.starts else None
        stop = self.run.stops[0][1] if self.run.stops else None
        if start is not None and self.eval_result_s is not None:
            # Minigo v0.6 is evaluated off the clock: eval_result has the seconds to the winning checkpoint, and
            # run_stop is missing or was written after the evaluation.
            return start, start + self.eval_result_s, self.eval_result_s / 60
        return start, stop, (stop - start) / 60 if start is not None and stop is not None else None

    # Reason why the log lacks a time; the order is from basic to specific.
    def _judge(self) -> tuple[Reason | None, str]:
        elapsed = self.run.elapsed_minutes
        if self.run.events == 0 and self.last_damaged:
            first = self.damaged[0] if self.damaged else self.last_damaged
            return Reason.DAMAGED, f"no whole MLPerf event in the file: {_describe_damage(*first)}"
        if self.run.events == 0:
            return Reason.NO_EVENTS, "no MLPerf event (:::MLLOG, :::MLL, :::MLPv0.5.0 or MLPerf:) in the file"
        if self.damaged:
            return Reason.DAMAGED, _describe_damage(*self.damaged[0])
        if len(self.benchmarks) > 1:
            return Reason.SEVERAL_BENCHMARKS, f"events of {', '.join(sorted(self.benchmarks))} in one file"
        if self.untimely:
            return Reason.CLOCK, _describe_invalid_time(self.untimely)
        if not self.run.starts:
            return Reason.NO_START, "no run_start event"
        if not self.run.stops and self.eval_result_s is None:
            if self.last_damaged:
                return Reason.DAMAGED, f"no run_stop event, and {_describe_damage(*self.last_damaged)}"
            return Reason.NO_STOP, "no run_stop event: the run ended early, or the log is cut off"
        if self.restarted is not None:
            return Reason.SEVERAL_RUNS, f"line {self.restarted} starts a second run after the first one's end"
        if elapsed is None:
            return Reason.CLOCK, "run_start or run_stop has no time"
        if elapsed <= 0:
            interval = f"{-elapsed * 60:.3f} s before" if elapsed else "at the same time as"
            return Reason.CLOCK, f"run_stop is {interval} run_start"
        if elapsed > _LONGEST_DAYS * 1440:
            days = elapsed / 1440
            return Reason.CLOCK, f"run_stop is {days:.0f} days after run_start: no run takes more than {_LONGEST_DAYS}"
        return self._judge_quality()

    def _judge_quality(self) -> tuple[Reason | None, str]:
        quality, targets = self.run.quality, self.run.targets
        if self.run.status is not None and self.run.status != "success":
            return Reason.ABORTED, f"run_stop has status {self.run.status!r}"
        if self.run.nonnumeric:
            line, value = self.run.nonnumeric[0]
            return Reason.NO_QUALITY, f"eval_accuracy in line {line} is {value}: a number is expected"
        if not quality and self.numberless is not None:
            return Reason.NO_QUALITY, f"eval_accuracy in line {self.numberless} has no number"
        if not quality:
            return Reason.NO_QUALITY, "no eval_accuracy event, so nothing shows that the target was reached"
        if targets and not self.run.met:
            expected = ", ".join(f"{target.name} {target.value:g} ({target.unit})" for target in targets)
            last = format_distinct(quality[-1].values, {target.name: target.value for target in targets})
            explanation = f"target {expected}; the last evaluation has {last or 'no number'}"
            return Reason.TARGET_MISSED, "; ".join([explanation, *_unit_hints(quality, targets)])
        if self.run.status is None and not targets and self.eval_result_s is None:
            return Reason.NO_QUALITY, "run_stop has no status, and the target of this log is not known"
        return None, ""


_Note = Callable[[_Reading, Event], None]
_NOTES: dict[str, _Note] = {
    "run_start": _Reading.start,
    "run_stop": _Reading.stop,
    "eval_accuracy": _Reading.eval_accuracy,
    "eval_result": _Reading.eval_result,
    "tracked_stats": _Reading.state,
    "throughput": _Reading.state,
    "seed": _Reading.seed,
    "run_set_random_seed": _Reading.seed,
    **dict.fromkeys(_TEXTS, _Reading.text),
}


# Event handlers for a key.
def _handlers_for(key: str) -> tuple[_Note, ...]:
    notes = [
        (key == "submission_benchmark", lambda reading, event: reading._name(event.value)),
        (True, _NOTES[key]) if key in _NOTES else (not _NO_HYPERPARAMETER.match(key), _Reading.hyperparameter),
        (key in _FIGURES, _Reading.figure),
        (key in _PHASES, _Reading.phase),
        (key in _PROGRESS, _Reading.note_progress),
        (key in ("train_loss", "tracked_stats"), _Reading.loss),
    ]
    return tuple(note for applies, note in notes if applies)


def read_run(path: str | PathLike[str], round_: str | None = None, read: ReadEvents = read_events) -> RunLog:
    """Read the log at ``path``; never raises, even for invalid or unreadable files."""
    reading = _Reading(RunLog(path=Path(path)))
    try:
        reading.note(read(reading.run.path, reading.note_damaged))
    except OSError as error:
        explanation = error.strerror or type(error).__name__
        return RunLog(path=reading.run.path, reason=Reason.UNREADABLE, explanation=explanation)
    return reading.finish(round_)


# Times outside of EARLIEST_S and tomorrow are invalid or in other units. Not a constant: a run may take days.
def _latest_s() -> float:
    return time.time() + 86_400


# Describe the damage; a damaged compressed stream has line 0.
def _describe_damage(line: int, text: str) -> str:
    return f"line {line} contains a damaged event: {text[:80].strip()}" if line else text.removeprefix(":::ML ")


def _describe_invalid_time(event: Event) -> str:
    location, seconds = f"{event.key} in line {event.line}", event.time_s
    if seconds is None:
        return f"{location} has {f'the invalid time {event.refused_time}' if event.refused_time else 'no time'}"
    if _EARLIEST_DATE_S <= seconds <= _LATEST_DATE_S:
        date = time.strftime("%Y-%m-%d", time.gmtime(seconds))
        range_ = "in the future" if seconds > EARLIEST_S else "before 2017"
        return f"{location} is on {date}, which is {range_}: is the clock right?"
    return f"{location} is at {seconds:.6g} s, which is not between 2017 and today: in another unit?"


# Name the first value per target outside its unit's range.
def _unit_hints(quality: Sequence[Quality], targets: tuple[Target, ...]) -> Iterator[str]:
    for target in targets:
        values = [(point.values[target.name], point.line) for point in quality if target.name in point.values]
        odd = next(((value, line) for value, line in values if target.out_of_range(value)), None)
        if odd:
            direction = "below" if target.higher_is_better else "above"
            problem = f"{odd[0]:.5g} in line {odd[1]} is not a valid {target.unit}"
            yield f"{problem}, which is {direction} {target.limit:g}: in another unit, such as per cent?"


# Convert BLEU to 0 to 100. v0.7 logs have fractions, like all logs with values up to 1. Exception: v0.5 and v0.6 logs
# in their rounds' format, where such a low BLEU means that the run does not learn.
def _bleu_to_percent(
    quality: list[Quality], benchmark: str | None, round_: str | None, has_new_lines: bool
) -> list[Quality]:
    best = max((value for point in quality for value in point.values.values()), default=math.inf)
    learns_nothing = round_ in ("v0.5", "v0.6") and best < 0.1 and not has_new_lines
    if benchmark not in BLEU_BENCHMARKS or best > 1.0 or learns_nothing:
        return quality
    return [replace(point, values={name: value * 100 for name, value in point.values.items()}) for point in quality]
