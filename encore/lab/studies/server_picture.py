"""A server drawn as an SVG: sockets, PCIe switches, GPUs, network adapters, and the links between them.

from encore.lab.studies.server_picture import picture
print(picture(server).alone())
"""

import math
from collections.abc import Sequence

from encore.machine.links import Server
from encore.results.report.figures import Figure
from encore.results.report.panel import escaped
from encore.results.table import Table

_GPU, _GAP, _EDGE = 58.0, 8.0, 10.0
_TALL, _CPU_TOP, _SWITCH_TOP, _GPU_TOP = 30.0, 26.0, 92.0, 158.0


class _Drawing:
    def __init__(self) -> None:
        self.parts: list[str] = []

    def box(self, left: float, top: float, width: float, label: str, height: float = _TALL) -> None:
        self.parts.append(f'<path class="axis" d="M{left:g} {top:g}h{width:g}v{height:g}h-{width:g}z"/>')
        self.text(left + width / 2, top + height / 2 + 4, label, "mid")

    def line(self, points: Sequence[tuple[float, float]], style: str = "axis") -> None:
        self.parts.append(f'<path class="{style}" d="M' + "L".join(f"{x:g} {y:g}" for x, y in points) + '"/>')

    def arc(self, left: float, right: float, top: float, depth: float, links: int) -> None:
        middle = (left + right) / 2
        shape = f"M{left:g} {top:g}Q{middle:g} {top + 2 * depth:g} {right:g} {top:g}"
        self.parts.append(f'<path class="l s{min(links, 8)}" style="stroke-width:{0.8 + links:g}" d="{shape}"/>')
        self.text(middle, top + depth + 4, str(links), "mid halo strong")

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        self.parts.append(f'<text class="{style}" x="{x:g}" y="{y:g}">{escaped(text)}</text>')


def picture(server: Server) -> Figure:
    """Return the picture with the matrix of its links."""
    drawing = _Drawing()
    columns = server.near or ((),)
    at: dict[str, float] = {}
    left, width = _EDGE, _EDGE
    centres = []
    for gpus in columns:
        wide = max(2, len(gpus)) * (_GPU + _GAP) - _GAP
        centres.append(left + wide / 2)
        at.update({gpu: left + number * (_GPU + _GAP) + _GPU / 2 for number, gpu in enumerate(gpus)})
        left, width = left + wide + 3 * _GAP, left + wide + _EDGE
    # A machine without GPUs still has its sockets.
    sockets = len(columns) if server.gpus else server.sockets or 1
    if not server.gpus:
        centres = [_EDGE + 60 + number * 150 for number in range(sockets)]
        width = centres[-1] + 60 + _EDGE
    _cpus(drawing, server, centres)
    low = _switches(drawing, server, columns, at, centres) if server.gpus else _CPU_TOP + _TALL
    low = _nvlinks(drawing, server, at, low)
    width = max(width, 340.0)
    drawing.text(0, 12, _title(server), "strong")
    title = f"Links of {server.name or 'the server'}"
    shape = f'viewBox="0 0 {width:g} {low + 14:g}" role="img" aria-label="{escaped(title)}"'
    # As wide as its GPUs: a page may make it smaller, and does not blow it up.
    svg = f'<svg {shape} style="max-width:{width:g}px">{"".join(drawing.parts)}</svg>'
    return Figure(f"server-{_file_name(server.name)}", title, svg, matrix(server))


def matrix(server: Server) -> Table:
    """Return the links of all pairs, as nvidia-smi names them."""
    devices = (*server.gpus, *server.adapters)
    return Table(
        title=f"Links of {server.name or 'the server'}",
        columns=("device", *devices, "CPUs near", "NUMA node"),
        rows=tuple(
            (one, *(server.link(one, other) for other in devices), server.cpus.get(one, ""), server.numa.get(one, ""))
            for one in devices
        ),
        note="NV4: four NVLinks; PIX: one PCIe switch; PXB: several; PHB: a CPU's host bridge; NODE: several of one "
        "NUMA node; SYS: the connection between NUMA nodes.",
    )


def _title(server: Server) -> str:
    parts = [server.name, f"{len(server.gpus)} x {server.gpu_model or 'GPU'}" if server.gpus else "no GPU"]
    return ", ".join(part for part in parts if part)


def _file_name(name: str) -> str:
    return "".join(each if each.isalnum() else "-" for each in name.lower()).strip("-") or "this"


def _cpus(drawing: _Drawing, server: Server, centres: Sequence[float]) -> None:
    for number, centre in enumerate(centres):
        node = server.numa.get(server.near[number][0], "") if server.gpus else ""
        drawing.box(centre - 45, _CPU_TOP, 90, f"NUMA node {node}" if node.isdigit() else f"CPU {number}")
        if number:
            middle = _CPU_TOP + _TALL / 2
            drawing.line([(centres[number - 1] + 45, middle), (centre - 45, middle)])
            drawing.text((centres[number - 1] + centre) / 2, middle - 5, "SYS", "mid quiet")


def _switches(
    drawing: _Drawing,
    server: Server,
    columns: Sequence[Sequence[str]],
    at: dict[str, float],
    centres: Sequence[float],
) -> float:
    # Draw switches and GPUs; return the lower edge.
    for gpus, centre in zip(columns, centres, strict=True):
        left = list(gpus)
        for group in server.switches:
            mine = [each for each in group if each in gpus]
            if not mine:
                continue
            adapters = [each for each in group if each in server.adapters]
            spot = sum(at[each] for each in mine) / len(mine)
            drawing.box(spot - 34, _SWITCH_TOP, 68, "switch", 24)
            drawing.line([(centre, _CPU_TOP + _TALL), (spot, _SWITCH_TOP)])
            if adapters:
                drawing.text(spot, _SWITCH_TOP - 5, ", ".join(adapters), "mid quiet halo")
            for each in mine:
                drawing.line([(spot, _SWITCH_TOP + 24), (at[each], _GPU_TOP)])
                left.remove(each)
        for each in left:
            drawing.line([(centre, _CPU_TOP + _TALL), (at[each], _GPU_TOP)])
        for each in gpus:
            drawing.box(at[each] - _GPU / 2, _GPU_TOP, _GPU, each)
    return _GPU_TOP + _TALL


def _nvlinks(drawing: _Drawing, server: Server, at: dict[str, float], low: float) -> float:
    # Draw the NVLinks below the GPUs; return the lower edge.
    links = server.nvlinks
    if not links:
        return low
    if server.has_nvswitch:
        count = next(iter(links.values()))
        top = low + 46
        left, right = min(at.values()) - _GPU / 2, max(at.values()) + _GPU / 2
        for spot in at.values():
            drawing.line([(spot, low), (spot, top)], "l s1")
        drawing.text(left + _GPU / 2 + 5, low + 28, f"{count} links each", "halo")
        drawing.box(left, top, right - left, "NVSwitch")
        return top + _TALL
    deepest = 0.0
    for (one, other), count in sorted(links.items(), key=lambda item: abs(at[item[0][0]] - at[item[0][1]])):
        depth = 10 + 0.24 * abs(at[one] - at[other]) + 3 * math.log2(count + 1)
        drawing.arc(at[one], at[other], low, depth, count)
        deepest = max(deepest, depth)
    drawing.text(_EDGE, low + deepest + 26, "number and width of an arc: NVLinks", "quiet")
    return low + deepest + 30
