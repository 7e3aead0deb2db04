"""Telemetry of a run's nodes, and GPU energy.

    from encore.results.logs.telemetry import by_node, gpu_kilojoules
    print(gpu_kilojoules(read_run("RUN/result_0.txt")))

encore/machine/telemetry.py writes a file per node.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from encore.files import json_objects, lines_at_end
from encore.results.logs.metrics import experiment_of, lines_of
from encore.results.logs.run_log import RunLog
from encore.results.outliers import lowest

Reading = dict[str, Any]

# Why a GPU's clocks are lower than they could be (nvml.h, nvmlClocksEventReason); an idle one is not slowed.
THROTTLE = {
    0x04: "power cap", 0x08: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake",
}  # fmt: skip

RECENT_SECONDS = 30.0  # Age of the readings that describe a GPU's current state
_LAST_BYTES = 1 << 17  # RECENT_SECONDS of readings with 8 GPUs
_IN_USE = 50  # Percent of time with a running kernel
_SLOW_CLOCK = 0.9  # Fraction of the other GPUs' median clock: equal GPUs differ by less
_LEAST_SEEN = 0.9  # Smallest fraction of time with readings
_GAP_SECONDS = 2.5  # Readings are taken every second: longer intervals are gaps with unknown energy


def by_node(run: RunLog) -> dict[str, list[Reading]]:
    """Return the readings per node between run_start and run_stop; empty without a clock or telemetry."""
    experiment = experiment_of(run.path)
    if experiment is None or run.start_s is None:
        return {}
    readings_by_node: dict[str, list[Reading]] = {}
    for path in sorted(experiment.glob("telemetry*.jsonl")):
        for reading in _readings(lines_of(path)):
            if run.start_s <= reading["time"] <= (math.inf if run.stop_s is None else run.stop_s):
                readings_by_node.setdefault(str(reading.get("node", path.stem)), []).append(reading)
    return {
        node: sorted(readings, key=lambda reading: float(reading["time"]))
        for node, readings in sorted(readings_by_node.items())
    }


def _readings(lines: Iterable[str]) -> Iterator[Reading]:
    return (record for record in json_objects(lines) if isinstance(record.get("time"), int | float))


def in_use(gpu: Reading) -> bool:
    """Return whether a kernel ran most of the time before the reading; True if that is unknown."""
    return gpu.get("use_percent") is None or gpu["use_percent"] >= _IN_USE


def slow_gpu(experiment: Path, now: float) -> str:
    """Return the GPU with far lower clocks than the other GPUs in use, with reasons, or an empty string.

    All ranks wait for such a GPU in synchronous training.
    """
    clocks: dict[tuple[str, int], list[float]] = {}
    reasons: dict[tuple[str, int], int] = {}
    for path in sorted(experiment.glob("telemetry*.jsonl")):
        for reading in _readings(lines_at_end(path, _LAST_BYTES)):
            is_recent = now - RECENT_SECONDS < float(reading["time"]) and "node" in reading
            for number, gpu in enumerate(reading.get("gpus", ()) if is_recent else ()):
                if gpu.get("sm_mhz") and in_use(gpu):
                    gpu_key = str(reading["node"]), number
                    clocks.setdefault(gpu_key, []).append(float(gpu["sm_mhz"]))
                    reasons[gpu_key] = reasons.get(gpu_key, 0) | (gpu.get("throttle") or 0)
    slow = lowest({gpu_key: statistics.fmean(gpu_clocks) for gpu_key, gpu_clocks in clocks.items()})
    if slow is None or slow.value > _SLOW_CLOCK * slow.others:
        return ""
    node, number = slow.name
    throttle_reasons = ", ".join(reason for bit, reason in THROTTLE.items() if reasons[slow.name] & bit)
    clock = f"{slow.value:.0f} MHz, the others {slow.others:.0f}"
    return f"GPU {number} of {node} is slow: {clock}" + (f" ({throttle_reasons})" if throttle_reasons else "")


def gpu_kilojoules(run: RunLog) -> float | None:
    """Return the energy of all GPUs of all nodes between run_start and run_stop, by NVML: none of MLPerf's power.

    None where no power was read, or none during more than a tenth of the time.
    """
    joules, covered_seconds, nodes = 0.0, 0.0, by_node(run)
    for readings in nodes.values():
        powered = [(float(r["time"]), powers) for r in readings if (powers := _powers(r))]
        for (start, first), (end, last) in itertools.pairwise(powered):
            joules += (end - start) * (sum(first) + sum(last)) / 2
            covered_seconds += min(end - start, _GAP_SECONDS)
    total_seconds = (run.elapsed_minutes or 0.0) * 60 * len(nodes)
    return joules / 1000 if joules and covered_seconds >= _LEAST_SEEN * total_seconds else None


def _powers(reading: Reading) -> list[float]:
    return [gpu["power_watts"] for gpu in reading.get("gpus", ()) if gpu.get("power_watts") is not None]
