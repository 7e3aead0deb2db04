"""The plots of the studies, from any measurements: SVG that follows the page's colours, each with its table.

from encore.results.figures import time_over_gpus
figure = time_over_gpus(of_study("microway-dgx1-scaling"))
Path("figure.svg").write_text(figure.svg)
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from encore.results.measurements import Measurement
from encore.results.tables import (
    Cell,
    Table,
    accuracy_table,
    by_precision,
    by_release,
    relative_to,
    scaling_efficiency,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

# Okabe and Ito's colours, which people distinguish whatever their colour vision. The page replaces each by a
# variable of its own, so that dark and light can differ.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#b8a800")
_MARKERS = "osD^vPX*"
INK, _GRID = "#010203", "#040506"
_WIDTH, _HEIGHT = 7.2, 4.2
_SMALL = 0.15
"""Times below this share of the longest go into the magnified part."""
_MOST_LINES = 8
_TICKS_APART = 0.1
_MOST_BARS = 24


@dataclass(frozen=True)
class Figure:
    """A plot as SVG text, and the table of what it shows."""

    key: str
    title: str
    svg: str
    table: Table


def all_figures(measurements: Sequence[Measurement], baseline: str | None = None) -> list[Figure]:
    """Return every figure that these measurements fill."""
    found: list[Figure | None] = [
        *(accuracy_over_epochs(measurements, benchmark) for benchmark in _benchmarks(measurements)),
        time_over_gpus(measurements),
        efficiency(measurements),
        releases(measurements),
        precisions(measurements),
    ]
    if baseline is not None:
        found.append(relative(measurements, baseline))
    return [figure for figure in found if figure is not None]


def accuracy_over_epochs(measurements: Sequence[Measurement], benchmark: str) -> Figure | None:
    """Return the quality over epochs, one line per run, one colour per system, the target as a dashed line."""
    ours = [each for each in measurements if each.benchmark == benchmark and each.curves]
    names = list(dict.fromkeys(curve.name for each in ours for curve in each.curves))
    if not names:
        return None
    from matplotlib.ticker import MaxNLocator

    def draw(drawing: Drawing) -> None:
        for position, name in enumerate(names, 1):
            axes = drawing.add_subplot(1, len(names), position)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            style_axes(axes, "epochs", name if name != "value" else "quality")
            for number, each in enumerate(ours[:_MOST_LINES]):
                curves = [curve for curve in each.curves if curve.name == name]
                for index, curve in enumerate(curves):
                    add_line(axes, curve.points, number, each.label if index == 0 else None, thin=len(curves) > 1)
            target = next((c.target for each in ours for c in each.curves if c.name == name and c.target), None)
            if target is not None:
                axes.axhline(target, color=INK, linestyle="--", linewidth=1, label=f"target {target:g}")

    title = f"Accuracy over epochs: {benchmark}{_of(len(ours))}"
    return make_figure(f"accuracy-{benchmark}", title, draw, accuracy_table(ours))


def time_over_gpus(measurements: Sequence[Measurement]) -> Figure | None:
    """Return the time to the target over GPUs, with a magnified view of the short ones."""
    every = _lines(measurements)
    if not every:
        return None
    lines = every[:_MOST_LINES]
    longest = max(minutes for _, points in lines for _, minutes in points)
    small = [line for line in lines if max(minutes for _, minutes in line[1]) < _SMALL * longest]

    def draw(drawing: Drawing) -> None:
        magnified = bool(small) and len(small) < len(lines)
        axes = drawing.add_subplot(1, 2 if magnified else 1, 1)
        parts = [(axes, lines)]
        if magnified:
            parts.append((drawing.add_subplot(1, 2, 2), small))
            parts[1][0].set_title("the short ones, magnified", fontsize=10, color=INK)
        for part, shown in parts:
            style_axes(part, "GPUs", "minutes to the target")
            gpu_ticks(part, shown)
            for name, points in shown:
                add_line(part, points, [label for label, _ in lines].index(name), name)
            part.set_ylim(bottom=0)

    rows = tuple((name, int(gpus), minutes) for name, points in every for gpus, minutes in points)
    title = f"Training time over GPUs{_of(len(every))}"
    return make_figure("time", title, draw, Table(title=title, columns=("benchmark", "GPUs", "minutes"), rows=rows))


def efficiency(measurements: Sequence[Measurement]) -> Figure | None:
    """Return the scaling efficiency over GPUs, 1 being linear."""
    table = scaling_efficiency(measurements)
    lines: dict[str, list[tuple[float, float]]] = {}
    for benchmark, system, base, gpus, value, _ in table.rows:
        name = f"{benchmark}, {system}" if len({row[1] for row in table.rows}) > 1 else str(benchmark)
        points = lines.setdefault(name, [(_real(base), 1.0)])
        points.append((_real(gpus), _real(value)))
    if not lines:
        return None

    def draw(drawing: Drawing) -> None:
        axes = drawing.add_subplot()
        style_axes(axes, "GPUs", "speed-up over growth in GPUs")
        gpu_ticks(axes, list(lines.items()))
        axes.axhline(1.0, color=INK, linestyle="--", linewidth=1, label="linear")
        for number, (name, points) in enumerate(list(lines.items())[:_MOST_LINES]):
            add_line(axes, points, number, _shortened(name))
        axes.margins(y=0.08)
        axes.set_ylim(bottom=0)

    return make_figure("efficiency", f"{table.title}{_of(len(lines))}", draw, table)


def relative(measurements: Sequence[Measurement], baseline: str) -> Figure | None:
    """Score of each system relative to a baseline system."""
    table = relative_to(measurements, baseline)
    return _bars("relative", table, label=(0, 1), value=4, axis="times as fast as the baseline")


def releases(measurements: Sequence[Measurement]) -> Figure | None:
    """Return speed-up by container release."""
    return _bars("releases", by_release(measurements), label=(0, 1, 2), value=4, axis="speed-up")


def precisions(measurements: Sequence[Measurement]) -> Figure | None:
    """Return speed-up of each precision against the slowest."""
    return _bars("precisions", by_precision(measurements), label=(0, 1, 2), value=4, axis="speed-up")


def phase_bars(names: Sequence[str], sides: Sequence[tuple[str, Sequence[float]]], unit: str) -> Figure | None:
    """Return phases of several runs as stacked bars: ``sides`` are label and values in the order of ``names``."""
    if not sides or not names:
        return None

    def draw(drawing: Drawing) -> None:
        axes = drawing.add_subplot()
        style_axes(axes, unit, "")
        labels = [label for label, _ in sides][::-1]
        left = [0.0] * len(sides)
        for number, name in enumerate(names):
            values = [values[number] for _, values in sides][::-1]
            axes.barh(labels, values, left=left, height=0.5, color=SERIES[number % len(SERIES)], label=name)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.set_ylim(-0.5, len(sides) - 0.5)

    title = "Where the time went"
    rows: tuple[tuple[Cell, ...], ...] = tuple((label, *values) for label, values in sides)
    columns = ("run", *(f"{name}, {unit}" for name in names))
    table = Table(title=title, columns=columns, rows=rows)
    return make_figure("phases", title, draw, table, height=1.4 + 0.45 * len(sides))


def _bars(key: str, table: Table, label: tuple[int, ...], value: int, axis: str) -> Figure | None:
    if not table.rows:
        return None
    rows = table.rows[:_MOST_BARS]

    def draw(drawing: Drawing) -> None:
        axes = drawing.add_subplot()
        style_axes(axes, axis, "")
        labels = [_shortened(", ".join(str(row[column]) for column in label)) for row in rows]
        positions = range(len(rows))[::-1]
        bars = axes.barh(list(positions), [_real(row[value]) for row in rows], height=0.6, color=SERIES[0])
        axes.set_yticks(list(positions), labels)
        axes.bar_label(bars, fmt="%.2f", padding=3, color=INK, fontsize=9)
        axes.axvline(1.0, color=INK, linestyle="--", linewidth=1)
        axes.margins(x=0.12)

    return make_figure(key, table.title, draw, table, height=max(2.0, 0.34 * len(rows) + 1.0))


def _of(count: int) -> str:
    """Return what a title adds where there are more lines than colours: the table has them all."""
    return f" (the first {_MOST_LINES} of {count}; all are in the table)" if count > _MOST_LINES else ""


def _lines(measurements: Sequence[Measurement]) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return minutes over GPUs of every benchmark that was run on more than one number of them."""
    grouped: dict[str, dict[float, float]] = {}
    several = len({(each.framework, each.release) for each in measurements}) > 1
    for each in measurements:
        if each.gpus and each.minutes:
            name = f"{each.benchmark}, {each.system.rpartition('nodes, ')[2]}" if several else each.benchmark
            best = grouped.setdefault(name, {})
            best[float(each.gpus)] = min(each.minutes, best.get(float(each.gpus), math.inf))
    return [(name, sorted(points.items())) for name, points in grouped.items() if len(points) > 1][:_MOST_LINES]


def _benchmarks(measurements: Sequence[Measurement]) -> list[str]:
    return list(dict.fromkeys(each.benchmark for each in measurements))


def _real(value: Any) -> float:
    return float(value or 0.0)


def _shortened(text: str) -> str:
    return text if len(text) <= 48 else f"{text[:24]}…{text[-22:]}"


def add_line(
    axes: Axes, points: Sequence[tuple[float, float]], number: int, label: str | None, thin: bool = False
) -> None:
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=SERIES[number % len(SERIES)],
        marker=_MARKERS[number % len(_MARKERS)],
        markersize=3 if thin else 5,
        linewidth=1 if thin else 1.8,
        label=_shortened(label) if label else None,
    )


def gpu_ticks(axes: Axes, lines: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> None:
    """Set a tick at each number of GPUs that was run on, but for those whose labels would touch."""
    counts = sorted({x for _, points in lines for x, _ in points})
    logarithmic = counts[-1] / counts[0] > 16
    if logarithmic:
        axes.set_xscale("log", base=2)
    place = math.log2 if logarithmic else float
    apart = _TICKS_APART * (place(counts[-1]) - place(counts[0]))
    kept = counts[:1]
    for count in counts[1:]:
        if place(count) - place(kept[-1]) >= apart:
            kept.append(count)
    axes.set_xticks(kept, [f"{count:g}" for count in kept])
    axes.minorticks_off()


def style_axes(axes: Axes, x: str, y: str) -> None:
    axes.set_facecolor("none")
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(colors=INK, length=3)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)


def _legend(drawing: Drawing) -> None:
    """Draw the legend below the plot, where it covers nothing; each name once."""
    handles: dict[str, Any] = {}
    for axes in drawing.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        columns = 1 if max(map(len, handles)) > 32 else min(len(handles), 3)
        drawing.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False,
            fontsize=9, labelcolor=INK,
        )  # fmt: skip


def make_figure(key: str, title: str, draw: Callable[[Drawing], None], table: Table, height: float = _HEIGHT) -> Figure:
    """Draw without a display and without pyplot's state, then hand the colours over to the page."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Drawing

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": key,
        "font.family": "sans-serif",
        "font.size": 10,
    }
    with mpl.rc_context(settings):
        drawing = Drawing(figsize=(_WIDTH, height), layout="constrained")
        drawing.patch.set_alpha(0.0)
        draw(drawing)
        _legend(drawing)
        text = io.StringIO()
        canvas: Any = FigureCanvasSVG(drawing)
        canvas.print_svg(text, metadata={"Date": None, "Creator": None})
    return Figure(key=key, title=title, svg=_for_page(text.getvalue(), key, title), table=table)


def _for_page(svg: str, key: str, title: str) -> str:
    """Return the SVG as an element of a page: names of its own, colours of the page, and a title to be read out."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{re.escape(key)}-", svg)
    for number, colour in enumerate(SERIES, 1):
        svg = svg.replace(colour, f"var(--series-{number}, {colour})")
    svg = svg.replace(INK, "var(--ink, #1b1f24)").replace(_GRID, "var(--grid, #d0d7de)")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", svg)
    return re.sub(
        r"<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>",
        lambda found: (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{found[1]}" role="img" aria-label="{_escaped(title)}"><title>{_escaped(title)}</title>'
        ),
        svg,
        count=1,
    )


def _escaped(text: str) -> str:
    return html.escape("".join(each if each.isprintable() else "?" for each in text))
