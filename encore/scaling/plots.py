"""Plots of scaling studies: speed-up over GPUs, and who has which GPU when.

from encore.scaling.figures import gantt
Path("plan.svg").write_text(gantt(schedule).svg)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from encore.results.figures import INK, SERIES, Figure, add_line, gpu_ticks, make_figure, style_axes
from encore.results.tables import Table
from encore.scaling.sharing import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


def speed_up(lines: Mapping[str, Sequence[tuple[float, float]]], table: Table) -> Figure | None:
    """Return the throughput over the one on the fewest GPUs: lines of GPUs and speed-up, by name."""
    several = {name: points for name, points in lines.items() if len(points) > 1}
    if not several:
        return None

    def draw(drawing: Drawing) -> None:
        axes = drawing.add_subplot()
        style_axes(axes, "GPUs", "speed-up")
        gpu_ticks(axes, list(several.items()))
        ends = [min(p[0][0] for p in several.values()), max(p[-1][0] for p in several.values())]
        axes.plot(ends, [x / ends[0] for x in ends], color=INK, linestyle="--", linewidth=1, label="linear")
        for number, (name, points) in enumerate(several.items()):
            add_line(axes, points, number, name)
        axes.set_ylim(bottom=0)

    return make_figure("speed-up", "Speed-up of the throughput", draw, table)


def gantt(schedule: Schedule, table: Table) -> Figure:
    """Return each GPU's time, one colour per benchmark."""
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(each.benchmark for each in schedule.placements))

    def draw(drawing: Drawing) -> None:
        axes = drawing.add_subplot()
        style_axes(axes, "minutes", "GPU")
        for name in names:
            axes.barh([0], [0], color=SERIES[names.index(name) % len(SERIES)], label=name)
        for each in schedule.placements:
            colour = SERIES[names.index(each.benchmark) % len(SERIES)]
            for gpu in each.on_gpus:
                axes.barh(gpu, each.option.minutes, left=each.start, height=0.9, color=colour, edgecolor=INK)
        axes.set_ylim(schedule.gpus - 0.5, -0.5)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))

    height = min(1.8 + 0.3 * schedule.gpus, 9.0)
    return make_figure("gantt", "Who has which GPU when", draw, table, height=height)
