"""What two files of one run say of the same thing, and must say alike: log, metrics, configuration, telemetry, system.

Whoever changes one of them has to change the others with it, to the second and the last digit.
"""

import filecmp
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from encore.files import json_objects, read_json, unix_time
from encore.results.logs.metrics import lines_of
from encore.results.logs.run_log import RunLog, read_run
from encore.run.run_folder import FINISHED, checksum

Contradiction = tuple[str, str, str]  # what contradicts, what one file says, what the other says

_CLOCKS = 5.0  # seconds by which times of one event may differ: the launcher's, rank 0's and telemetry's
_GAP = 15.0  # seconds without a reading of telemetry, which is one a second: a busy machine misses some


def contradictions(folder: Path) -> Iterator[Contradiction]:
    """Yield what contradicts in a run folder, or in what of it a bundle has."""
    passport = _object(folder / "run.json")
    yield from _of_passport(folder, passport)
    places = sorted(folder.glob("experiment_*"))
    if len(places) != len(passport["seeds"]):
        yield "experiments", f"{len(passport['seeds'])} seeds (run.json)", str(len(places))
    for place in places:
        with suppress(ValueError):
            yield from _of_experiment(folder, place, int(place.name.partition("_")[2]), passport)


def _of_passport(folder: Path, passport: dict[str, Any]) -> Iterator[Contradiction]:
    if checksum(passport) != passport.get("sha256"):
        yield "run.json was changed", str(passport.get("sha256")), checksum(passport)
    data, manifest = passport.get("data", {}), _object(folder / "dataset.json")
    if manifest and manifest.get("id") != data.get("id"):
        yield "dataset.json", f"{data.get('id')} (run.json)", str(manifest.get("id"))
    node, system = passport.get("node", {}), _object(folder / "system.json")
    gpus = node.get("gpus", [])
    on_gpu = _value(passport, "device") == "gpu"
    for key, said in {
        "number_of_nodes": str(passport.get("nodes")),
        "host_processor_model_name": node.get("cpu", ""),
        "host_processors_per_node": str(node.get("sockets") or ""),
        "host_processor_vcpu_count": str(node.get("cores", "")),
        "host_memory_capacity": f"{node['memory_gib']:g} GiB" if "memory_gib" in node else "",
        "accelerators_per_node": str(passport.get("ranks_per_node") if on_gpu and gpus else 0),
        "accelerator_model_name": gpus[0]["name"] if on_gpu and gpus else "",
        "accelerator_memory_capacity": f"{gpus[0]['memory_gib']:g} GiB" if on_gpu and gpus else "",
        "framework": passport.get("implementation", ""),
        "operating_system": node.get("operating_system", ""),
    }.items():
        if system.get(key) != said:
            yield f"system.json, {key}", f"{said} (run.json)", str(system.get(key))


def _of_experiment(folder: Path, place: Path, number: int, passport: dict[str, Any]) -> Iterator[Contradiction]:
    config, state = _object(place / "config.json"), _object(place / "state.json")
    for key in sorted(config.keys() | passport.get("configuration", {}).keys()):
        wanted = passport["seeds"][number] if key == "seed" else _value(passport, key)
        if config.get(key) != wanted:
            yield f"{place.name}/config.json, {key}", f"{wanted} (run.json)", str(config.get(key))
    published = folder / f"result_{number}.txt"
    if not published.exists():
        if state.get("status") in FINISHED:
            yield published.name, f"a log: {state['status']} (state.json)", "none"
        return
    if not filecmp.cmp(published, place / "result.txt", shallow=False):
        yield f"{published.name} is not {place.name}/result.txt", "one log", "two"
    log = read_run(published)
    if log.seeds and config.get("seed") not in log.seeds:
        yield f"{published.name}, seed", f"{config.get('seed')} (config.json)", str(log.seeds[0])
    if log.start_s is None or log.stop_s is None:
        if state.get("status") in FINISHED:
            yield f"{published.name}, its clock", f"a start and an end: {state['status']} (state.json)", log.explanation
        return
    records = list(json_objects(lines_of(place / "metrics.jsonl")))
    yield from _of_times(place, state, log, log.start_s, log.stop_s)
    # No telemetry is written in pods.
    if "kubernetes" not in passport:
        yield from _of_telemetry(place, parts_of(records, log.start_s, log.stop_s))
    yield from _of_metrics(place, log, records, log.start_s, log.stop_s)


def _of_times(place: Path, state: dict[str, Any], log: RunLog, start: float, stop: float) -> Iterator[Contradiction]:
    began, ended = (unix_time(state.get(name)) for name in ("started", "ended"))
    if began is None or ended is None or not (began - _CLOCKS <= start <= stop <= ended + _CLOCKS):
        yield (
            f"{log.path.name}, its clock",
            f"{state.get('started')} to {state.get('ended')} (state.json)",
            f"{start:.0f} to {stop:.0f}",
        )


def parts_of(records: Sequence[dict[str, Any]], start: float, stop: float) -> list[tuple[float, float]]:
    """Return from when to when ranks trained while the clock ran: a stop and a resume are between two of them."""
    parts, begin, last = [], start, start
    for each in records:
        time = each.get("time")
        if not isinstance(time, int | float):
            continue
        if each.get("kind") == "start" and each.get("resumed_step"):
            parts.append((begin, last))
            begin = time
        last = max(start, time)
    return [*parts, (begin, stop)]


# A node may join or leave where a run was resumed, and a lost one answers no more some time before it: each file has no
# gap where it has readings, and those of some node reach through each part.
def _of_telemetry(place: Path, parts: Sequence[tuple[float, float]]) -> Iterator[Contradiction]:
    paths = sorted(place.glob("telemetry*.jsonl"))
    read = {path.name: [each["time"] for each in json_objects(lines_of(path)) if _has_time(each)] for path in paths}
    for begin, end in parts:
        inside = {name: [time for time in times if begin < time < end] for name, times in read.items()}
        through = [_gap([begin, *times, end]) for times in inside.values()]
        shortest = min(through, default=end - begin)
        if not paths or shortest > _GAP:
            yield _gap_of(f"{place.name}/telemetry.jsonl", shortest)
        for name, times in inside.items():
            # Of the last part to its end, which each node comes to
            gap = _gap([begin, *times, *([end] if (begin, end) == parts[-1] else [])]) if times else 0.0
            if gap > max(_GAP, shortest):
                yield _gap_of(f"{place.name}/{name}", gap)
    for name, times in read.items():
        if times != sorted(times):
            yield f"{place.name}/{name}", "readings in the order of time", "another order"


def _has_time(reading: dict[str, Any]) -> bool:
    return isinstance(reading.get("time"), int | float)


def _gap(times: Sequence[float]) -> float:
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


def _gap_of(name: str, seconds: float) -> Contradiction:
    wanted = f"a reading each second, at most {_GAP:.0f} s apart"
    return f"{name} while the clock ran", wanted, f"{seconds:.0f} s without one"


# Rank 0 writes each evaluation to the log and to the metrics, with the times of both.
def _of_metrics(
    place: Path, log: RunLog, records: Sequence[dict[str, Any]], start: float, stop: float
) -> Iterator[Contradiction]:
    ends = [each for each in records if each.get("kind") == "end"]
    if not ends or not isinstance(ends[-1].get("time"), int | float) or abs(ends[-1]["time"] - stop) > _CLOCKS:
        yield (
            f"{place.name}/metrics.jsonl, its end",
            f"{stop:.0f} (the log)",
            str(ends[-1].get("time") if ends else "none"),
        )
    begins = [each["time"] for each in records if each.get("kind") == "start" and each.get("resumed_step") == 0]
    if not begins or abs(begins[-1] - start) > 6 * _CLOCKS:
        yield f"{place.name}/metrics.jsonl, its start", f"{start:.0f} (the log)", str(begins[-1] if begins else "none")
    evaluated = [each.get("qualities", {}) for each in records if each.get("kind") == "eval"]
    qualities = sorted(float(value) for each in evaluated for value in each.values())
    logged = sorted(value for quality in log.quality for value in quality.values.values())
    if len(qualities) != len(logged) or not all(map(_alike, qualities, logged)):
        yield f"{place.name}/metrics.jsonl, qualities", f"{logged[-3:]} (the log)", f"{qualities[-3:]}"
    reached = bool(ends) and ends[-1].get("outcome") == "reached"
    if reached != log.converged:
        yield (
            f"{place.name}/metrics.jsonl, outcome",
            f"{'reached' if log.converged else 'not reached'} (the log)",
            "another",
        )


def _alike(one: float, other: float) -> bool:
    # A log has shares or percentages, as its round wants them, and fewer digits.
    return any(math.isclose(factor * one, other, rel_tol=1e-3, abs_tol=1e-3) for factor in (1.0, 100.0, 0.01))


def _value(passport: dict[str, Any], key: str) -> Any:
    return passport.get("configuration", {}).get(key, {}).get("value")


def _object(path: Path) -> dict[str, Any]:
    found = read_json(path) if path.exists() else {}
    return found if isinstance(found, dict) else {}
