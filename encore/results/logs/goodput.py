"""Goodput: the fraction of a run's wall-clock time spent on training, and a breakdown of the remaining time.

    from encore.results.logs.goodput import goodput_of
    print(goodput_of(read_run("RUN/result_0.txt")).share)

Wall-clock time is measured from the launcher's start to its end, including pauses; for logs from other programs,
from the first to the last event. Training repeated after a resume does not count as training.
"""

import itertools
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from encore.files import json_objects, unix_time
from encore.results.logs.metrics import experiment_of, lines_of
from encore.results.logs.run_log import RunLog
from encore.results.logs.telemetry import gpu_kilojoules
from encore.results.logs.timing import phases_of
from encore.results.table import Table

PARTS = ("training", "data stall", "evaluation", "checkpoints", "start", "stopped or repeated", "end")
WRITTEN = "checkpoints written meanwhile"  # While training continued: no part of the rest


@dataclass(frozen=True)
class Goodput:
    """Wall-clock seconds, and their breakdown into PARTS."""

    wall: float
    parts: dict[str, float]
    written: float = 0.0  # Seconds of writing checkpoints while training continued

    @property
    def share(self) -> float:
        return self.parts["training"] / self.wall


def goodput_of(run: RunLog) -> Goodput | None:
    """Return the breakdown of the wall-clock time; None if the log lacks the training start or end."""
    start, end = _bounds(run)
    stop = run.stop_s if run.stop_s is not None else run.last_s
    phases = phases_of(replace(run, stop_s=stop))
    if start is None or end is None or stop is None or "train_s" not in phases or end <= start:
        return None
    experiment = experiment_of(run.path)
    lines = json_objects(lines_of(experiment / "metrics.jsonl")) if experiment else ()
    records = [record for record in lines if "kind" in record and isinstance(record.get("time"), int | float)]
    trained = phases["train_s"]
    # From the last record that a checkpoint kept to the first of the run that continued from it.
    lost = sum(
        max(0.0, float(later["time"]) - float(earlier["time"]))
        for earlier, later in itertools.pairwise(records)
        if later["kind"] == "start" and later.get("resumed_step")
    )
    lost = min(lost, trained)
    saved = sum(
        float(record["seconds"]) for record in records if record["kind"] == "checkpoint" and record["time"] <= stop
    )
    saved = min(saved, trained - lost)
    shares = [float(record.get("input_share", 0.0)) for record in records if record["kind"] == "epoch"]
    stall = (trained - lost - saved) * (sum(shares) / len(shares) if shares else 0.0)
    parts = {
        "training": trained - lost - saved - stall,
        "data stall": stall,
        "evaluation": phases.get("evaluate_s", 0.0),
        "checkpoints": saved,
        "stopped or repeated": lost,
        "end": max(0.0, end - stop),
    }
    parts["start"] = max(0.0, end - start - sum(parts.values()))
    written = sum(float(record["seconds"]) for record in records if record["kind"] == "checkpoint_written")
    return Goodput(sum(parts.values()), {name: parts[name] for name in PARTS}, written)


def _bounds(run: RunLog) -> tuple[float | None, float | None]:
    # state.json has whole seconds, which the times in the log extend; without it, the log's times are used.
    first = min((phase.time_s for phase in run.phases), default=run.start_s)
    last = run.last_s if run.last_s is not None else run.stop_s
    experiment = experiment_of(run.path)
    state: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        state = json.loads((experiment / "state.json").read_text("utf-8")) if experiment else {}
    started, ended = (unix_time(state.get(name)) for name in ("started", "ended"))
    return (
        min((seconds for seconds in (first, started) if seconds is not None), default=None),
        max((seconds for seconds in (last, ended) if seconds is not None), default=None),
    )


def table_of(runs: Sequence[RunLog]) -> Table | None:
    """Return goodput and GPU energy per Encore run, or None without such runs."""
    rows = []
    for run in runs:
        if experiment_of(run.path) and (goodput := goodput_of(run)):
            shares = (goodput.parts[name] / goodput.wall or None for name in PARTS[1:])
            written = goodput.written / goodput.wall or None
            rows.append((run.path.name, goodput.wall / 60, goodput.share, *shares, written, gpu_kilojoules(run)))
    if not rows:
        return None
    columns = ("file", "wall minutes", "goodput", *PARTS[1:], WRITTEN, "GPU energy kJ")
    return Table(
        title="Goodput",
        columns=columns,
        rows=tuple(rows),
        formats={"wall minutes": ".2f", **dict.fromkeys(columns[2:-1], ".1%"), "GPU energy kJ": ".1f"},
        note="Goodput: the share of the wall clock that trained; the other columns are what the rest was. GPU energy: "
        "of all nodes, between run_start and run_stop, by NVML; for information.",
    ).filled()
