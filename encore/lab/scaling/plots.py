"""Plots of scaling studies: speed-up over GPUs, and who has which GPU when.

from encore.lab.scaling.plots import gantt
Path("plan.svg").write_text(gantt(schedule, table).alone())
"""

from collections.abc import Mapping, Sequence

from encore.lab.scaling.sharing import Schedule
from encore.results.report.figures import WIDTH, Figure, over_gpus
from encore.results.report.panel import SERIES, Panel
from encore.results.table import Table


def speed_up(lines: Mapping[str, Sequence[tuple[float, float]]], table: Table, devices: str = "GPUs") -> Figure | None:
    """Return the throughput over the one on the fewest GPUs, or other ``devices``: these and speed-up, by name."""
    several = [(name, points) for name, points in lines.items() if len(points) > 1]
    if not several:
        return None
    ends = [min(p[0][0] for _, p in several), max(p[-1][0] for _, p in several)]
    linear = [(x, x / ends[0]) for x in ends]
    title = "Speed-up of the throughput"
    return over_gpus("speed-up", title, several, table, "speed-up", linear=linear, axis=devices)


def gantt(schedule: Schedule, table: Table) -> Figure:
    """Return each GPU's time, one colour per benchmark."""
    names = list(dict.fromkeys(each.benchmark for each in schedule.placements))
    row = max(12.0, min(26.0, 480 / schedule.gpus))
    panel = Panel(WIDTH, row * schedule.gpus + 60)
    panel.axes((0.0, schedule.makespan or 1.0), None, "minutes", "GPU")
    for gpu in range(schedule.gpus):
        panel.text(panel.left - 6, panel.top + row * (gpu + 0.5) + 4, str(gpu), "end")
    for each in schedule.placements:
        style = f"phase s{names.index(each.benchmark) % SERIES + 1}"
        for gpu in each.on_gpus:
            panel.bar((each.start, each.start + each.option.minutes), panel.top + row * gpu + 1, row - 2, style)
    for number, name in enumerate(names, 1):
        panel.name(number, name)
    title = "Who has which GPU when"
    return Figure("gantt", title, panel.svg(title), table)
