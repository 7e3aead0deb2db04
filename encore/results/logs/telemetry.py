"""Telemetry of all nodes of a run: read, merged by time, and the energy of their GPUs.

    from encore.results.logs.telemetry import by_node, energy_of
    print(energy_of(read_run("RUN/result_0.txt")))

encore/machine/telemetry.py writes a file per node.
"""

import itertools
import json
import math
import statistics
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
RECENT_SECONDS = 30.0  # Readings that say how a GPU is now
_LAST_BYTES = 1 << 17  # As many of 8 GPUs
_IN_USE = 50  # Percent of the time in which a kernel ran
_SLOW_CLOCK = 0.9  # Of the others' median: GPUs of one kind differ by less
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


def slow_gpu(experiment: Path, now: float) -> str:
    """Return which GPU of a running experiment has far lower clocks than the others, and why; empty if none has.

    All ranks of a synchronous training wait for it. Those that are not in use say nothing.
    """
    clocks: dict[tuple[str, int], list[float]] = {}
    reasons: dict[tuple[str, int], int] = {}
    for path in files_of(experiment):
        for reading in _recent(path, now):
            for number, gpu in enumerate(reading.get("gpus", ())):
                if gpu.get("sm_mhz") and (gpu.get("use_percent") or 0) >= _IN_USE:
                    place = str(reading["node"]), number
                    clocks.setdefault(place, []).append(float(gpu["sm_mhz"]))
                    reasons[place] = reasons.get(place, 0) | (gpu.get("throttle") or 0)
    means = {place: sum(each) / len(each) for place, each in clocks.items()}
    slow = min(means, key=lambda place: means[place], default=None)
    others = [mean for place, mean in means.items() if place != slow]
    if slow is None or not others or means[slow] > _SLOW_CLOCK * statistics.median(others):
        return ""
    why = ", ".join(reason for bit, reason in THROTTLE.items() if reasons[slow] & bit)
    clock = f"{means[slow]:.0f} MHz, the others {statistics.median(others):.0f}"
    return f"GPU {slow[1]} of {slow[0]} is slow: {clock}" + (f" ({why})" if why else "")


def _recent(path: Path, now: float) -> Iterator[Reading]:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_BYTES))
        for line in file.read().decode("utf-8", "replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                reading = json.loads(line)
                if now - RECENT_SECONDS < float(reading["time"]) and "node" in reading:
                    yield reading


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
