"""Telemetry of all nodes of a run: read, merged by time, and the energy of their GPUs.

    from encore.results.logs.telemetry import by_node, energy_of
    print(energy_of(read_run("RUN/result_0.txt")))

encore/machine/telemetry.py writes a file per node.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore.results.logs.metrics import experiment_of
from encore.results.logs.run_log import RunLog

Reading = dict[str, Any]

# Why a GPU's clocks are lower than they could be (nvml.h, nvmlClocksEventReason); an idle one is not slowed.
THROTTLE = {
    0x04: "power cap", 0x08: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake",
}  # fmt: skip
_GAP_SECONDS = 2.5  # Between two readings of one a second: more is a gap, whose energy is a guess


def files_of(experiment: Path) -> list[Path]:
    return sorted(experiment.glob("telemetry*.jsonl"))


def by_node(run: RunLog) -> dict[str, list[Reading]]:
    """Return the readings of each node while the clock was running, by time; none without a clock or telemetry."""
    experiment = experiment_of(run.path)
    if experiment is None or run.start_s is None:
        return {}
    return readings_of(experiment, run.start_s, math.inf if run.stop_s is None else run.stop_s)


def readings_of(experiment: Path, start: float = 0.0, stop: float = math.inf) -> dict[str, list[Reading]]:
    found: dict[str, list[Reading]] = {}
    for path in files_of(experiment):
        for reading in _readings(path):
            if start <= reading["time"] <= stop:
                # A file of one node's before others had any does not name it.
                found.setdefault(str(reading.get("node", path.stem)), []).append(reading)
    return {node: sorted(each, key=lambda reading: float(reading["time"])) for node, each in sorted(found.items())}


def _readings(path: Path) -> Iterator[Reading]:
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        # The last line of a run that was killed may be cut.
        with suppress(ValueError, KeyError, TypeError):
            reading = json.loads(line)
            float(reading["time"])
            yield reading


def merged(nodes: Mapping[str, Sequence[Reading]]) -> list[Reading]:
    """Return the readings of all nodes by time."""
    return sorted(itertools.chain.from_iterable(nodes.values()), key=lambda reading: float(reading["time"]))


@dataclass(frozen=True, kw_only=True)
class GpuEnergy:
    """By NVML, of GPUs alone; for information, and none of MLPerf's power measurements."""

    kilojoules: float
    nodes: int
    gpus: int
    unseen: float  # Share of the time that no reading is near


def energy_of(run: RunLog) -> GpuEnergy | None:
    """Return the energy of all GPUs of all nodes between run_start and run_stop; None where no power was read."""
    joules, gpus, seen, nodes = 0.0, 0, 0.0, by_node(run)
    for readings in nodes.values():
        known = [(float(r["time"]), powers) for r in readings if (powers := _powers(r))]
        gpus += max((len(powers) for _, powers in known), default=0)
        for (begin, first), (end, last) in itertools.pairwise(known):
            joules += (end - begin) * (sum(first) + sum(last)) / 2
            seen += min(end - begin, _GAP_SECONDS)
    if not gpus or not joules:
        return None
    whole = (run.elapsed_minutes or 0.0) * 60 * len(nodes)
    unseen = max(0.0, 1 - seen / whole) if whole else 0.0
    return GpuEnergy(kilojoules=joules / 1000, nodes=len(nodes), gpus=gpus, unseen=unseen)


def _powers(reading: Reading) -> list[float]:
    return [gpu["power_watts"] for gpu in reading.get("gpus", ()) if gpu.get("power_watts") is not None]
