"""Consistency of values that are recorded in multiple run files: log, metrics, configuration, telemetry, system.

A forged value must match in all files, to the second and to the last digit.
"""

import filecmp
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from encore.files import json_objects, read_json, unix_time
from encore.results.audit.anomalies import OFF_THE_CLOCK
from encore.results.logs.metrics import lines_of
from encore.results.logs.run_log import RunLog, read_run
from encore.run.run_folder import FINISHED, checksum

Contradiction = tuple[str, str, str]  # quantity, value in the first file, value in the second file

_CLOCKS = 5.0  # maximum difference in seconds between event records: the launcher's, rank 0's and telemetry's
_SHUTDOWN = 120.0  # seconds from the last evaluation to run_stop, and from there to the exit of all ranks
_WINDOW = 0.02  # maximum relative difference between a rank's step-time window and the time between two records
_GAP = 15.0  # seconds without a reading of telemetry, which is one a second: a busy machine misses some


def contradictions(folder: Path) -> Iterator[Contradiction]:
    """Yield the contradictions in a run folder, or in the files of it that are in a bundle."""
    passport = _object(folder / "run.json")
    yield from _check_run_record(folder, passport)
    experiments = sorted(folder.glob("experiment_*"))
    if len(experiments) != len(passport["seeds"]):
        yield "experiments", f"{len(passport['seeds'])} seeds (run.json)", str(len(experiments))
    for experiment in experiments:
        with suppress(ValueError):
            yield from _check_experiment(folder, experiment, int(experiment.name.partition("_")[2]), passport)


def _check_run_record(folder: Path, passport: dict[str, Any]) -> Iterator[Contradiction]:
    if checksum(passport) != passport.get("sha256"):
        yield "run.json was changed", str(passport.get("sha256")), checksum(passport)
    data, manifest = passport.get("data", {}), _object(folder / "dataset.json")
    if manifest and manifest.get("id") != data.get("id"):
        yield "dataset.json", f"{data.get('id')} (run.json)", str(manifest.get("id"))
    node, system = passport.get("node", {}), _object(folder / "system.json")
    gpus = node.get("gpus", [])
    on_gpu = _value(passport, "device") == "gpu"
    for key, claimed in {
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
        if system.get(key) != claimed:
            yield f"system.json, {key}", f"{claimed} (run.json)", str(system.get(key))


def _check_experiment(folder: Path, experiment: Path, number: int, passport: dict[str, Any]) -> Iterator[Contradiction]:
    config, state = _object(experiment / "config.json"), _object(experiment / "state.json")
    for key in sorted(config.keys() | passport.get("configuration", {}).keys()):
        expected = passport["seeds"][number] if key == "seed" else _value(passport, key)
        if config.get(key) != expected:
            yield f"{experiment.name}/config.json, {key}", f"{expected} (run.json)", str(config.get(key))
    published = folder / f"result_{number}.txt"
    if not published.exists():
        if state.get("status") in FINISHED:
            yield published.name, f"a log: {state['status']} (state.json)", "none"
        return
    if not filecmp.cmp(published, experiment / "result.txt", shallow=False):
        yield f"{published.name} is not {experiment.name}/result.txt", "one log", "two"
    log = read_run(published)
    if log.seeds and config.get("seed") not in log.seeds:
        yield f"{published.name}, seed", f"{config.get('seed')} (config.json)", str(log.seeds[0])
    if log.start_s is None or log.stop_s is None:
        if state.get("status") in FINISHED:
            yield f"{published.name}, clock", f"a start and an end: {state['status']} (state.json)", log.explanation
        return
    records = list(json_objects(lines_of(experiment / "metrics.jsonl")))
    steps = {
        f"{experiment.name}/steps/{path.name}": list(json_objects(lines_of(path)))
        for path in sorted(experiment.glob("steps/rank_*.jsonl"))
    }
    streams = {f"{experiment.name}/metrics.jsonl": records, **steps}
    infinite = [error for name, lines in streams.items() for error in _nonfinite(name, lines)]
    yield from infinite
    if infinite:
        return
    began, end_time = (unix_time(state.get(name)) for name in ("started", "ended"))
    if began is None or end_time is None or not began - _CLOCKS <= log.start_s <= log.stop_s <= end_time + _CLOCKS:
        yield (
            f"{published.name}, clock",
            f"{state.get('started')} to {state.get('ended')} (state.json)",
            f"{log.start_s:.0f} to {log.stop_s:.0f}",
        )
    parts = training_intervals(records, log.start_s, log.stop_s)
    # No telemetry is written in pods.
    if "kubernetes" not in passport:
        yield from _check_telemetry(experiment, parts)
    yield from _check_metrics(experiment, log, records, log.start_s, log.stop_s)
    yield from _check_evaluations(experiment, log, records, log.stop_s)
    yield from _check_sizes(experiment, log, records, passport)
    yield from _check_end(experiment, state, records, steps)
    yield from _check_steps(steps, is_resumed=len(parts) > 1)


def training_intervals(records: Sequence[dict[str, Any]], start: float, stop: float) -> list[tuple[float, float]]:
    """Return the intervals in which ranks trained while the clock ran, separated by a stop and resume."""
    parts, part_start, last = [], start, start
    for record in filter(_has_time, records):
        if record.get("kind") == "start" and record.get("resumed_step"):
            parts.append((part_start, last))
            part_start = record["time"]
        last = max(start, record["time"])
    return [*parts, (part_start, stop)]


# Nodes may join or leave when a run is resumed, and a lost node stops reporting some time earlier. No file may have a
# gap between readings, and the readings of at least one node must cover each interval.
def _check_telemetry(experiment: Path, parts: Sequence[tuple[float, float]]) -> Iterator[Contradiction]:
    paths = sorted(experiment.glob("telemetry*.jsonl"))
    read = {path.name: _times(path) for path in paths}
    for part_start, end in parts:
        inner_times = {name: [time for time in times if part_start < time < end] for name, times in read.items()}
        through = [_gap([part_start, *times, end]) for times in inner_times.values()]
        shortest = min(through, default=end - part_start)
        if not paths or shortest > _GAP:
            yield _gap_contradiction(f"{experiment.name}/telemetry.jsonl", shortest)
        for name, times in inner_times.items():
            # Up to the end of the last interval, which all nodes reach
            gap = _gap([part_start, *times, *([end] if (part_start, end) == parts[-1] else [])]) if times else 0.0
            if gap > max(_GAP, shortest):
                yield _gap_contradiction(f"{experiment.name}/{name}", gap)
    for name, times in read.items():
        if times != sorted(times):
            yield f"{experiment.name}/{name}", "readings in the order of time", "another order"


def _has_time(reading: dict[str, Any]) -> bool:
    return isinstance(reading.get("time"), int | float)


def _times(path: Path) -> list[float]:
    return [record["time"] for record in json_objects(lines_of(path)) if _has_time(record)]


def _gap(times: Sequence[float]) -> float:
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


def _gap_contradiction(name: str, seconds: float) -> Contradiction:
    expected = f"one reading per second, maximum {_GAP:.0f} s between readings"
    return f"{name} while the clock ran", expected, f"{seconds:.0f} s without one"


# Rank 0 writes evaluations to both the log and the metrics, with both times.
def _check_metrics(
    experiment: Path, log: RunLog, records: Sequence[dict[str, Any]], start: float, stop: float
) -> Iterator[Contradiction]:
    ends = [record for record in records if record.get("kind") == "end"]
    # Minigo runs evaluation games after run_stop
    latest = math.inf if log.benchmark in OFF_THE_CLOCK else stop + _CLOCKS
    name, end = f"{experiment.name}/metrics.jsonl", ends[-1] if ends else {}
    if not _has_time(end) or not stop - _CLOCKS <= end["time"] <= latest:
        yield f"{name}, end", f"{stop:.0f} (the log)", str(end.get("time", "none"))
    begins = [record["time"] for record in records if record.get("kind") == "start" and record.get("resumed_step") == 0]
    if not begins or abs(begins[-1] - start) > 6 * _CLOCKS:
        yield f"{name}, start", f"{start:.0f} (the log)", str(begins[-1] if begins else "none")
    evaluated = [record.get("qualities", {}) for record in records if record.get("kind") == "eval"]
    qualities = sorted(float(value) for record in evaluated for value in record.values())
    logged = sorted(value for quality in log.quality for value in quality.values.values())
    if len(qualities) != len(logged) or not all(map(_is_close, qualities, logged)):
        yield f"{name}, qualities", f"{logged[-3:]} (the log)", f"{qualities[-3:]}"
    if (end.get("outcome") == "reached") != log.converged:
        yield f"{name}, outcome", f"{'reached' if log.converged else 'not reached'} (the log)", "another"


def _check_evaluations(
    experiment: Path, log: RunLog, records: Sequence[dict[str, Any]], stop: float
) -> Iterator[Contradiction]:
    name = f"{experiment.name}/metrics.jsonl"
    evaluations = [record for record in records if record.get("kind") == "eval"]
    pairs = list(zip(log.quality, evaluations, strict=False))
    for point, record in pairs:
        if point.time_s is not None and abs(record["time"] - point.time_s) > _CLOCKS:
            yield f"{name}, evaluation time", f"{point.time_s:.0f} (the log)", f"{record['time']:.0f}"
    epochs = [(point.epoch, record.get("epoch")) for point, record in pairs]
    shifts = {logged - epoch for logged, epoch in epochs if logged is not None and epoch is not None}
    is_numbered = all(logged is not None and logged == int(logged) for logged, _ in epochs)
    if is_numbered and len({epoch for _, epoch in epochs}) == len(epochs) and len(shifts) > 1:
        yield f"{name}, epochs", f"{[logged for logged, _ in epochs]} (the log)", f"{[epoch for _, epoch in epochs]}"
    started = sum(phase.name == "eval_start" for phase in log.phases)
    is_resumed = any(record.get("resumed_step") for record in records)
    if started > len(log.quality) and not is_resumed:
        yield f"{log.path.name}, evaluations", f"{started} (eval_start)", f"{len(log.quality)} (eval_accuracy)"
    last = log.quality[-1].time_s if log.quality else None
    if last is not None and log.benchmark not in OFF_THE_CLOCK and not last - _CLOCKS <= stop <= last + _SHUTDOWN:
        yield f"{log.path.name}, run_stop", f"after the last evaluation at {last:.0f}", f"{stop:.0f}"


def _check_sizes(
    experiment: Path, log: RunLog, records: Sequence[dict[str, Any]], passport: dict[str, Any]
) -> Iterator[Contradiction]:
    start = next((record for record in records if record.get("kind") == "start"), {})
    ranks, name = passport["nodes"] * passport["ranks_per_node"], f"{experiment.name}/metrics.jsonl"
    if start.get("ranks", ranks) != ranks and not any(record.get("resumed_step") for record in records):
        yield f"{name}, ranks", f"{ranks} (run.json)", str(start["ranks"])
    batch, rank_batch = start.get("global_batch_size"), _value(passport, "batch_size")
    if batch is None or rank_batch is None or start.get("batch_unit") != "samples":
        return
    if log.global_batch is not None and log.global_batch != batch:
        yield f"{name}, global batch", f"{log.global_batch:.0f} (the log)", str(batch)
    if batch % rank_batch or batch // rank_batch > ranks:
        yield f"{name}, global batch", f"a multiple of {rank_batch}, for up to {ranks} ranks (run.json)", str(batch)


# A shortened log also requires shortening all process records after the new end.
def _check_end(
    experiment: Path, state: dict[str, Any], records: Sequence[dict[str, Any]], steps: dict[str, list[dict[str, Any]]]
) -> Iterator[Contradiction]:
    end = next((record["time"] for record in reversed(records) if record.get("kind") == "end"), None)
    end_time = unix_time(state.get("ended"))
    if end is None or end_time is None:
        return
    if end_time > end + _SHUTDOWN:
        yield (
            f"{experiment.name}/state.json, ended",
            f"at most {_SHUTDOWN:.0f} s after {end:.0f} (metrics.jsonl)",
            f"{end_time:.0f}",
        )
    times = [record["time"] for record in records if _has_time(record)]
    if max(times) > end + _CLOCKS or any(later < earlier - _CLOCKS for earlier, later in itertools.pairwise(times)):
        yield (
            f"{experiment.name}/metrics.jsonl",
            f"records in the order of time, up to the end at {end:.0f}",
            "another order",
        )
    for name, lines in steps.items():
        latest = max((line["time"] for line in lines), default=end)
        if latest > end + _CLOCKS:
            yield name, f"no step after {end:.0f} (metrics.jsonl)", f"{latest:.0f}"
    for path in sorted(experiment.glob("telemetry*.jsonl")):
        latest = max(_times(path), default=end)
        if latest > min(end_time + _CLOCKS, end + _SHUTDOWN):
            yield f"{experiment.name}/{path.name}", f"no reading after {end_time:.0f} (state.json)", f"{latest:.0f}"


def _check_steps(steps: dict[str, list[dict[str, Any]]], *, is_resumed: bool) -> Iterator[Contradiction]:
    for name, lines in steps.items():
        for earlier, later in itertools.pairwise(lines):
            between, window = later["time"] - earlier["time"], later["window"]
            slack = 1.0 + _WINDOW * abs(between)
            if window > between + slack or (window < between - slack and not is_resumed):
                yield (
                    f"{name}, window",
                    f"{between:.1f} s since the last record",
                    f"{window:.1f} s",
                )
                break


def _nonfinite(name: str, records: Sequence[dict[str, Any]]) -> Iterator[Contradiction]:
    # A diverged run has losses that are not finite
    for record in records:
        values = {**record, **record["qualities"]} if isinstance(record.get("qualities"), dict) else record
        for key, value in values.items():
            if isinstance(value, float) and not math.isfinite(value) and "loss" not in key:
                yield f"{name}, {key}", "a finite number", str(value)
                return


def _is_close(first: float, second: float) -> bool:
    # Logs have fractions or percentages, as the round requires, with fewer digits.
    return any(math.isclose(factor * first, second, rel_tol=1e-3, abs_tol=1e-3) for factor in (1.0, 100.0, 0.01))


def _value(passport: dict[str, Any], key: str) -> Any:
    return passport.get("configuration", {}).get(key, {}).get("value")


def _object(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.exists() else {}
    return content if isinstance(content, dict) else {}
