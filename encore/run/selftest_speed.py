"""Rows of `encore selftest` that are measurements, each with what it is compared with."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from encore.catalogue import Choice
from encore.machine.links import Server, all_reduce_floor
from encore.machine.node import Node
from encore.run import published_speed
from encore.run.published_speed import LEAST_SHARE
from encore.run.selftest_place import FULL, Place, Row, execute, judged

EVALUATION, INPUT, TELEMETRY = "evaluation", "input", "telemetry"


def measure(place: Place, seconds: float, row: Row) -> dict[str, Any] | Row:
    """Run bench.py, on a GPU with the sizes of the nearest submitted system; return its answer, or how it failed."""
    on_gpu, config = place.request.device == "gpu", place.work / "config.json"
    if on_gpu:
        config, real = place.work / FULL, place.work / "real"
        written = execute(place.selftest("--real-sizes", str(real)), place.work, seconds)
        if not isinstance(written.answer, bool):
            return judged(written, place.work, seconds, row)
        place = replace(place, data=real if written.answer else place.data)
    counts = ("--steps", "20" if on_gpu else "2", "--repeats", "3" if on_gpu else "1")
    command = place.command("bench", "--config", str(config), "--data", str(place.data), "--any-data", *counts)
    ended = execute(command, place.work, seconds)
    return ended.answer if isinstance(ended.answer, dict) else judged(ended, place.work, seconds, row)


def bench_row(result: Mapping[str, Any], choice: Choice, gpu: str | None, row: Row) -> Row:
    speeds = _speeds(result)
    loop = "synthetic" if "synthetic" in speeds else "real"
    found = f"{speeds[loop]:,.0f} samples/s: {result['title']}"
    if gpu is None:
        return replace(row, result="OK", found=found)
    return _compared(
        choice,
        gpu,
        loop,
        speeds[loop],
        found + published_speed.next_to_published(choice.benchmark.name, gpu, speeds[loop]),
        row,
    )


def evaluation_row(result: Mapping[str, Any], choice: Choice, gpu: str, row: Row) -> Row:
    speed = _speeds(result)[EVALUATION]
    return _compared(choice, gpu, EVALUATION, speed, f"{speed:,.0f} samples/s with the full network", row)


def input_row(result: Mapping[str, Any], choice: Choice, gpu: str, row: Row) -> Row:
    """Return whether the input of JPEGs of real size is as fast as the step that it feeds."""
    speeds = _speeds(result)
    read, step, real = (speeds[loop] for loop in ("input", "synthetic", "real"))
    share = f"{read / step:.0%}" + (f", less than {LEAST_SHARE:.0%}" if read < LEAST_SHARE * step else "")
    waits = f"{result['input_share']:.0%} of the time waiting"
    found = f"{read:,.0f} images/s of real size; the step takes {step:,.0f}: {share}; both {real:,.0f}, {waits}"
    compared = _compared(choice, gpu, "real", real, found, row)
    return compared if read >= LEAST_SHARE * step else replace(compared, result="FAIL")


def _speeds(result: Mapping[str, Any]) -> dict[str, float]:
    return {name: each["median"] for name, each in result["measured"].items()}


def _compared(choice: Choice, gpu: str, loop: str, speed: float, found: str, row: Row) -> Row:
    is_slow, before = published_speed.compare_measured(choice, gpu, loop, speed)
    return replace(row, result="FAIL" if is_slow else "OK", found=found + before)


def all_reduce_row(place: Place, server: Server, machine: Node, seconds: float, row: Row) -> Row:
    """Measure the framework's own all-reduce between all GPUs, next to the least that their links must give."""
    if place.all_ranks < 2:
        return replace(row, found="one GPU: there is no other to exchange with")
    framework, file = place.choice.implementation.framework, place.work / "all_reduce.json"
    what = ("--framework", framework, "--device", place.request.device, "--output", str(file))
    command = place.render(
        *place.launch(place.all_ranks).inner, "python", "-m", "benchmarks.common.checks.all_reduce", *what
    )
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
