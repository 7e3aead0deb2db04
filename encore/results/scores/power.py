"""Energy per run set, from the power logs of some submissions since v4.0.

    from encore.results.scores.power import energy_of
    print(energy_of(score).kilojoules)

``power/result_0/node_0.txt`` contains node readings in watts, ``sw_0.txt`` an estimate for a switch. The mean covers
the counted runs, like mlperf-logging's result_summarizer, which prints joules and labels them kJ.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from encore.errors import EncoreError
from encore.results.logs.reader import Event, number_of, read_events
from encore.results.logs.run_log import RunLog
from encore.results.scores.score import Score, official

_NODE = re.compile(r"node_\d+\.txt")
_SWITCH = re.compile(r"sw_\d+\.txt")


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy of the counted runs of a set with power logs."""

    kilojoules: float | None
    official_kilojoules: float | None  # Times the factor of scaling.json
    watts: float | None  # Mean power while the counted runs trained
    nodes: int | None
    runs: Mapping[str, float | None]  # Kilojoules by file
    missing: str = ""  # Reason for the missing energy; empty with a value


def energy_of(score: Score) -> Energy | None:
    """Return the set's energy, or None without a power folder."""
    if not (score.folder / "power").is_dir():
        return None
    kilojoules: dict[str, float] = {}
    nodes: set[int] = set()
    reasons: dict[str, str] = {}
    for run in score.converged:
        try:
            joules, count = _run_energy(score.folder / "power" / run.path.name.split(".")[0], run)
            kilojoules[run.path.name] = joules / 1000
            nodes.add(count)
        except (EncoreError, OSError) as error:
            reasons[run.path.name] = str(error)
    counted_kilojoules = [kilojoules.get(run.path.name) for run in score.counted]
    values = [energy for energy in counted_kilojoules if energy is not None]
    missing = _missing(score, reasons, nodes)
    mean = (
        math.fsum(values) / len(values) if values and len(values) == len(counted_kilojoules) and not missing else None
    )
    return Energy(
        kilojoules=mean,
        official_kilojoules=official(mean, score.scaling_factor),
        watts=mean * 1000 / (score.score_minutes * 60) if mean is not None and score.score_minutes else None,
        nodes=max(nodes) if len(nodes) == 1 else None,
        runs={run.path.name: kilojoules.get(run.path.name) for run in score.converged},
        missing=missing,
    )


def _missing(score: Score, reasons: dict[str, str], nodes: set[int]) -> str:
    if score.score_minutes is None:
        return "the set has no score"
    lacking = [f"{run.path.name}: {reasons[run.path.name]}" for run in score.counted if run.path.name in reasons]
    several = f"the runs have power logs of {min(nodes)} to {max(nodes)} nodes" if len(nodes) > 1 else ""
    return "; ".join(lacking[:3]) or several


# Run energy in joules, and the number of nodes.
def _run_energy(folder: Path, run: RunLog) -> tuple[float, int]:
    if not folder.is_dir():
        raise EncoreError(f"no folder power/{folder.name}")
    files = sorted(folder.iterdir())
    nodes = [file for file in files if _NODE.fullmatch(file.name)]
    if not nodes:
        raise EncoreError(f"no node_0.txt in power/{folder.name}")
    seconds = (run.minutes or 0.0) * 60
    joules = sum(_node_energy(file, seconds) for file in nodes)
    return joules + sum(_switch_energy(file, seconds) for file in files if _SWITCH.fullmatch(file.name)), len(nodes)


# Joules: mean power during the measurement, times the scored time.
def _node_energy(file: Path, seconds: float) -> float:
    events = sorted(
        (event for event in read_events(file) if event.time_s is not None), key=lambda event: event.time_s or 0.0
    )
    start = next((event.time_s for event in events if event.key == "power_measurement_start"), None)
    if start is None:
        raise EncoreError(f"{file.parent.name}/{file.name} has no power_measurement_start")
    stop = next((event.time_s for event in events if event.key == "power_measurement_stop"), None)
    if stop is not None and stop <= start:
        raise EncoreError(f"{file.parent.name}/{file.name} stops measuring at the time of its start")
    readings = list(_readings(events, start, stop))
    end = stop if stop is not None else readings[-1][0] if readings else start
    if not readings or end <= start:
        raise EncoreError(f"{file.parent.name}/{file.name} has no power_reading after its start")
    ends = [start, *(time for time, _ in readings)]
    measured = math.fsum(watts * (time - previous) for (time, watts), previous in zip(readings, ends, strict=False))
    return _efficiency(events) * measured * seconds / (end - start)


def _readings(events: Sequence[Event], start: float, stop: float | None) -> Iterator[tuple[float, float]]:
    for event in events:
        watts = number_of(event.value) if event.key == "power_reading" else None
        if watts is not None and event.time_s is not None and start <= event.time_s <= (stop or math.inf):
            yield event.time_s, watts


def _efficiency(events: Sequence[Event]) -> float:
    values = (number_of(event.value) for event in reversed(events) if event.key == "conversion_eff")
    return next((value for value in values if value is not None), 1.0)


def _switch_energy(file: Path, seconds: float) -> float:
    events = list(read_events(file))
    watts = next((number_of(event.value) for event in events if event.key == "interconnect_power_est"), None)
    return (watts or 0.0) * _efficiency(events) * seconds
