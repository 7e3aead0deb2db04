"""How busy a machine was while a run's clock was running, from the telemetry of its run folder.

from encore.lab.studies.utilisation import utilisation_table
print(utilisation_table([("box", "resnet", load_side(path).logs)]).as_markdown())
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from encore.results.logs.run_log import RunLog
from encore.results.table import Cell, Table

FILE = "telemetry.jsonl"
_KIB_PER_MIB = 1024.0


# Columns, and what a reading calls them: of the machine, then of one GPU.
_MEANS = {
    "CPU %": "cpu_percent", "memory MiB": "memory_used_mib", "GPU %": "use_percent", "GPU memory MiB": "memory_mib",
    "GPU watts": "power_watts", "PCIe sent": "pcie_sent_kib_s", "PCIe received": "pcie_received_kib_s",
}  # fmt: skip
_COUNTERS = {"NVLink sent": "nvlink_sent_kib", "NVLink received": "nvlink_received_kib"}


def utilisation_of(logs: Sequence[RunLog]) -> dict[str, Cell]:
    """Return the means over the timed part of a set of runs, by column; empty where nothing was read meanwhile."""
    parts = [_timed(log) for log in logs]
    readings = [reading for part, _ in parts for reading in part]
    if not readings:
        return {}
    cards = [card for reading in readings for card in reading.get("gpus", ())]
    means: dict[str, Cell] = {}
    for column, name in _MEANS.items():
        mean = _mean(each.get(name) for each in (cards if name in _OF_GPUS else readings))
        means[column] = mean / _KIB_PER_MIB if mean is not None and name.endswith("_kib_s") else mean
    return {
        "minutes": sum(seconds for _, seconds in parts) / 60,
        "GPUs": max(len(reading.get("gpus", ())) for reading in readings),
        **means,
        **{column: _rate(parts, name) for column, name in _COUNTERS.items()},
    }


_OF_GPUS = frozenset(list(_MEANS.values())[2:])
_COLUMNS = ("minutes", *list(_MEANS)[:2], "GPUs", *list(_MEANS)[2:], *_COUNTERS)


def utilisation_table(runs: Iterable[tuple[str, str, Sequence[RunLog]]]) -> Table:
    """Return one row per run that has telemetry: server, benchmark and logs are given."""
    found = [(server, benchmark, utilisation_of(logs)) for server, benchmark, logs in runs]
    return Table(
        title="Utilisation over the timed part",
        columns=("server", "benchmark", *_COLUMNS),
        formats=dict.fromkeys(_MEANS, ".1f"),
        rows=tuple((*names, *(means[column] for column in _COLUMNS)) for *names, means in found if means),
        note="Means of the samples between run_start and run_stop, one a second; of a GPU the mean over all; traffic "
        "in MiB/s per GPU. GPU %: share of the time in which a kernel ran, not of its units that were busy.",
    )


def telemetry_of(run: RunLog) -> Path | None:
    """Return the telemetry of a log: next to it, or in the experiment's folder that its number names."""
    number = run.path.stem.rpartition("_")[2]
    places = (run.path.parent, run.path.parent / f"experiment_{number}")
    return next((place / FILE for place in places if (place / FILE).is_file()), None)


def _timed(run: RunLog) -> tuple[list[dict[str, Any]], float]:
    # The readings while the clock was running, and its seconds.
    path = telemetry_of(run)
    if path is None or run.start_s is None:
        return [], 0.0
    stop = run.stop_s if run.stop_s is not None else float("inf")
    found = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                reading = json.loads(line)
                inside = run.start_s <= reading["time"] <= stop
            except (ValueError, KeyError, TypeError):
                # The last line of a run that was killed may be cut.
                continue
            if inside:
                found.append(reading)
    return found, (run.elapsed_minutes or 0.0) * 60


def _mean(values: Iterable[Any]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _rate(parts: Sequence[tuple[list[dict[str, Any]], float]], name: str) -> float | None:
    # MiB/s per GPU by a counter in KiB that runs on, from the first and the last reading of each part.
    rates = []
    for readings, _ in parts:
        for gpu in range(min((len(reading.get("gpus", ())) for reading in readings), default=0)):
            known = [(r["time"], r["gpus"][gpu].get(name)) for r in readings if r["gpus"][gpu].get(name) is not None]
            if len(known) > 1 and known[-1][0] > known[0][0]:
                rates.append((known[-1][1] - known[0][1]) / _KIB_PER_MIB / (known[-1][0] - known[0][0]))
    return _mean(rates)
