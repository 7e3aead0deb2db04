"""Measure how often the audit detects planted errors of speeds and accelerators, and fires without one.

    python -m tools.planted_speeds
    python -m tools.planted_speeds training_results_v0.5 training_results_v0.6   # and so on to v5.1

A set is compared with the digests of the other public sets, as if it was unpublished. With folders, contradictions in
the first log and the system description of each set are included (contradicted_system, faster_than_stated,
slower_than_stated); nodes are compared with nodes of other submitters.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from encore.results.audit import logs
from encore.results.audit.plausibility import MARGIN, contradictions
from encore.results.audit.published_runs import PublicSpeed, largest_node, public_speeds, speed_range
from encore.results.logs.run_log import RunLog, read_run
from encore.results.published.published import System
from encore.results.published.systems import model_of, nearest_description
from encore.results.rules import later_name
from tools import run

FACTORS = (2, 4, 8)
Key = tuple[str, str]


def planted(key: Key, speed: PublicSpeed, best: dict[Key, float]) -> Iterator[tuple[str, Key, int, float]]:
    # Yield error, and stated key, number of accelerators and rate
    for factor in FACTORS:
        yield f"speed or unit {factor} times overstated", key, speed.accelerators, factor * speed.rate
        yield f"speed or unit {factor} times understated", key, speed.accelerators, speed.rate / factor
        if speed.accelerators >= factor:
            yield f"accelerators / {factor}", key, speed.accelerators // factor, factor * speed.rate
        yield f"accelerators x {factor}", key, speed.accelerators * factor, speed.rate / factor
        for other, rate in best.items():
            if other[0] == key[0] and 1 / 2 < rate * factor / best[key] <= 1:
                yield f"platform {factor} to {2 * factor} times slower", other, speed.accelerators, speed.rate


def outliers(key: Key, accelerators: int, rate: float, name: str) -> tuple[bool, bool]:
    # Whether above_published and below_published fire
    slowest, fastest = speed_range(key, accelerators, without=name)
    above = fastest is not None and rate > MARGIN * fastest.rate
    return above, slowest is not None and rate * MARGIN < slowest.rate


def print_speeds() -> None:
    tries, above, below = (Counter[str]() for _ in range(3))
    speeds = public_speeds()
    best = {key: max(speed.rate for speed in group) for key, group in speeds.items()}
    for key, group in speeds.items():
        for speed in group:
            no_error = ("no error", key, speed.accelerators, speed.rate)
            for name, stated, accelerators, rate in (no_error, *planted(key, speed, best)):
                is_above, is_below = outliers(stated, accelerators, rate, speed.name)
                tries[name] += 1
                above[name] += is_above
                below[name] += is_below
    for name, count in tries.items():
        print(f"| {name} | {count} | {above[name] / count:.1%} | {below[name] / count:.1%} |")


def planted_systems(
    system: System, key: Key | None, best: dict[Key, float]
) -> Iterator[tuple[str, System, Key | None, float]]:
    # Yield error, description, benchmark with accelerator model, and the factor of the speed by the timestamps
    nodes, per_node = system.nodes or 0, system.accelerators_per_node or 0
    yield from (("no error", system, key, 1.0), ("times / 2", system, key, 2.0), ("times x 2", system, key, 0.5))
    numbers = {"nodes x 2": (2 * nodes, per_node), "accelerators per node x 2": (nodes, 2 * per_node)}
    numbers |= {"nodes / 2": (nodes // 2, per_node), "accelerators per node / 2": (nodes, per_node // 2)}
    for error, (number, in_node) in numbers.items():
        if number and in_node:
            yield error, replace(system, nodes=number, accelerators_per_node=in_node), key, 1.0
    for other, rate in best.items():
        if key and other[0] == key[0]:
            described = replace(system, accelerator=other[1])
            yield from [("a platform half as fast or slower", described, other, 1.0)] if 2 * rate <= best[key] else []
            yield from [("a platform twice as fast or faster", described, other, 1.0)] if rate >= 2 * best[key] else []


def scaled(log: RunLog, factor: float) -> RunLog:
    # The log with stated speeds that the timestamps are ``factor`` times as fast as
    figures = [
        figure._replace(value=figure.value * factor if "time" in figure.name else figure.value / factor)
        for figure in log.stated
    ]
    return replace(log, stated=figures) if factor != 1 else log


def print_contradictions(roots: list[Path]) -> None:
    tries, contradicted, detected = (Counter[str]() for _ in range(3))
    best = {key: max(speed.rate for speed in group) for key, group in public_speeds().items()}
    public = {(speed.name, key[0]): (key, speed) for key, group in public_speeds().items() for speed in group}
    firsts = {
        path.parent: path for root in roots for path in sorted(root.rglob("results/**/result_*.txt"), reverse=True)
    }
    for folder, path in firsts.items():
        system = nearest_description(folder)
        log = read_run(path, re.findall(r"v\d\.\d", str(folder))[0])
        if system is None or not system.nodes or not system.accelerators_per_node:
            continue
        submitter = f"{log.round}/{folder.parents[2].name}/"
        name = f"{submitter}{folder.parent.name}"
        key, speed = public.get((name, later_name(log.benchmark, log.round) or ""), (None, None))
        places = (log.platform or "", folder.parent.name)
        total = system.nodes * system.accelerators_per_node
        for error, described, planted_key, factor in planted_systems(system, key, best):
            clocked, count = scaled(log, factor), (described.nodes or 0) * (described.accelerators_per_node or 0)
            largest = largest_node(model_of(described.accelerator), without=submitter)
            found = any(contradictions(described, places, log, largest)) or any(
                next(rule(clocked), None) for rule in (logs.faster_than_stated, logs.slower_than_stated)
            )
            rate = speed.rate * factor * total / count if speed else 0.0
            tries[error] += 1
            contradicted[error] += found
            detected[error] += found or (planted_key is not None and any(outliers(planted_key, count, rate, name)))
            if found and error == "no error":
                print("false alarm:", folder)
    for error, number in tries.items():
        print(f"| {error} | {number} | {contradicted[error] / number:.1%} | {detected[error] / number:.1%} |")


def main(roots: Annotated[list[Path] | None, typer.Argument()] = None) -> None:
    if roots:
        print_contradictions(roots)
    else:
        print_speeds()


if __name__ == "__main__":
    run(main, __doc__)
