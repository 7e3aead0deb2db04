"""The plots of the studies, from any measurements: SVG that follows the page's colours, each with its table.

from encore.results.report.figures import time_over_gpus
figure = time_over_gpus(of_study("microway-dgx1-scaling"))
Path("figure.svg").write_text(figure.alone())
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore.results.report.measurements import Measurement
from encore.results.report.panel import Panel, Point, Span, padded
from encore.results.report.tables import by_precision, by_release, quality_table, relative_to, scaling_efficiency
from encore.results.table import Table

WIDTH, _HEIGHT = 560, 340
_SMALL = 0.15  # Times below this share of the longest go into the magnified plot
_MOST_LINES = 8
_MOST_BARS = 24
_MOST_MARKS = 60
_WIDEST, _ASIDE = 1.5, 3.0
STYLE = Path(__file__).parents[1] / "templates" / "figure.css"


@dataclass(frozen=True)
class Figure:
    """A plot as SVG text, and the table of what it shows."""

    key: str
    title: str
    svg: str
    table: Table

    def alone(self) -> str:
        """Return the SVG as a file of its own, which brings its style along."""
        head, rest = self.svg.split(">", 1)
        style = STYLE.read_text("utf-8")
        return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{rest}'


def all_figures(measurements: Sequence[Measurement], baseline: str | None = None) -> list[Figure]:
    """Return every figure that these measurements fill."""
    found: list[Figure | None] = [
        *(
            figure
            for name in dict.fromkeys(m.benchmark for m in measurements)
            for figure in quality_curves(measurements, name)
        ),
        *time_over_gpus(measurements),
        efficiency(measurements),
        bars("releases", by_release(measurements), label=(0, 1, 2), value=4, axis="speed-up"),
        bars("precisions", by_precision(measurements), label=(0, 1, 2), value=4, axis="speed-up"),
    ]
    if baseline is not None:
        table = relative_to(measurements, baseline)
        found.append(bars("relative", table, label=(0, 1), value=4, axis="times as fast as the baseline"))
    return [figure for figure in found if figure is not None]


def quality_curves(measurements: Sequence[Measurement], benchmark: str) -> list[Figure]:
    """Return the quality over the length of the training, one figure per quality and unit of length.

    Each has a line per run, a colour per system, and the target.
    """
    ours = [each for each in measurements if each.benchmark == benchmark]
    kinds = dict.fromkeys((curve.name, curve.over) for each in ours for curve in each.curves)
    found = []
    for name, over in kinds:
        names, units = ({kind[place] for kind in kinds} for place in (0, 1))
        parts = [benchmark, *([name] if len(names) > 1 else []), *([over.split()[0]] if len(units) > 1 else [])]
        found.append(_quality(ours, name, over, "-".join(["quality", *parts])))
    return [figure for figure in found if figure is not None]


def _quality(ours: Sequence[Measurement], name: str, over: str, key: str) -> Figure | None:
    having = [each for each in ours if any((curve.name, curve.over) == (name, over) for curve in each.curves)]
    curves = [
        (number, curve)
        for number, each in enumerate(having[:_MOST_LINES], 1)
        for curve in each.curves
        if (curve.name, curve.over) == (name, over) and all(map(math.isfinite, itertools.chain(*curve.points)))
    ]
    points = [point for _, curve in curves for point in curve.points]
    if not points:
        return None
    quality, target = curves[0][1].quality, next((curve.target for _, curve in curves if curve.target), None)
    panel = Panel(WIDTH, _HEIGHT)
    levels = [y for _, y in points] + ([target] if target is not None else [])
    whole = all(float(x).is_integer() for x, _ in points)
    panel.axes(padded([x for x, _ in points], 0.02), padded(levels), over, quality, whole=whole)
    several = len(curves) > len(having[:_MOST_LINES])
    for number, curve in curves:
        panel.line(curve.points, number)
        panel.marks(curve.points if len(points) <= _MOST_MARKS else (), number)
    for number, each in enumerate(having[:_MOST_LINES], 1):
        panel.marks([curve.points[-1] for index, curve in curves if index == number and several], number)
        panel.name(number, each.label)
    if target is not None:
        panel.level(target, f"target {target:g}")
    table = quality_table(having, name, over)
    title = f"{table.title}: {having[0].benchmark}{_of(len(having))}"
    return Figure(key, title, panel.svg(title), table)


def time_over_gpus(measurements: Sequence[Measurement]) -> list[Figure]:
    """Return the time to the target over GPUs, and the short ones once more, magnified."""
    every = _lines(measurements)
    if not every:
        return []
    lines = every[:_MOST_LINES]
    longest = max(minutes for _, points in lines for _, minutes in points)
    small = [line for line in lines if max(minutes for _, minutes in line[1]) < _SMALL * longest]
    rows = tuple((name, int(gpus), minutes) for name, points in every for gpus, minutes in points)
    found = []
    parts = [("time", "", lines)]
    if small and len(small) < len(lines):
        parts.append(("time-short", ", the short ones magnified", small))
    for key, addition, part in parts:
        title = f"Training time over GPUs{addition}{_of(len(every))}"
        numbers = [[name for name, _ in lines].index(name) + 1 for name, _ in part]
        table = Table(title=title, columns=("benchmark", "GPUs", "minutes"), rows=rows)
        found.append(over_gpus(key, title, part, table, "minutes to the target", numbers=numbers))
    return found


def efficiency(measurements: Sequence[Measurement]) -> Figure | None:
    """Return the scaling efficiency over GPUs, 1 being linear."""
    table = scaling_efficiency(measurements)
    lines: dict[str, list[Point]] = {}
    for benchmark, system, base, gpus, value, _ in table.rows:
        name = f"{benchmark}, {system}" if len({row[1] for row in table.rows}) > 1 else str(benchmark)
        points = lines.setdefault(name, [(_real(base), 1.0)])
        points.append((_real(gpus), _real(value)))
    if not lines:
        return None
    shown = list(lines.items())[:_MOST_LINES]
    title = f"{table.title}{_of(len(lines))}"
    ends = [x for _, points in shown for x, _ in points]
    linear = [(min(ends), 1.0), (max(ends), 1.0)]
    return over_gpus("efficiency", title, shown, table, "speed-up over growth in GPUs", linear=linear)


def over_gpus(
    key: str,
    title: str,
    lines: Sequence[tuple[str, Sequence[Point]]],
    table: Table,
    label: str,
    *,
    linear: Sequence[Point] = (),
    numbers: Sequence[int] = (),
    axis: str = "GPUs",
    spans: Mapping[str, Sequence[Span]] | None = None,
) -> Figure:
    """Return lines over GPUs, or another ``axis``, from 0 on; ``linear`` is what perfect scaling would be.

    ``spans`` has intervals by the line's name. One that is wider than half of the values goes out of the picture.
    """
    panel = Panel(WIDTH, _HEIGHT)
    counts = sorted({x for _, points in lines for x, _ in points})
    highest = max(y for points in [*(points for _, points in lines), linear] for _, y in points)
    ends = [high for name, _ in lines for _, _, high in (spans or {}).get(name, ())]
    highest = max(highest, min(max(ends, default=0.0), _WIDEST * highest))
    panel.axes((counts[0], counts[-1]), (0.0, highest * 1.08), axis, label, at=counts)
    panel.line(linear, "level")
    for position, (name, points) in enumerate(lines):
        number = numbers[position] if numbers else position + 1
        panel.whiskers((spans or {}).get(name, ()), number, _ASIDE * (position - (len(lines) - 1) / 2))
        panel.line(points, number)
        panel.marks(points, number)
        panel.name(number, name)
    if linear:
        panel.name(None, "linear")
    return Figure(key, title, panel.svg(title), table)


def bars(key: str, table: Table, label: tuple[int, ...], value: int, axis: str) -> Figure | None:
    """Return bars from 0, each with its name above it, whole; of ratios with a line at 1."""
    if not table.rows:
        return None
    rows = table.rows[:_MOST_BARS]
    row = 34
    panel = Panel(WIDTH, row * len(rows) + 46, left=2, right=44, top=6)
    values = [_real(each[value]) for each in rows]
    panel.axes((min(*values, 0.0), max(*values, 1.0)), None, axis)
    for number, (each, length) in enumerate(zip(rows, values, strict=True)):
        top = 6 + row * number
        panel.text(2, top + 11, ", ".join(str(each[column]) for column in label))
        panel.bar((0.0, length), top + 15, 12, 1)
        panel.text(panel.x(max(length, 0.0)) + 5, top + 25, f"{length:.2f}")
    if not axis.endswith("%"):
        panel.upright(1.0)
    return Figure(key, table.title, panel.svg(table.title), table)


# What a title adds where there are more lines than colours: the table has them all.
def _of(count: int) -> str:
    return f" (the first {_MOST_LINES} of {count}; all are in the table)" if count > _MOST_LINES else ""


# Minutes over GPUs of every benchmark that was run on more than one number of them.
def _lines(measurements: Sequence[Measurement]) -> list[tuple[str, list[Point]]]:
    grouped: dict[str, dict[float, float]] = {}
    several = len({(each.framework, each.release) for each in measurements}) > 1
    for each in measurements:
        if each.gpus and each.minutes:
            name = f"{each.benchmark}, {each.system.rpartition('nodes, ')[2]}" if several else each.benchmark
            best = grouped.setdefault(name, {})
            best[float(each.gpus)] = min(each.minutes, best.get(float(each.gpus), math.inf))
    return [(name, sorted(points.items())) for name, points in grouped.items() if len(points) > 1]


def _real(value: Any) -> float:
    return float(value or 0.0)
