"""Check every implementation on this machine, each check in a process of its own: what ``encore selftest`` does.

The checks are programs of the training code (``benchmarks/common/checks/selftest.py``) and bench.py; they run where a
training would: in an image, in a Python of the user's, or in the framework's own environment on a CPU.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from encore import catalogue, names
from encore.catalogue import Choice
from encore.errors import EncoreError
from encore.machine import links, telemetry
from encore.machine.node import Node
from encore.run.selftest_place import (
    CHECK_SECONDS,
    Place,
    Request,
    Row,
    execute,
    judged,
    make_place,
    prepare,
)
from encore.run.selftest_speed import (
    EVALUATION,
    INPUT,
    TELEMETRY,
    all_reduce_row,
    bench_row,
    evaluation_row,
    input_row,
    measure,
    telemetry_row,
)

BENCH, ALL_REDUCE, IMPORTS = "bench", "all-reduce", "imports"  # Checks that no implementation lists by itself
# What comes first, of all implementations: it says most, and the time may not suffice for all.
FIRST = (
    "device",
    "defaults",
    "defaults on all GPUs",
    ALL_REDUCE,
    BENCH,
    INPUT,
    EVALUATION,
    "overflow",
    "resume",
    "two ranks",
)


class Selftest:
    """All checks of a request: ``plan`` finds them, ``run`` makes them one after the other."""

    def __init__(self, request: Request, work: Path, machine: Node, on_step: Callable[[str], None]) -> None:
        self._request, self._work, self._machine, self._on_step = request, work, machine, on_step
        self._ends = time.monotonic() + request.time_limit
        self._telemetry = telemetry.Telemetry(work / "telemetry.jsonl")
        # What bench.py found of each implementation, or why it did not.
        self._benches: dict[str, dict[str, Any] | Row] = {}
        self._measured: set[str] = set()  # Frameworks whose all-reduce is planned
        self.skipped: list[Row] = []  # What was found while planning

    def plan(self) -> list[tuple[Place, str]]:
        """Return the checks with their places, in order; implementations that cannot run are in ``skipped``."""
        known = catalogue.choices()
        wanted = [catalogue.choose(name) for name in self._request.benchmarks] or list(known.values())
        found: list[tuple[Place, str]] = []
        for choice in wanted:
            self._on_step(f"{choice.name}: looking what there is")
            found += self._checks_of(choice)
        order = {name: number for number, name in enumerate(FIRST)}
        found.sort(key=lambda each: order.get(each[1], len(order)))
        if not found and not self.skipped:
            raise names.unknown("check", ", ".join(self._request.only), [*FIRST, TELEMETRY])
        return found

    def _checks_of(self, choice: Choice) -> list[tuple[Place, str]]:
        try:
            place = make_place(self._request, choice, self._machine, self._work)
            prepare(place)
        except EncoreError as error:
            hint = f"; hint: {error.hint}" if error.hint else ""
            self.skipped.append(Row(name=choice.name, check=IMPORTS, result="SKIPPED", found=f"{error.found}{hint}"))
            return []
        listed = execute(place.selftest("--list"), place.work, CHECK_SECONDS)
        if not isinstance(listed.answer, list):
            found = f"its checks cannot be listed: exit code {listed.code}"
            self.skipped.append(Row(name=choice.name, check=IMPORTS, result="FAIL", found=found, lines=listed.lines))
            return []
        # Collectives are the framework's, whatever it trains.
        framework = choice.implementation.framework
        more = (BENCH,) if framework in self._measured else (BENCH, ALL_REDUCE)
        self._measured.add(framework)
        return [(place, name) for name in (*listed.answer, *more) if self._wants(name)]

    def _wants(self, name: str) -> bool:
        return not self._request.only or name.startswith(self._request.only)

    def run(self, plan: Sequence[tuple[Place, str]], on_start: Callable[[str, str], None]) -> Iterator[Row]:
        """Yield the row of each check when it has ended, and the telemetry's at the end."""
        self._telemetry.start()
        ran = False
        try:
            for place, name in plan:
                on_start(place.choice.name, name)
                row = self._row(place, name)
                ran = ran or row.result == "OK"
                yield row
        finally:
            self._telemetry.stop()
        if self._wants(TELEMETRY) and ran:
            yield telemetry_row(self._work / "telemetry.jsonl", self._request.device)

    def _row(self, place: Place, name: str) -> Row:
        left = self._ends - time.monotonic()
        row = Row(name=place.choice.name, check=name, result="SKIPPED", found="")
        limit = f"the time limit of {self._request.time_limit:.0f} s"
        if left <= 0:
            return replace(row, found=f"{limit} was over", cut=True)
        seconds = min(left, self._request.check_seconds)
        started = time.monotonic()
        if name == BENCH or (name in (EVALUATION, INPUT) and self._request.device == "gpu"):
            row = self._measured_row(place, name, seconds, row)
        elif name == ALL_REDUCE:
            row = all_reduce_row(place, links.this_server(self._machine), self._machine, seconds, row)
        else:
            row = judged(execute(place.selftest("--check", name), place.work, seconds), place.work, seconds, row)
        if row.result == "FAIL" and time.monotonic() >= self._ends:
            row = replace(row, result="SKIPPED", found=f"{limit} ended it", lines=(), cut=True)
        return replace(row, seconds=time.monotonic() - started)

    def _measured_row(self, place: Place, name: str, seconds: float, row: Row) -> Row:
        # A row of bench.py, which runs once for all of them.
        choice, ran = place.choice, place.choice.name in self._benches
        result = self._benches[choice.name] if ran else measure(place, seconds, row)
        self._benches[choice.name] = result
        if isinstance(result, Row):
            return replace(row, found=f"{BENCH} failed") if ran else result
        gpu = self._machine.gpus[0].name if self._request.device == "gpu" else None
        if gpu is None or name == BENCH:
            return bench_row(result, choice, gpu, row)
        return {EVALUATION: evaluation_row, INPUT: input_row}[name](result, choice, gpu, row)
