"""Rows of `encore selftest` that are measurements, each with what it is compared with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from encore import configuration
from encore.machine.links import Server, all_reduce_floor
from encore.machine.node import Node
from encore.run import planning, published_speed
from encore.run.selftest_place import Place, Row, execute, judged

TELEMETRY = "telemetry"


def bench_row(place: Place, machine: Node, seconds: float, row: Row) -> Row:
    """Measure the step; on a GPU with the sizes of the nearest submitted system, next to what was published."""
    on_gpu = place.request.device == "gpu"
    resolved = place.configuration
    if on_gpu:
        system = planning.choose_system(place.choice, 1, machine, None, None)
        resolved = configuration.resolve(place.choice, system, 1, 1, [])
        real = place.work / "real"
        written = execute(place.selftest("--real-sizes", str(real)), place.work, seconds)
        if not isinstance(written.answer, bool):
            return judged(written, place.work, seconds, row)
        place = replace(place, data=real if written.answer else place.data)
    file = place.work / "bench.json"
    file.write_text(json.dumps(resolved.plain()), encoding="utf-8")
    counts = ("--steps", "20" if on_gpu else "2", "--repeats", "3" if on_gpu else "1")
    ended = execute(place.command("bench", "--config", str(file), "--data", str(place.data), *counts),
                    place.work, seconds)  # fmt: skip
    if not isinstance(ended.answer, dict):
        return judged(ended, place.work, seconds, row)
    measured = ended.answer["measured"]
    speed = measured.get("synthetic", measured["real"])["median"]
    found = f"{speed:,.0f} samples/s: {ended.answer['title']}"
    if on_gpu:
        found += published_speed.beside(place.choice.benchmark.name, machine.gpus[0].name, speed)
    return replace(row, result="OK", found=found)


def all_reduce_row(place: Place, server: Server, machine: Node, seconds: float, row: Row) -> Row:
    """Measure the framework's own all-reduce between all GPUs, next to the least that their links must give."""
    if place.all_ranks < 2:
        return replace(row, found="one GPU: there is no other to exchange with")
    framework, file = place.choice.implementation.framework, place.work / "all_reduce.json"
    what = ("--framework", framework, "--device", place.request.device, "--output", str(file))
    command = place.render(*place.launch(place.all_ranks).inner, "python", "-m", "benchmarks.common.all_reduce", *what)
    ended = execute(command, place.work, seconds)
    if ended.code != 0 or not file.is_file():
        return judged(ended, place.work, seconds, row)
    rate = json.loads(file.read_text(encoding="utf-8"))["rate"]
    found = f"{rate / 1e9:,.2f} GB/s bus bandwidth between {place.all_ranks} ranks"
    # The links of GPUs that CUDA does not show say nothing of those that it shows.
    floor = all_reduce_floor(server, machine.gpus[0].compute_capability) if place.gpus == len(server.gpus) > 1 else None
    if floor is None:
        return replace(row, result="OK", found=f"{found}; no floor known for these links")
    least, why = floor
    found = f"{found}; at least {least / 1e9:,.1f} by {why}"
    return replace(row, result="OK" if rate >= least else "FAIL", found=found)


def telemetry_row(path: Path, device: str) -> Row:
    """Return whether the readings that were taken meanwhile are complete."""
    row = Row(name="", check=TELEMETRY, result="SKIPPED", found="")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    readings = [json.loads(line) for line in lines]
    if not readings:
        return replace(row, result="FAIL", found="no reading")
    gpus = [reading["gpus"] for reading in readings]
    if device == "cpu":
        return replace(row, result="OK", found=f"{len(readings)} readings of the machine, none of a GPU (--device cpu)")
    names_of_none = {name for each in gpus for gpu in each for name, value in gpu.items() if value is None}
    busy = max((gpu["use_percent"] or 0 for each in gpus for gpu in each), default=0)
    used = max((gpu["memory_mib"] or 0 for each in gpus for gpu in each), default=0)
    found = f"{len(readings)} readings; a GPU was used up to {busy} % with {used:,} MiB"
    if names_of_none:
        found += f"; not given by NVML: {', '.join(sorted(names_of_none))}"
    return replace(row, result="OK" if busy and used else "FAIL", found=found)
