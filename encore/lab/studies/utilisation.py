"""How busy a machine was while a run's clock was running, from the telemetry of its run folder.

from encore.lab.studies.utilisation import utilisation_table
print(utilisation_table([("box", "resnet", load_side(path).logs)]).as_markdown())
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore.results.logs.run_log import RunLog
from encore.results.table import Table

FILE = "telemetry.jsonl"
_KIB_PER_MIB = 1024.0


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Means over the timed part of all experiments of a run; None where nothing was read."""

    seconds: float
    """Timed parts together."""
    samples: int
    cpu_percent: float | None
    memory_mib: float | None
    gpus: int
    gpu_percent: float | None
    gpu_memory_mib: float | None
    """Of one GPU, as all that follow; what the GPUs sent and received is in MiB/s."""
    power_watts: float | None
    pcie_sent: float | None
    pcie_received: float | None
    nvlink_sent: float | None
    nvlink_received: float | None


def utilisation_of(logs: Sequence[RunLog]) -> Utilisation | None:
    """Return the means of a set of runs; None where there is no reading between run_start and run_stop."""
    parts = [_timed(log) for log in logs]
    readings = [reading for part, _ in parts for reading in part]
    if not readings:
        return None
    cards = [card for reading in readings for card in reading.get("gpus", ())]
    sent, received = _rates(parts, "nvlink_sent_kib"), _rates(parts, "nvlink_received_kib")
    pcie = [_mean(card.get(f"pcie_{way}_kib_s") for card in cards) for way in ("sent", "received")]
    return Utilisation(
        seconds=sum(seconds for _, seconds in parts),
        samples=len(readings),
        cpu_percent=_mean(reading.get("cpu_percent") for reading in readings),
        memory_mib=_mean(reading.get("memory_used_mib") for reading in readings),
        gpus=max(len(reading.get("gpus", ())) for reading in readings),
        gpu_percent=_mean(card.get("use_percent") for card in cards),
        gpu_memory_mib=_mean(card.get("memory_mib") for card in cards),
        power_watts=_mean(card.get("power_watts") for card in cards),
        pcie_sent=pcie[0] / _KIB_PER_MIB if pcie[0] is not None else None,
        pcie_received=pcie[1] / _KIB_PER_MIB if pcie[1] is not None else None,
        nvlink_sent=sent,
        nvlink_received=received,
    )


def utilisation_table(runs: Iterable[tuple[str, str, Sequence[RunLog]]]) -> Table:
    """Return one row per run that has telemetry: server, benchmark and logs are given."""
    rows = []
    for server, benchmark, logs in runs:
        found = utilisation_of(logs)
        if found is not None:
            rows.append(
                (
                    server, benchmark, found.seconds / 60, found.cpu_percent, found.memory_mib, found.gpus,
                    found.gpu_percent, found.gpu_memory_mib, found.power_watts, found.pcie_sent, found.pcie_received,
                    found.nvlink_sent, found.nvlink_received,
                )
            )  # fmt: skip
    return Table(
        title="Utilisation over the timed part",
        columns=(
            "server", "benchmark", "minutes", "CPU %", "memory MiB", "GPUs", "GPU %", "GPU memory MiB", "GPU watts",
            "PCIe sent", "PCIe received", "NVLink sent", "NVLink received",
        ),
        formats=dict.fromkeys(
            ("CPU %", "memory MiB", "GPU %", "GPU memory MiB", "GPU watts", "PCIe sent", "PCIe received"), ".1f"
        ),
        rows=tuple(rows),
        note="Means of the samples between run_start and run_stop, one a second; of a GPU the mean over all; traffic "
        "in MiB/s per GPU. GPU %: share of the time in which a kernel ran, not of its units that were busy.",
    )  # fmt: skip


def telemetry_of(run: RunLog) -> Path | None:
    """Return the telemetry of a log: next to it, or in the experiment's folder that its number names."""
    number = run.path.stem.rpartition("_")[2]
    places = (run.path.parent, run.path.parent / f"experiment_{number}")
    return next((place / FILE for place in places if (place / FILE).is_file()), None)


def _timed(run: RunLog) -> tuple[list[dict[str, Any]], float]:
    """Return the readings while the clock was running, and its seconds."""
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


def _rates(parts: Sequence[tuple[list[dict[str, Any]], float]], name: str) -> float | None:
    """Return MiB/s per GPU by a counter in KiB that runs on, from the first and the last reading of each part."""
    rates = []
    for readings, _ in parts:
        for gpu in range(min((len(reading.get("gpus", ())) for reading in readings), default=0)):
            known = [(r["time"], r["gpus"][gpu].get(name)) for r in readings if r["gpus"][gpu].get(name) is not None]
            if len(known) > 1 and known[-1][0] > known[0][0]:
                rates.append((known[-1][1] - known[0][1]) / _KIB_PER_MIB / (known[-1][0] - known[0][0]))
    return _mean(rates)
