"""What a machine is, and how fast its links are: measured, drawn and tabulated.

    from encore.lab.studies.machine_links import describe
    machine = describe(node.this_node(), ranks=2, on_step=print)

The bandwidths are those of ranks that exchange data as a training does; where nccl-tests is installed, its all-reduce
and all-to-all are measured as well.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from encore import catalogue, environment, launchers
from encore.containers import renderers
from encore.errors import EncoreError, ExitCode
from encore.job import Job
from encore.machine import links
from encore.machine.links import Server
from encore.machine.node import Node
from encore.results.report.figures import Figure, over_gpus
from encore.results.table import Cell, Table

FILE = "machine.json"
NCCL_TESTS = {"all-reduce": "all_reduce_perf", "all-to-all": "alltoall_perf"}
_SECONDS = 600
_ROW = re.compile(r"\s*(\d+)\s+\d+\s+\w+\s+\S+\s+-?\d+\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)")


@dataclass(frozen=True)
class Machine:
    server: Server
    # What benchmarks/common/checks/link_speeds.py wrote; empty where nothing was measured.
    speeds: Mapping[str, Any] = field(default_factory=dict)
    # Bytes and bus bandwidth in bytes per second by nccl-tests, by kind.
    by_tool: Mapping[str, list[list[float]]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"server": self.server.as_json(), "speeds": dict(self.speeds), "nccl_tests": dict(self.by_tool)}


def load_machine(path: Path) -> Machine:
    """Return what ``encore study machine`` wrote into a folder or file."""
    file = path / FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Machine(links.from_json(content["server"]), content["speeds"], content["nccl_tests"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EncoreError(
            f"{file} is no description of a machine: {error}", expected=FILE, hint="encore study machine -o FOLDER"
        ) from error


def describe(machine: Node, ranks: int, on_step: Callable[[str], None], python: Path | None = None) -> Machine:
    """Return this machine; with two or more ranks also what they measure."""
    server = links.this_server(machine)
    if ranks < 2:
        return Machine(server)
    return Machine(server, measure(machine, ranks, on_step, python), nccl_tests(ranks) if machine.gpus else {})


def own_framework() -> str:
    """Return the framework whose library measures machines and counts steps: the one that brings its own launcher."""
    frameworks = sorted({choice.implementation.framework for choice in catalogue.choices().values()})
    return next(name for name in frameworks if not launchers.by_horovod(name))


def measure(machine: Node, ranks: int, on_step: Callable[[str], None], python: Path | None = None) -> dict[str, Any]:
    """Start ranks that exchange data; on a machine without GPUs they are on the CPU."""
    framework = own_framework()
    program = python or environment.ensure_environment(framework, on_step)
    threads = {} if machine.gpus else {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="encore-links-") as folder:
        launch = launchers.on_one_node(framework, ranks, folder)
        result = Path(folder) / "links.json"
        where = ("--device", "gpu" if machine.gpus else "cpu", "--output", str(result))
        job = Job(
            argv=(*launch.inner, "python", "-m", "benchmarks.common.checks.link_speeds", *where),
            environment={"PYTHONUNBUFFERED": "1", **launch.environment, **threads},
            mounts=(),
            ranks=ranks,
            gpus=ranks if machine.gpus else 0,
        )
        command = renderers.host(job, program, os.environ, given=python is not None)
        done = subprocess.run(
            command.argv, env=dict(command.environment), cwd=command.working_directory, stdout=subprocess.PIPE,
            text=True, check=False, timeout=_SECONDS,
        )  # fmt: skip
        if done.returncode != 0 or not result.is_file():
            raise EncoreError(
                f"the ranks ended with exit code {done.returncode}",
                hint="read their output above, or leave out the number of GPUs: it then measures nothing",
                exit_code=ExitCode.FAILED,
            )
        measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return measured


def nccl_tests(gpus: int) -> dict[str, list[list[float]]]:
    """Return what nccl-tests measures from 64 KiB to 256 MiB; empty where it is not installed or fails."""
    found = {}
    for kind, program in NCCL_TESTS.items():
        if shutil.which(program) is None:
            continue
        command = [program, "-b", "64K", "-e", "256M", "-f", "16", "-g", str(gpus)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            found[kind] = parse_nccl_tests(done.stdout)
    return found


def parse_nccl_tests(text: str) -> list[list[float]]:
    """Return bytes and bus bandwidth in bytes per second of each row, out of place."""
    rows = (_ROW.match(line) for line in text.splitlines() if not line.startswith("#"))
    return [[float(row[1]), float(row[4]) * 1e9] for row in rows if row is not None]


def pairs_table(machine: Machine) -> Table:
    """Return the bandwidth from each rank to each other, with the link between them."""
    pairs = machine.speeds.get("pairs") or []
    names = [f"rank {number}" for number in range(len(pairs))]
    rows = [
        (name, *(value / 1e9 if value is not None else None for value in row))
        for name, row in zip(names, pairs, strict=True)
    ]
    size = machine.speeds.get("pair_bytes", 0) / 2**20
    return Table(
        title=f"Bandwidth between two ranks of {machine.server.name}, GB/s",
        columns=("from", *names),
        formats=dict.fromkeys(names, ".2f"),
        rows=tuple(rows),
        note=f"{size:.0f} MiB sent through {machine.speeds.get('backend', '?').upper()}, row to column, one way.",
    )


def peer_table(machine: Machine) -> Table:
    """Return which GPUs read each other's memory without the host."""
    access = machine.speeds.get("peer_access") or []
    names = [f"GPU{number}" for number in range(len(access))]
    rows = tuple((name, *("yes" if each else "no" for each in row)) for name, row in zip(names, access, strict=True))
    return Table(title=f"Peer access on {machine.server.name}", columns=("GPU", *names), rows=rows)


def collectives_table(machine: Machine) -> Table:
    """Return the time and the bus bandwidth of all-reduce and all-to-all by size."""
    rows: list[tuple[Cell, ...]] = [
        (each["kind"], int(each["bytes"]), each["seconds"] * 1e6, each["rate"] / 1e9, machine.speeds["backend"])
        for each in machine.speeds.get("collectives", ())
    ]
    rows += [
        (kind, int(size), None, rate / 1e9, "nccl-tests")
        for kind, measured in machine.by_tool.items()
        for size, rate in measured
    ]
    return Table(
        title=f"Exchange between {machine.speeds.get('ranks', 0)} ranks of {machine.server.name}",
        columns=("kind", "bytes", "microseconds", "GB/s", "by"),
        formats={"microseconds": ".1f", "GB/s": ".3f"},
        rows=tuple(rows),
        note="GB/s: bus bandwidth, as nccl-tests counts it, which does not depend on the number of ranks.",
    )


def speeds_figure(machine: Machine) -> Figure | None:
    table = collectives_table(machine)
    lines: dict[str, list[tuple[float, float]]] = {}
    for kind, size, _, rate, by in table.rows:
        lines.setdefault(f"{kind}, {by}", []).append((float(size or 0) / 2**20, float(rate or 0.0)))
    if not lines:
        return None
    title = table.title
    figure = over_gpus("links", title, list(lines.items()), table, "GB/s, bus bandwidth")
    return Figure(figure.key, title, figure.svg.replace(">GPUs<", ">MiB of a rank<"), table)


def machine_tables(machine: Machine) -> list[Table]:
    return [each for each in (pairs_table(machine), peer_table(machine), collectives_table(machine)) if each.rows]
