"""A machine with GPUs and no full data set trains on the toy data set, on the GPUs if something there can use them."""

from dataclasses import dataclass
from pathlib import Path

from encore import catalogue, data, paths
from encore import configuration as configurations
from encore.catalogue import Choice
from encore.containers import asking, checks, runtimes
from encore.errors import EncoreError
from encore.machine import preflight
from encore.machine.node import Node


@dataclass(frozen=True)
class ToyDataSet:
    system: str
    why: str


def is_meant(choice: Choice, machine: Node) -> bool:
    """Return whether a run without a named system and data set can only mean the toy data set."""
    if not machine.gpus:
        return False
    folder = paths.default_data(choice.benchmark.name)
    try:
        return data.read_passport(folder).name == choice.benchmark.small_data.name
    except EncoreError:
        # One that is half-written was meant to be another.
        return not (folder / data.PARTS).exists()


def choose(
    choice: Choice,
    machine: Node,
    ranks: int,
    round_name: str | None,
    settings: tuple[str, ...],
    place: tuple[str, str | None, Path | None],
) -> ToyDataSet:
    """Return the toy data set's system on the GPUs, or on the CPU with what keeps it from them.

    ``place`` is the runtime, image and Python that were named.
    """
    small, full = choice.benchmark.small_data, choice.benchmark.full_data.name
    runtime, image, python = place
    system = catalogue.find_system(choice, catalogue.ON_GPUS, round_name)
    resolved = configurations.resolve(choice, system, 1, ranks, list(settings))
    target = runtimes.choose(runtime, choice, machine, "gpu", image, python=python)
    target = asking.asked(target, choice, {}, ranks, start=False)
    found = [*preflight.check_devices(resolved, machine), *checks.check(target, resolved, machine, [])]
    problems = [check for check in found if check.level == "FAIL"]
    without = f"no {full} here: trains the toy data set, {small.name},"
    if not problems:
        return ToyDataSet(system.system, f"{without} on the GPUs ({target.python or target.image})")
    first = problems[0]
    return ToyDataSet(small.system, f"{without} on the CPU, since: {first.found}; for the GPUs: {first.hint}")
