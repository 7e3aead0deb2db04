"""Collects from the events of one log what the summary needs, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from encore.results.logs.evaluations import Evaluations
from encore.results.logs.reader import Event, ReadEvents, number_of, read_events
from encore.results.logs.rounds import ROUND_KEYS, RoundEvidence
from encore.results.rules import canonical

_LIMIT = 4096
_TEXT_LIMIT = 400
_PHASES = frozenset(
    {f"{name}_{edge}" for name in ("init", "run", "epoch", "block", "eval") for edge in ("start", "stop")}
    | {"train_epoch"}
)
_DAMAGED_KEY = re.compile(r'"key":\s*"(\w+)"|:::MLL [\d.]+ (\w+):|:::MLPv\S+ \S+ [\d.]+ \(.*?:\d+\) (\w+)')
_NAMING_DIALECTS = frozenset({"v0.5", "mlperf"})
_EARLIEST_S, _LATEST_S = 1_483_228_800, 4_102_444_800
"""The years 2017 and 2100. MLPerf began in 2018; a time outside is in another unit, or no time."""
_HUGECTR = "format_ctr_output.py"
"""HugeCTR's converter of v0.7 adds milliseconds to the seconds since 1970: the differences alone are right."""
STATED = frozenset({"throughput", "imgs_sec", "train_step_time", "validation_time"})
"""What logs state of their own speed: samples per second, and seconds of a step and of a validation."""
_DECIDING = frozenset({"run_start", "run_stop", "eval_result"})
_NO_HYPERPARAMETER = re.compile(
    r"submission_|(?:init|run|epoch|block|eval|train)_(?:start|stop|epoch|loop|final|iteration)|eval_accuracy"
    r"|eval_iteration|eval_result|cache_clear|run_clear_caches|model_hp_|tracked_stats|save_model|train_checkpoint"
    r"|throughput|power_|step_|actual_selfplay"
)


class Phase(NamedTuple):
    """One boundary in a run: ``name`` is the event's key, such as ``epoch_start``."""

    name: str
    time_s: float
    epoch: float | None = None
    line: int = 0


class Stated(NamedTuple):
    """A speed or a duration that the log states of itself, such as ``throughput``."""

    name: str
    value: float
    time_s: float
    line: int = 0


class Untimely(NamedTuple):
    """A run_start or run_stop that has no time at which a run can have been."""

    key: str
    line: int
    time_s: float | None
    refused_time: str
    """What was written in place of a number."""


@dataclass(kw_only=True)
class Gathered:
    """Everything of one log that decides its time, and what else comparisons need."""

    evidence: RoundEvidence = field(default_factory=RoundEvidence)
    events: int = 0
    starts: list[tuple[int, float]] = field(default_factory=list)
    stops: list[tuple[int, float]] = field(default_factory=list)
    source: str = ""
    """File and line of the program that logged run_start."""
    restarted: int | None = None
    untimely: Untimely | None = None
    """The first one."""
    status: str | None = None
    eval_result_s: float | None = None
    evaluations: Evaluations = field(default_factory=Evaluations)
    benchmarks: set[str] = field(default_factory=set)
    division: str | None = None
    org: str | None = None
    platform: str | None = None
    seeds: dict[int, None] = field(default_factory=dict)
    global_batch: float | None = None
    train_samples: float | None = None
    eval_samples: float | None = None
    hyperparameters: dict[str, object] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    stated: list[Stated] = field(default_factory=list)
    first_init_s: float | None = None
    init_seconds: float | None = None
    damaged: list[tuple[int, str]] = field(default_factory=list)
    last_damaged: tuple[int, str] | None = None
    harmless_damaged: int = 0

    def note_damaged(self, line: int, text: str) -> None:
        """Note a damaged event: does it spoil the log?

        It does where it is the start or the end of the run, or may be the start. Any other can only take an
        evaluation away, and what is left of those must reach the target by itself.
        """
        self.last_damaged = (line, text[:_TEXT_LIMIT])
        match = _DAMAGED_KEY.search(text)
        key = next((group for group in match.groups() if group), "") if match else ""
        if key not in _DECIDING and (key or self.starts):
            self.harmless_damaged += 1
        elif len(self.damaged) < _LIMIT:
            self.damaged.append((line, text[:_TEXT_LIMIT]))


def gather(path: Path, read: ReadEvents = read_events) -> Gathered:
    """Read the log at ``path`` once."""
    found = Gathered()
    for event in read(path, found.note_damaged):
        found.events += 1
        if event.time_s is None or not _EARLIEST_S <= event.time_s <= _LATEST_S:
            event = _timeless(found, event)
        found.evidence.dialects.add(event.dialect)
        if event.dialect in _NAMING_DIALECTS or event.key == "submission_benchmark":
            _note_benchmark(found, event)
        handler = _HANDLERS.get(event.key)
        if handler:
            handler(found, event)
        elif event.key not in found.hyperparameters and len(found.hyperparameters) < _LIMIT:
            _note_hyperparameter(found, event)
        if event.key in _PHASES and event.time_s is not None:
            _note_phase(found, event, event.time_s)
        if event.key in ROUND_KEYS:
            found.evidence.keys.add(event.key)
    found.evidence.division = found.division
    found.evidence.start_s = found.starts[0][1] if found.starts else None
    return found


def _timeless(found: Gathered, event: Event) -> Event:
    """Return an event without its impossible time, which a run must not be measured by."""
    if event.time_s and str(event.metadata.get("file")).endswith(_HUGECTR):
        return event
    if event.key in ("run_start", "run_stop") and found.untimely is None:
        found.untimely = Untimely(event.key, event.line, event.time_s, event.refused_time)
    return event if event.time_s is None else event._replace(time_s=None)


def _note_benchmark(found: Gathered, event: Event) -> None:
    name = event.value if event.key == "submission_benchmark" else event.metadata.get("benchmark")
    benchmark = canonical(name) if isinstance(name, str) else None
    if benchmark:
        found.benchmarks.add(benchmark)
        found.evidence.benchmark = found.evidence.benchmark or benchmark


def _start(found: Gathered, event: Event) -> None:
    if event.time_s is None:
        return
    if found.stops and event.time_s > found.stops[0][1]:
        found.restarted = found.restarted or event.line
    elif len(found.starts) < _LIMIT:
        found.starts.append((event.line, event.time_s))
    if not found.source and "file" in event.metadata:
        name = str(event.metadata["file"])[:_TEXT_LIMIT].rpartition("/")[2]
        found.source = f"{name}:{str(event.metadata.get('lineno', ''))[:_TEXT_LIMIT]}"


def _stop(found: Gathered, event: Event) -> None:
    status = event.metadata.get("status")
    if status is None and isinstance(event.value, dict):
        success = str(event.value.get("success", "")).lower()
        status = {"true": "success", "false": "aborted"}.get(success)
    if found.status is None and status is not None:
        found.status = str(status)[:_TEXT_LIMIT].lower()
    elif status is not None and str(status).lower() != found.status:
        # Two processes that disagree on the outcome: the worse one holds.
        found.status = "aborted" if "success" in (found.status, str(status).lower()) else found.status
    if event.time_s is not None and len(found.stops) < _LIMIT:
        found.stops.append((event.line, event.time_s))


def _eval_accuracy(found: Gathered, event: Event) -> None:
    found.evaluations.add(event, found.evidence.benchmark, found.global_batch)


def _eval_result(found: Gathered, event: Event) -> None:
    seconds = number_of(event.metadata.get("timestamp"))
    if event.dialect == "mll" and seconds is not None and seconds > 0 and found.eval_result_s is None:
        found.eval_result_s = seconds
        found.status = found.status or "success"


def _note_stated(found: Gathered, event: Event) -> None:
    values = event.value if isinstance(event.value, dict) else {event.key: event.value}
    for name, value in values.items():
        number = number_of(value) if name in STATED else None
        if number is not None and number > 0 and event.time_s is not None and len(found.stated) < _LIMIT:
            found.stated.append(Stated(name, number, event.time_s, event.line))


def _init_start(found: Gathered, event: Event) -> None:
    if found.first_init_s is None:
        found.first_init_s = event.time_s


def _init_stop(found: Gathered, event: Event) -> None:
    if found.init_seconds is None and event.time_s is not None and found.first_init_s is not None:
        found.init_seconds = event.time_s - found.first_init_s


def _seed(found: Gathered, event: Event) -> None:
    seed = number_of(event.value)
    if seed is not None and seed == int(seed) and len(found.seeds) < _LIMIT:
        # A log has as many seeds as ranks: a dictionary keeps their order and finds one at once.
        found.seeds.setdefault(int(seed))


def _text(name: str) -> Callable[[Gathered, Event], None]:
    def note(found: Gathered, event: Event) -> None:
        if event.value is not None and getattr(found, name) is None:
            setattr(found, name, str(event.value)[:_TEXT_LIMIT])

    return note


def _figure(name: str) -> Callable[[Gathered, Event], None]:
    def note(found: Gathered, event: Event) -> None:
        if getattr(found, name) is None:
            setattr(found, name, number_of(event.value))
        _note_hyperparameter(found, event)

    return note


def _note_hyperparameter(found: Gathered, event: Event) -> None:
    value = event.value
    if value is None or event.key in found.hyperparameters or _NO_HYPERPARAMETER.match(event.key):
        return
    if isinstance(value, str):
        value = value[:_TEXT_LIMIT]
    elif isinstance(value, list | dict) and len(str(value)) > _TEXT_LIMIT:
        return
    found.hyperparameters[event.key[:_TEXT_LIMIT]] = value


def _note_phase(found: Gathered, event: Event, seconds: float) -> None:
    epoch = number_of(event.metadata.get("epoch_num", event.metadata.get("first_epoch_num")))
    if epoch is None and event.dialect == "v0.5" and not isinstance(event.value, dict):
        epoch = number_of(event.value)
    last = found.phases[-1] if found.phases else None
    # One per boundary, not one per rank.
    if len(found.phases) < _LIMIT and not (last and (last.name, last.epoch) == (event.key, epoch)):
        found.phases.append(Phase(event.key, seconds, epoch, event.line))


_HANDLERS: dict[str, Callable[[Gathered, Event], None]] = {
    "run_start": _start,
    "run_stop": _stop,
    "eval_accuracy": _eval_accuracy,
    "eval_result": _eval_result,
    "tracked_stats": _note_stated,
    "throughput": _note_stated,
    "init_start": _init_start,
    "init_stop": _init_stop,
    "seed": _seed,
    "run_set_random_seed": _seed,
    "submission_division": _text("division"),
    "submission_org": _text("org"),
    "submission_platform": _text("platform"),
    "global_batch_size": _figure("global_batch"),
    "train_samples": _figure("train_samples"),
    "preproc_num_train_examples": _figure("train_samples"),
    "eval_samples": _figure("eval_samples"),
    "preproc_num_eval_examples": _figure("eval_samples"),
}
