"""Machine topology and link speeds: measurements, tables, and an SVG drawing.

    from encore.lab.studies.topology import describe, picture
    machine = describe(node.this_node(), ranks=2, on_step=print)
    print(picture(machine.server).standalone_svg())

Bandwidths are measured between ranks with the data exchange of training, and with the all-reduce and all-to-all of
nccl-tests if installed.
"""

import contextlib
import itertools
import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from encore import catalogue, environment, files, launchers
from encore.containers import renderers
from encore.errors import EncoreError, ExitCode
from encore.job import Job
from encore.lab.studies.definition import DATA
from encore.machine import links
from encore.machine.links import Server
from encore.machine.node import Node
from encore.results.report.figures import Figure, over_gpus
from encore.results.report.svg_plot import escape_text
from encore.results.table import Cell, Table, grouped
from encore.run.published_speed import measured as measured_speed

FILE = "machine.json"
NCCL_TESTS = {"all-reduce": "all_reduce_perf", "all-to-all": "alltoall_perf"}
_SECONDS = 600
_GRADIENT_BYTES = 2  # Per element: fp16, as in the v0.7 submissions
_ROW = re.compile(r"\s*(\d+)\s+\d+\s+\w+\s+\S+\s+-?\d+\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)")


class MachineJson(TypedDict):
    """Links of a machine, and their measured speeds."""

    server: links.Links
    speeds: dict[str, Any]  # Output of benchmarks/common/checks/link_speeds.py; empty: not measured
    nccl_tests: dict[str, list[list[float]]]  # Bytes and bus bandwidth in bytes per second, by kind


@dataclass(frozen=True)
class Machine:
    server: Server
    # Output of benchmarks/common/checks/link_speeds.py; empty if not measured.
    speeds: Mapping[str, Any] = field(default_factory=dict)
    # Bytes and bus bandwidth in bytes per second by nccl-tests, by kind.
    by_tool: Mapping[str, list[list[float]]] = field(default_factory=dict)

    def as_json(self) -> MachineJson:
        return {"server": self.server.as_json(), "speeds": dict(self.speeds), "nccl_tests": dict(self.by_tool)}


def load_machine(path: Path) -> Machine:
    file = path / FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Machine(links.from_json(content["server"]), content["speeds"], content["nccl_tests"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EncoreError(
            f"{file} is not a machine description: {error}", expected=FILE, hint="encore study machine -o FOLDER"
        ) from error


def describe(machine: Node, ranks: int, on_step: Callable[[str], None], python: Path | None = None) -> Machine:
    """Return the topology of this machine; with two or more ranks also their measured speeds."""
    server = links.this_server(machine)
    if ranks < 2:
        return Machine(server)
    return Machine(server, measure(machine, ranks, on_step, python), nccl_tests(ranks) if machine.gpus else {})


def measure(machine: Node, ranks: int, on_step: Callable[[str], None], python: Path | None = None) -> dict[str, Any]:
    """Start ranks that exchange data; on a machine without GPUs they are on the CPU."""
    framework = launchers.own_framework()
    program = python or environment.ensure_environment(framework, on_step)
    threads = {} if machine.gpus else {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="encore-links-") as folder:
        launch = launchers.on_one_node(framework, ranks, folder)
        result = Path(folder) / "links.json"
        arguments = ("--device", "gpu" if machine.gpus else "cpu", "--output", str(result))
        job = Job(
            argv=(*launch.inner, "python", "-m", "benchmarks.common.checks.link_speeds", *arguments),
            environment={"PYTHONUNBUFFERED": "1", **launch.environment, **threads},
            mounts=(),
            ranks=ranks,
            gpus=ranks if machine.gpus else 0,
        )
        command = renderers.host(job, program, os.environ, is_user_python=python is not None)
        done = subprocess.run(
            command.argv, env=dict(command.environment), cwd=command.working_directory, stdout=subprocess.PIPE,
            text=True, check=False, timeout=_SECONDS,
        )  # fmt: skip
        if done.returncode != 0 or not result.is_file():
            raise EncoreError(
                f"the ranks exited with code {done.returncode}",
                hint="check the output above, or omit the number of GPUs to skip the measurement",
                exit_code=ExitCode.FAILED,
            )
        return files.read_json(result)


def nccl_tests(gpus: int) -> dict[str, list[list[float]]]:
    """Return nccl-tests results from 64 KiB to 256 MiB; empty if it is not installed or fails."""
    sizes, measurements = ("-b", "64K", "-e", "256M", "-f", "16", "-g", str(gpus)), {}
    for kind, program in NCCL_TESTS.items():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run([program, *sizes], capture_output=True, text=True, timeout=_SECONDS, check=True)
            measurements[kind] = parse_nccl_tests(done.stdout)
    return measurements


def parse_nccl_tests(text: str) -> list[list[float]]:
    """Return bytes and out-of-place bus bandwidth (bytes per second) per row."""
    rows = (_ROW.match(line) for line in text.splitlines() if not line.startswith("#"))
    return [[float(row[1]), float(row[4]) * 1e9] for row in rows if row is not None]


def pairs_table(machine: Machine) -> Table:
    pairs = machine.speeds.get("pairs") or []
    names = [f"rank {number}" for number in range(len(pairs))]
    size, backend = machine.speeds.get("pair_bytes", 0) / 2**20, machine.speeds.get("backend", "?").upper()
    return Table(
        title=f"Bandwidth between two ranks of {machine.server.name}, GB/s",
        columns=("from", *names),
        formats=dict.fromkeys(names, ".2f"),
        rows=tuple(
            (name, *(value / 1e9 if value is not None else None for value in row))
            for name, row in zip(names, pairs, strict=True)
        ),
        note=f"{size:.0f} MiB sent through {backend}, row to column, one way.",
    )


def peer_table(machine: Machine) -> Table:
    access = machine.speeds.get("peer_access") or []
    names = [f"GPU{number}" for number in range(len(access))]
    rows = tuple(
        (name, *("yes" if accessible else "no" for accessible in row)) for name, row in zip(names, access, strict=True)
    )
    return Table(title=f"Peer access on {machine.server.name}", columns=("GPU", *names), rows=rows)


def collectives_table(machine: Machine) -> Table:
    measured = (
        (row["kind"], int(row["bytes"]), row["seconds"] * 1e6, row["rate"] / 1e9, machine.speeds["backend"])
        for row in machine.speeds.get("collectives", ())
    )
    by_tool = (
        (kind, int(size), None, rate / 1e9, "nccl-tests")
        for kind, readings in machine.by_tool.items()
        for size, rate in readings
    )
    return Table(
        title=f"Exchange between {machine.speeds.get('ranks', 0)} ranks of {machine.server.name}",
        columns=("kind", "bytes", "microseconds", "GB/s", "by"),
        formats={"microseconds": ".1f", "GB/s": ".3f"},
        rows=(*measured, *by_tool),
        note="GB/s: bus bandwidth, as nccl-tests counts it, which does not depend on the number of ranks.",
    )


def allreduce_table(ranks: int, bus_bandwidth: float) -> Table:
    """Return the all-reduce time over a machine's ``ranks`` at a measured bus bandwidth in bytes per second.

    nccl-tests (doc/PERFORMANCE.md) counts 2(n-1)/n of the bytes for all algorithms.
    """
    steps = {name: measured_speed(name).step for name in catalogue.benchmarks()}
    sizes = {name: step.parameters * _GRADIENT_BYTES for name, step in steps.items() if step is not None}
    seconds_per_byte = 2 * (ranks - 1) / ranks / bus_bandwidth
    return Table(
        title="Gradient all-reduce per step on this machine",
        columns=("benchmark", "MB in fp16", "ms"),
        formats={"MB in fp16": ".0f", "ms": ".2f"},
        rows=tuple((name, size / 1e6, size * seconds_per_byte * 1e3) for name, size in sizes.items()),
        note=f"At {bus_bandwidth / 1e9:.3g} GB/s, the bus bandwidth of the largest measured all-reduce. "
        "A longer backward pass hides all but the last bucket.",
    )


def speeds_figure(machine: Machine) -> Figure | None:
    table = collectives_table(machine)
    lines = {
        f"{kind}, {backend}": [(float(size or 0) / 2**20, float(rate or 0)) for _, size, _, rate, _ in rows]
        for (kind, backend), rows in grouped(table.rows, lambda row: (row[0], row[4])).items()
    }
    axis, label = "MiB per rank", "GB/s, bus bandwidth"
    return over_gpus("links", table.title, list(lines.items()), table, label, axis=axis) if lines else None


# -- the picture --------------------------------------------------------------------------------------------------

_GPU, _GAP, _EDGE = 58.0, 8.0, 10.0
_TALL, _CPU_TOP, _SWITCH_TOP, _GPU_TOP = 30.0, 26.0, 92.0, 158.0


def _box(x: float, y: float, width: float, label: str, height: float = _TALL) -> str:
    shape = f'<path class="axis" d="M{x:g} {y:g}h{width:g}v{height:g}h-{width:g}z"/>'
    return shape + _text(x + width / 2, y + height / 2 + 4, label, "mid")


def _line(start: tuple[float, float], end: tuple[float, float], style: str = "axis") -> str:
    return f'<path class="{style}" d="M{start[0]:g} {start[1]:g}L{end[0]:g} {end[1]:g}"/>'


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{escape_text(text)}</text>'


def picture(server: Server) -> Figure:
    """Return sockets, PCIe switches, GPUs, network adapters and links as an SVG, with the matrix of the links."""
    columns = server.near or ((),)
    positions: dict[str, float] = {}
    x, width = _EDGE, _EDGE
    centres = []
    for gpus in columns:
        wide = max(2, len(gpus)) * (_GPU + _GAP) - _GAP
        centres.append(x + wide / 2)
        positions.update({gpu: x + number * (_GPU + _GAP) + _GPU / 2 for number, gpu in enumerate(gpus)})
        x, width = x + wide + 3 * _GAP, x + wide + _EDGE
    bottom = _GPU_TOP + _TALL
    if not server.gpus:
        # Sockets are drawn without GPUs, too.
        centres = [_EDGE + 60 + number * 150 for number in range(server.sockets or 1)]
        width, bottom = centres[-1] + 60 + _EDGE, _CPU_TOP + _TALL
    label = f"{len(server.gpus)} x {server.gpu_model or 'GPU'}" if server.gpus else "no GPU"
    links_drawn, bottom = _nvlinks(server, positions, bottom) if server.nvlinks else ([], bottom)
    parts = [
        *_sockets(server, centres),
        *(
            part
            for gpus, centre in zip(columns, centres, strict=False)
            for part in _switches(server, gpus, positions, centre)
        ),
        *links_drawn,
        _text(0, 12, ", ".join(filter(None, (server.name, label))), "strong"),
    ]
    width, title = max(width, 340.0), f"Links of {server.name or 'the server'}"
    shape = f'viewBox="0 0 {width:g} {bottom + 14:g}" role="img" aria-label="{escape_text(title)}"'
    # Natural width from the number of GPUs: pages may shrink it, but not enlarge it.
    svg = f'<svg {shape} style="max-width:{width:g}px">{"".join(parts)}</svg>'
    name = "".join(char if char.isalnum() else "-" for char in server.name.lower()).strip("-") or "this"
    return Figure(f"server-{name}", title, svg, matrix(server))


def matrix(server: Server) -> Table:
    """Return the links of all pairs, in nvidia-smi notation."""
    devices = (*server.gpus, *server.adapters)
    return Table(
        title=f"Links of {server.name or 'the server'}",
        columns=("device", *devices, "CPUs near", "NUMA node"),
        rows=tuple(
            (
                device,
                *(server.link(device, other) for other in devices),
                server.cpus.get(device, ""),
                server.numa.get(device, ""),
            )
            for device in devices
        ),
        note="NV4: four NVLinks; PIX: one PCIe switch; PXB: multiple; PHB: a CPU's host bridge; NODE: multiple in the "
        "same NUMA node; SYS: the connection between NUMA nodes.",
    )


def _sockets(server: Server, centres: Sequence[float]) -> Iterator[str]:
    middle = _CPU_TOP + _TALL / 2
    for number, centre in enumerate(centres):
        node = server.numa.get(server.near[number][0], "") if server.gpus else ""
        yield _box(centre - 45, _CPU_TOP, 90, f"NUMA node {node}" if node.isdigit() else f"CPU {number}")
        if number:
            yield _line((centres[number - 1] + 45, middle), (centre - 45, middle))
            yield _text((centres[number - 1] + centre) / 2, middle - 5, "SYS", "mid quiet")


def _switches(server: Server, gpus: Sequence[str], positions: Mapping[str, float], centre: float) -> Iterator[str]:
    # GPUs on a socket, with the switches between them and the socket.
    switched: set[str] = set()
    for group in (group for group in server.switches if set(group) & set(gpus)):
        attached = [gpu for gpu in group if gpu in gpus]
        adapters = [device for device in group if device in server.adapters]
        spot = sum(positions[gpu] for gpu in attached) / len(attached)
        yield _box(spot - 34, _SWITCH_TOP, 68, "switch", 24)
        yield _line((centre, _CPU_TOP + _TALL), (spot, _SWITCH_TOP))
        if adapters:
            yield _text(spot, _SWITCH_TOP - 5, ", ".join(adapters), "mid quiet halo")
        yield from (_line((spot, _SWITCH_TOP + 24), (positions[gpu], _GPU_TOP)) for gpu in attached)
        switched.update(attached)
    yield from (_line((centre, _CPU_TOP + _TALL), (positions[gpu], _GPU_TOP)) for gpu in gpus if gpu not in switched)
    yield from (_box(positions[gpu] - _GPU / 2, _GPU_TOP, _GPU, gpu) for gpu in gpus)


def _nvlinks(server: Server, positions: Mapping[str, float], bottom: float) -> tuple[list[str], float]:
    # The NVLinks below the GPUs, and the lower edge.
    if server.has_nvswitch:
        top, x, right = bottom + 46, min(positions.values()) - _GPU / 2, max(positions.values()) + _GPU / 2
        count = next(iter(server.nvlinks.values()))
        parts = [_line((spot, bottom), (spot, top), "l s1") for spot in positions.values()]
        parts.append(_text(x + _GPU / 2 + 5, bottom + 28, f"{count} links each", "halo"))
        return [*parts, _box(x, top, right - x, "NVSwitch")], top + _TALL
    parts, deepest = [], 0.0
    by_width = sorted(server.nvlinks.items(), key=lambda link: abs(positions[link[0][0]] - positions[link[0][1]]))
    for (first, second), count in by_width:
        middle, depth = (
            (positions[first] + positions[second]) / 2,
            10 + 0.24 * abs(positions[first] - positions[second]) + 3 * math.log2(count + 1),
        )
        arc = f"M{positions[first]:g} {bottom:g}Q{middle:g} {bottom + 2 * depth:g} {positions[second]:g} {bottom:g}"
        parts.append(f'<path class="l s{min(count, 8)}" style="stroke-width:{0.8 + count:g}" d="{arc}"/>')
        parts.append(_text(middle, bottom + depth + 4, str(count), "mid halo strong"))
        deepest = max(deepest, depth)
    return [
        *parts,
        _text(_EDGE, bottom + deepest + 26, "number and width of an arc: NVLinks", "quiet"),
    ], bottom + deepest + 30


# -- link traffic of a step ---------------------------------------------------------------------------------------
#
# P2P is the method of key-value stores: arrays are assigned to owners, the largest first, to the device with the least
# data so far; other devices send their gradients to the owner and fetch the weights. A ring all-reduce sends
# 2 (n - 1) / n of the bytes over each link. GPUs without a direct link use two NVLink hops via a third GPU: the path
# with the widest bottleneck.

Pair = tuple[int, int]  # two GPUs, the lower number first


@dataclass(frozen=True)
class Links:
    title: str
    gpus: int
    gb_per_second: float  # per link and direction
    widths: dict[Pair, int]  # links between two GPUs
    ring: tuple[int, ...]  # order of a ring through all GPUs that uses links only

    def path(self, source: int, target: int) -> tuple[int, ...]:
        """Return the path between two GPUs; empty if NVLinks do not connect them in one or two hops."""
        if _pair(source, target) in self.widths:
            return (source, target)
        through = [
            (min(self.widths[_pair(source, middle)], self.widths[_pair(middle, target)]), -middle)
            for middle in range(self.gpus)
            if {_pair(source, middle), _pair(middle, target)} <= set(self.widths)
        ]
        return (source, -max(through)[1], target) if through else ()


def _pair(first: int, second: int) -> Pair:
    return (min(first, second), max(first, second))


def load_links(name: str) -> Links:
    content = files.read_toml(DATA / "links" / f"{name}.toml")
    widths = {_pair(first, second): count for first, second, count in content.pop("pairs")}
    return Links(widths=widths, ring=tuple(content.pop("ring")), **content)


def _link_bytes(links: Links, sent: Iterable[tuple[int, int, float]]) -> dict[Pair, float]:
    # Bytes per link for transfers between GPUs; two-hop transfers count on both links.
    moved: dict[Pair, float] = {}
    for first, second, size in sent:
        for pair in itertools.starmap(_pair, itertools.pairwise(links.path(first, second))):
            moved[pair] = moved.get(pair, 0.0) + size
    return moved


def tree(links: Links, sizes: Sequence[int], devices: int) -> dict[Pair, float]:
    """Return bytes per link and step by P2P, sum of both directions."""
    load, sent = [0] * devices, []
    for size in sorted(sizes, reverse=True):
        owner = load.index(min(load))
        load[owner] += size
        sent += [(owner, other, 2.0 * size) for other in range(devices) if other != owner]
    return _link_bytes(links, sent)


def ring(links: Links, sizes: Sequence[int], devices: int) -> dict[Pair, float]:
    """Return bytes per link and step by a ring all-reduce, sum of both directions.

    A ring over a GPU subset is closed by the path from the last to the first.
    """
    order = [gpu for gpu in links.ring if gpu < devices]
    share = 2.0 * (devices - 1) / devices * sum(sizes)
    pairs = zip(order, [*order[1:], order[0]], strict=True) if devices > 1 else ()
    return _link_bytes(links, [(first, second, share) for first, second in pairs])


def two_hops(links: Links, devices: int) -> list[tuple[int, ...]]:
    return [path for pair in itertools.combinations(range(devices), 2) if len(path := links.path(*pair)) == 3]


def traffic_table(links: Links, by_network: Mapping[str, Sequence[int]], devices: int) -> Table:
    """Return the maximum bytes per step over a link for both methods, and the minimum time, by network."""
    rows = []
    for name, sizes in by_network.items():
        row: list[Cell] = [name, len(sizes), sum(sizes) / 1e6]
        for algorithm in (tree, ring):
            moved = algorithm(links, sizes, devices)
            times = {
                pair: traffic / 2 / (links.widths[pair] * links.gb_per_second * 1e9) for pair, traffic in moved.items()
            }
            pair = max(times, key=lambda link: (times[link], link))
            row += [f"{pair[0]}-{pair[1]}", moved[pair] / 1e6, 1000 * times[pair]]
        rows.append(tuple(row))
    hops = ", ".join("-".join(map(str, path)) for path in two_hops(links, devices))
    return Table(
        title=f"Bytes of a step over the busiest link, {devices} GPUs of a {links.title}",
        columns=(
            "network", "arrays", "gradients, MB", "P2P: link", "P2P: MB", "P2P: least ms",
            "ring: link", "ring: MB", "ring: least ms",
        ),
        rows=tuple(rows),
        note=f"Computed from the links and the sizes of the arrays, not measured. Two hops: {hops or 'none'}.",
    )  # fmt: skip
