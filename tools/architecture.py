"""Draw the packages and their imports as docs/architecture.svg.

    $ python -m tools.architecture            # `make docs`
    $ python -m tools.architecture --check    # exit code 1 if the picture is outdated

A box is a folder. An arrow is an import between two folders, omitted if there is a longer path between them. There
are no imports between encore/ and benchmarks/.
"""

import ast
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import jinja2
import typer

from encore import paths
from tools import run

PICTURE = paths.ROOT / "docs" / "architecture.svg"
HOUSES = {"encore": ("results", "lab"), "benchmarks": ("common",)}  # folders with a separate box per subfolder
WIDTH, HEIGHT, GAP, RISE = 136, 30, 12, 64  # box size, and distances between boxes and between layers, in pixels

Graph = Mapping[str, set[str]]

TEMPLATE = jinja2.Template(
    """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" font-family="sans-serif" font-size="13">
<rect width="100%" height="100%" fill="white"/>
<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 8 4 0 8z" fill="#8a94a6"/></marker>
{% for house in houses %}<text x="{{ house.x }}" y="26" font-size="16" font-weight="bold">{{ house.name }}/</text>
{% for (x, y), (u, v) in house.arrows -%}
<path d="M{{ x }} {{ y }}C{{ x }} {{ y + 26 }} {{ u }} {{ v - 26 }} {{ u }} {{ v }}" fill="none" stroke="#8a94a6" \
marker-end="url(#tip)"/>
{% endfor %}{% for name, (x, y) in house.boxes.items() -%}
<rect x="{{ x - 68 }}" y="{{ y - 15 }}" width="136" height="30" rx="5" fill="{{ house.fill }}" stroke="#3b4a66"/>
<text x="{{ x }}" y="{{ y + 5 }}" text-anchor="middle">{{ name }}</text>
{% endfor %}{% endfor -%}
<path d="M{{ wall }} 10V{{ height - 10 }}" stroke="#b03a2e" stroke-width="3" stroke-dasharray="9 6"/>
<text x="{{ wall + 8 }}" y="{{ height - 14 }}" fill="#b03a2e">the wall: config.json in; log, metrics, \
checkpoint, exit code out</text>
</svg>
"""
)


@cache
def modules(house: str) -> dict[str, Path]:
    # All modules in encore/ or benchmarks/, and the file paths
    files = sorted((paths.ROOT / house).rglob("*.py"))
    return {
        ".".join(path.relative_to(paths.ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files
    }


def room(module: str) -> str:
    # Module name to box name, such as ``results.logs``; the top-level name for a module outside of folders
    house, *parts = module.split(".")
    if modules(house)[module].name != "__init__.py":
        parts = parts[:-1]
    return ".".join(parts[: 2 if parts[:1] and parts[0] in HOUSES[house] else 1]) or house


@cache
def imported(module: str, tree: ast.Module | None = None) -> set[str]:
    # The modules of the same package that a module imports, also in functions, or runs with ``python -m NAME``
    house = module.partition(".")[0]
    dependencies, targets = set(), set()
    for node in ast.walk(tree or ast.parse(modules(house)[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            dependencies |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            dependencies |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            targets.add(node.value)
    available = modules(house)
    dependencies |= {name for name in targets & set(available) if available[name].name != "__init__.py"}
    # The version in encore/__init__.py is on the ground floor.
    return {name for name in dependencies if name in available and name not in (module, house)}


def rooms(house: str) -> dict[str, set[str]]:
    # The imports between boxes, without isolated boxes, which contain no code
    graph: dict[str, set[str]] = defaultdict(set)
    for module in modules(house):
        graph[room(module)] |= {room(target) for target in imported(module)} - {room(module)}
    joined = {name for name, needed in graph.items() if needed}.union(*graph.values())
    return {name: graph[name] for name in graph if name in joined}


def below(graph: Graph, name: str) -> set[str]:
    # Every room that is reached from one
    return graph[name].union(*(below(graph, successor) for successor in graph[name]))


def layers(graph: Graph) -> list[list[str]]:
    # Layers from the bottom up: a box is above all boxes that it imports; CycleError for a cycle
    height: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        height[name] = 1 + max((height[successor] for successor in graph[name]), default=-1)
    return [sorted(name for name in graph if height[name] == level) for level in range(max(height.values()) + 1)]


def placed(levels: list[list[str]], graph: Graph, x0: float, bottom: float) -> dict[str, tuple[float, float]]:
    # Box centers, as close as possible to the imported boxes
    widest = max(map(len, levels)) * (WIDTH + GAP)
    positions: dict[str, tuple[float, float]] = {}
    for number, level in enumerate(levels):
        wish = {
            name: sum(positions[room_name][0] for room_name in graph[name]) / max(1, len(graph[name])) for name in level
        }
        step = widest / len(level)
        for index, name in enumerate(sorted(level, key=lambda room_name: (wish[room_name], room_name))):
            positions[name] = (round(x0 + step * (index + 0.5), 1), bottom - RISE * number)
    return positions


def draw() -> str:
    # The picture as SVG
    graphs = {house: rooms(house) for house in HOUSES}
    levels = {house: layers(graph) for house, graph in graphs.items()}
    height = 80 + RISE * max(map(len, levels.values()))
    x, houses, walls = 20.0, [], []
    for (house, graph), fill in zip(graphs.items(), ("#e8f0fe", "#eaf7ea"), strict=True):
        boxes = placed(levels[house], graph, x, height - 50)
        arrows = [
            ((boxes[name][0], boxes[name][1] + HEIGHT / 2), (boxes[target][0], boxes[target][1] - HEIGHT / 2))
            for name in sorted(graph)
            for target in sorted(graph[name])
            if not any(target in below(graph, other) for other in graph[name])
        ]
        houses.append({"name": house, "x": x, "boxes": boxes, "arrows": arrows, "fill": fill})
        x += max(map(len, levels[house])) * (WIDTH + GAP) + 60
        walls.append(x - 30)
    return TEMPLATE.render(houses=houses, width=round(x), height=height, wall=walls[0])


def main(check: bool = False) -> None:
    # Write the picture, or say that it is not the code's
    if check:
        raise typer.Exit(int(PICTURE.read_text(encoding="utf-8") != draw()))
    PICTURE.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    run(main, __doc__)
