"""SVG plots of measurements in the page's colours, with their data as tables.

from encore.results.report.figures import time_over_gpus
from encore.results.report.measurements import study_measurements
for figure in time_over_gpus(study_measurements("microway-dgx1-scaling")):
    Path(f"{figure.key}.svg").write_text(figure.standalone_svg())
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from encore.results.compare.compare import Factor
from encore.results.compare.run_set import RunSet
from encore.results.format import percent
from encore.results.logs.steps import Window, late_shares
from encore.results.logs.timing import Curve
from encore.results.report.measurements import (
    Measurement,
    by_precision,
    by_release,
    quality_table,
    relative_to,
    scaling_efficiency,
)
from encore.results.report.svg_plot import CROSS, DOT, SQUARE, Panel, Point, Range, Scale, Span, pad_range
from encore.results.rules import rule_for
from encore.results.statistics import LEVEL, interval
from encore.results.table import Table

_SET_WIDTH = 400
_SET_HEIGHT = 296
_LANE = 62
_DOT = 8.0
_ROWS = (0, 1, -1, 2, -2)
_PHASES = (("start_s", "start", "s6"), ("train_s", "train", "s1"), ("evaluate_s", "evaluate", "s3"))
_ZOOM = 0.6  # Largest height of an enlarged view, fraction of the full quality range
_LONGEST = 4.0  # Longest plotted time for a run that missed the target, relative to the slowest converged run
_MOST_SET_MARKS = 40
_DIAMOND = "m-4.4 0l4.4-4.4 4.4 4.4-4.4 4.4z"
_SHAPES = {"ours": DOT, "theirs": SQUARE}
_HOLLOW = {"ours": "m-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0", "theirs": "m-2.7-2.7h5.4v5.4h-5.4z"}


@dataclass(frozen=True)
class Plot:
    title: str
    svg: str
    note: str = ""


def run_dots(current: RunSet, baseline: RunSet | None, margin_fraction: float) -> Plot | None:
    """Plot every run as a dot, with the interval of the mean: the current set above the submission."""
    lanes = [("yours", "ours", current), *([("theirs", "theirs", baseline)] if baseline else [])]
    lanes = [lane for lane in lanes if lane[2].score is not None or _missed_minutes(lane[2])]
    run_sets = [run_set for _, _, run_set in lanes]
    values = [
        value
        for run_set in run_sets
        for value in (*_minutes(run_set), *_missed_minutes(run_set), *(_span(run_set) or ()))
    ]
    values += [run_set.score.estimate for run_set in run_sets if run_set.score is not None]
    if len(set(values)) < 2 or not all(map(math.isfinite, values)):
        return None
    panel = Panel(_SET_WIDTH, _LANE * len(lanes) + 44, left=10, top=4)
    panel.axes(pad_range(values), None, "minutes to the target")
    reference = baseline.score.estimate if baseline is not None and baseline.score is not None else None
    if reference is not None:
        margin = (reference / (1 + margin_fraction), reference * (1 + margin_fraction))
        panel.bar(margin, panel.top, panel.bottom - panel.top, "within")
    for number, (name, style, run_set) in enumerate(lanes):
        _lane(panel, panel.top + number * _LANE, name, style, run_set)
    descriptions = "; ".join(f"{name} {_describe(run_set)}" for name, _, run_set in lanes)
    notes = [f"Bar: {percent(LEVEL)} interval of the mean."] if any(_span(run_set) for run_set in run_sets) else []
    notes += ["Hollow: dropped from the score."] if any(any(_dropped_counts(run_set)) for run_set in run_sets) else []
    notes += [f"Shaded: within {percent(margin_fraction)} of theirs."] if reference is not None else []
    notes += ["Cross: did not reach the target."] if any(_missed_minutes(run_set) for run_set in run_sets) else []
    return Plot("Time of each run", panel.svg(f"Minutes of each run: {descriptions}"), " ".join(notes))


def _lane(panel: Panel, top: float, name: str, style: str, run_set: RunSet) -> None:
    middle = top + 38
    span = _span(run_set)
    if span is not None:
        panel.bar(span, middle - 8, 16, f"span {style}")
    if run_set.score is not None:
        panel.bar((run_set.score.estimate, run_set.score.estimate), middle - 11, 22, f"mean {style}")
    panel.y = Scale(0.0, 1.0, middle, middle - 1)
    ordered, (fastest, slowest) = sorted(_minutes(run_set)), _dropped_counts(run_set)
    dots = list(zip(ordered, _stack_dots([panel.x(value) for value in ordered]), strict=True))
    last = len(dots) - slowest
    panel.marks(dots[fastest:last], style, _SHAPES[style])
    panel.marks([*dots[:fastest], *dots[last:]], f"hollow {style}", _HOLLOW[style])
    panel.marks([(value, 0.0) for value in _missed_minutes(run_set)], "missed", CROSS)
    panel.text(panel.left, top + 15, f"{name}: {_describe(run_set)}", "halo")


# Minutes per run, scaled like the displayed score.
def _minutes(run_set: RunSet) -> list[float]:
    scaled = run_set.score_kind == "official" and run_set.score_is_official
    return [minutes * (run_set.scaling_factor or 1.0 if scaled else 1.0) for minutes in run_set.minutes]


def _describe(run_set: RunSet) -> str:
    if run_set.score is None:
        return f"none of {run_set.runs} runs reached the target"
    kind = "score" if run_set.score_is_official else "mean"
    converged = f"{run_set.converged} of {run_set.runs}" if run_set.converged != run_set.runs else f"{run_set.runs}"
    return f"{converged} run{'' if converged == '1' else 's'}, {kind} {run_set.score.estimate:.2f} min"


# Numbers of the fastest and of the slowest converged runs that the score drops.
def _dropped_counts(run_set: RunSet) -> tuple[int, int]:
    rule = rule_for(run_set.round, run_set.benchmark, run_set.global_batch)
    if rule is None or rule.first_converging or not run_set.score_is_official or not run_set.minutes:
        return 0, 0
    return rule.dropped_each_side, max(rule.dropped_each_side - (run_set.runs - run_set.converged), 0)


def _span(run_set: RunSet) -> Range | None:
    return interval(run_set.score) if run_set.score is not None else None


# Minutes of the runs that did not reach the target.
def _missed_minutes(run_set: RunSet) -> list[float]:
    limit = _LONGEST * max(run_set.minutes, default=float("inf"))
    elapsed = [run.elapsed_minutes for run in run_set.logs if not run.converged]
    return [minutes for minutes in elapsed if minutes is not None and 0 < minutes < min(limit, 1e6)]


# Vertical offsets that keep the dots from overlapping.
def _stack_dots(pixels: Sequence[float]) -> list[float]:
    positions: list[Point] = []
    for x in pixels:
        free = (y for y in _ROWS if all(abs(x - px) >= _DOT or y != py for px, py in positions))
        positions.append((x, next(free, 0.0)))
    return [_DOT * y for _, y in positions]


def quality_plots(current: RunSet, baseline: RunSet | None) -> list[Plot]:
    """Plot quality over minutes per metric, the submission in the background, with a magnified view at the target."""
    all_targets = current.targets or (baseline.targets if baseline else ())
    targets = {target.name: target.value for target in all_targets}
    qualities = {"value": "quality", **{target.name: target.quality for target in all_targets}}
    configured = current.settings.get("configuration.quality_target")
    if isinstance(configured, int | float):
        targets = {name: float(configured) for name in targets or ("value",)}
    plots = []
    for name in dict.fromkeys(name for curve in current.curves for name in curve.values):
        front, back = _points(current.curves, name), _points(baseline.curves if baseline else (), name)
        if not front:
            continue
        target, metric = targets.get(name), qualities.get(name, name)
        metric = f"{metric[0].upper()}{metric[1:]}"
        plots.append(_quality_over_minutes(front, back, target, f"{metric} over minutes", None))
        if target is not None and (view := _target_view(front, target)):
            plots.append(_quality_over_minutes(front, back, target, f"{metric} around the target, enlarged", view))
    return plots


# Points per curve; curves without finite points are dropped.
def _points(curves: Sequence[Curve], name: str) -> list[list[Point]]:
    lines = [list(zip(curve.minutes, curve.values.get(name, ()), strict=False)) for curve in curves]
    return [line for line in lines if line and all(abs(x) < 1e6 and abs(y) < 1e9 for x, y in line)]


# Ranges of minutes and quality around the target, or None if the view would not be larger.
def _target_view(lines: Sequence[Sequence[Point]], target: float) -> tuple[Range, Range] | None:
    levels = [y for line in lines for _, y in line]
    height = max(*levels, target) - min(*levels, target)
    distance = max(abs(line[-1][1] - target) for line in lines)
    half = max(1.5 * distance, 0.06 * height)
    if not 0 < 2 * half < _ZOOM * height:
        return None
    minutes = [x for line in lines for x, y in line if abs(y - target) <= half]
    return (pad_range(minutes, 0.12), (target - half, target + half)) if len(set(minutes)) > 1 else None


def _quality_over_minutes(
    front: Sequence[Sequence[Point]],
    back: Sequence[Sequence[Point]],
    target: float | None,
    title: str,
    view: tuple[Range, Range] | None,
) -> Plot:
    points = [point for line in (*front, *back) for point in line]
    levels = [y for _, y in points] + ([target] if target is not None else [])
    x, y = view or ((0.0, max(x for x, _ in points) * 1.03), pad_range(levels))
    panel = Panel(_SET_WIDTH, _SET_HEIGHT, top=20)
    panel.axes(x, y, "minutes since run_start")
    panel.clip()
    for lines, style in ((back, "theirs"), (front, "ours")):
        visible = [part for line in lines if (part := _in_view(line, x))]
        for part in visible:
            panel.line(part, style)
        points = [point for part in visible for point in part]
        marked = points if style == "ours" and len(points) <= _MOST_SET_MARKS else [line[-1] for line in lines]
        panel.marks([point for point in marked if y[0] <= point[1] <= y[1]], style, _SHAPES[style])
    panel.clip(end=True)
    if target is not None:
        panel.level(target, f"target {target:g}")
    ends = ", ".join(f"{line[-1][1]:.4g} after {line[-1][0]:.4g} min" for line in front[:5])
    return Plot(title, panel.svg(f"{title}; {len(front)} of your runs end with {ends}"), "")


# Points inside a range of minutes, plus one neighbour on either side.
def _in_view(line: Sequence[Point], x: Range) -> list[Point]:
    near = [n for n, point in enumerate(line) if x[0] <= point[0] <= x[1]]
    return list(line[max(near[0] - 1, 0) : near[-1] + 2]) if near else []


def ratio_line(factor: Factor, margin: float, *, labelled: bool = True) -> str:
    """Draw a ratio and its interval as a line from 0.8 to 1.25 with the margin shaded.

    ``labelled``: add the numbers for screen readers. Omit them if the numbers are in the surrounding table.
    """
    if factor.ratio is None or factor.ratio <= 0:
        return ""
    panel = Panel(120, 18, left=4, right=4, top=0)
    panel.x, panel.y = Scale(0.8, 1.25, 4, 116, logarithmic=True), Scale(0, 1, 9, 8)
    panel.bar((1 / (1 + margin), 1 + margin), 1, 16, "within")
    panel.bar((1.0, 1.0), 1, 16, "one")
    start, end = (min(max(value, 0.78), 1.28) for value in factor.interval or (factor.ratio, factor.ratio))
    if factor.interval is not None:
        panel.bar((start, end), 7.6, 2.8, "ours")
    ratio = min(max(factor.ratio, 0.78), 1.28)
    panel.marks([(ratio, 0.0)], "ours", _SHAPES["ours"] if ratio == factor.ratio else _DIAMOND)
    span = f", {percent(LEVEL)} {factor.interval[0]:.3f} to {factor.interval[1]:.3f}" if factor.interval else ""
    return panel.svg(f"{factor.name}: ratio {factor.ratio:.3f}{span}" if labelled else "")


def phase_bars(current: RunSet, baseline: RunSet | None) -> Plot | None:
    """Plot the time per phase on the clock, the current set above the submission."""
    sides = [("yours", current), *([("theirs", baseline)] if baseline else [])]
    lanes = [(name, run_set.phases) for name, run_set in sides if run_set.phases.get("train_s", 0.0) > 0]
    if not lanes or lanes[0][0] != "yours":
        return None
    totals = [sum(phases.get(key, 0.0) for key, _, _ in _PHASES) for _, phases in lanes]
    longest = max(totals) / 60
    panel = Panel(_SET_WIDTH, 50 * len(lanes) + 44, left=10, top=4)
    panel.axes((0.0, longest), None, "minutes")
    descriptions = []
    for number, (name, phases) in enumerate(lanes):
        top, start, parts = panel.top + 50 * number, 0.0, []
        for key, label, style in _PHASES:
            minutes = phases.get(key, 0.0) / 60
            panel.bar((start, start + minutes), top + 21, 18, f"phase {style}")
            start += minutes
            parts.append(f"{label} {minutes:.2f}")
        descriptions.append(f"{name}: {', '.join(parts)} min")
        panel.text(panel.left, top + 15, descriptions[-1])
    return Plot(
        "Where the time went",
        panel.svg(f"Where the time went; {'; '.join(descriptions)}"),
        "From left to right: start, train, evaluate; means of the runs that the score counts.",
    )


_MOST_RANKS = 32  # Rows of a heat map; with more ranks, the slowest are shown
_CELL = 14
_SHADES = 5


def steps_map(windows: Mapping[int, Sequence[Window]], file: str) -> Plot | None:
    """Plot the lateness per rank over time: a dark row is a slow rank."""
    measured = {
        rank: rank_windows for rank, rank_windows in windows.items() if any(w.waiting is not None for w in rank_windows)
    }
    if len(measured) < 2:
        return None
    start = min(rank_windows[0].time - rank_windows[0].window for rank_windows in measured.values())
    end = max(rank_windows[-1].time for rank_windows in measured.values())
    edges = [start + (end - start) * number / _MOST_BARS for number in range(_MOST_BARS + 1)]
    lateness = late_shares(measured, edges)
    worst = sorted(lateness, key=lambda rank: -sum(lateness[rank]))[:_MOST_RANKS]
    panel = Panel(_SET_WIDTH, _CELL * len(worst) + 48, left=58, top=6)
    panel.axes((0.0, (end - start) / 60), None, "minutes since the first step")
    for row, rank in enumerate(sorted(worst)):
        top = panel.top + _CELL * row
        panel.text(0, top + 11, f"rank {rank}")
        for (cell_start, cell_end), share in zip(itertools.pairwise(edges), lateness[rank], strict=True):
            span = ((cell_start - start) / 60, (cell_end - start) / 60)
            panel.bar(span, top + 1, _CELL - 2, f"heat{min(_SHADES, round(share * 2 * _SHADES))}")
    late = statistics.fmean(lateness[worst[0]])
    return Plot(
        f"Ranks that others waited for, {file}",
        panel.svg(f"Ranks over time; rank {worst[0]} was waited for most, {late:.0%} of the time"),
        "Dark: the others waited for this rank for half of the time or more.",
    )


WIDTH, _HEIGHT = 560, 340
_SMALL = 0.15  # Threshold of the magnified plot, fraction of the longest time
_MOST_LINES = 8
_MOST_BARS = 24
_MOST_MARKS = 60
_WIDEST, _ASIDE = 1.5, 3.0
STYLE = Path(__file__).parents[1] / "templates" / "figure.css"


@dataclass(frozen=True)
class Figure:
    key: str
    title: str
    svg: str
    table: Table

    def standalone_svg(self) -> str:
        """Return the SVG with embedded styles, as a self-contained file."""
        head, rest = self.svg.split(">", 1)
        style = STYLE.read_text("utf-8")
        return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{rest}'


def all_figures(measurements: Sequence[Measurement], baseline: str | None = None) -> list[Figure]:
    figures: list[Figure | None] = [
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
        figures.append(bars("relative", table, label=(0, 1), value=4, axis="times as fast as the baseline"))
    return [figure for figure in figures if figure is not None]


def quality_curves(measurements: Sequence[Measurement], benchmark: str) -> list[Figure]:
    """Plot quality over training length, one figure per metric and unit of length.

    Lines are runs, colours are systems; the target is marked.
    """
    selected = [measurement for measurement in measurements if measurement.benchmark == benchmark]
    kinds = dict.fromkeys((curve.name, curve.over) for measurement in selected for curve in measurement.curves)
    figures = []
    for name, over in kinds:
        names, units = ({kind[column] for kind in kinds} for column in (0, 1))
        parts = [benchmark, *([name] if len(names) > 1 else []), *([over.split()[0]] if len(units) > 1 else [])]
        figures.append(_quality(selected, name, over, "-".join(["quality", *parts])))
    return [figure for figure in figures if figure is not None]


def _quality(measurements: Sequence[Measurement], name: str, over: str, key: str) -> Figure | None:
    with_curve = [
        measurement
        for measurement in measurements
        if any((curve.name, curve.over) == (name, over) for curve in measurement.curves)
    ]
    curves = [
        (number, curve)
        for number, measurement in enumerate(with_curve[:_MOST_LINES], 1)
        for curve in measurement.curves
        if (curve.name, curve.over) == (name, over) and all(map(math.isfinite, itertools.chain(*curve.points)))
    ]
    points = [point for _, curve in curves for point in curve.points]
    if not points:
        return None
    quality, target = curves[0][1].quality, next((curve.target for _, curve in curves if curve.target), None)
    panel = Panel(WIDTH, _HEIGHT)
    levels = [y for _, y in points] + ([target] if target is not None else [])
    is_integer = all(float(x).is_integer() for x, _ in points)
    panel.axes(pad_range([x for x, _ in points], 0.02), pad_range(levels), over, quality, integers=is_integer)
    several = len(curves) > len(with_curve[:_MOST_LINES])
    for number, curve in curves:
        panel.line(curve.points, number)
        panel.marks(curve.points if len(points) <= _MOST_MARKS else (), number)
    for number, measurement in enumerate(with_curve[:_MOST_LINES], 1):
        panel.marks([curve.points[-1] for index, curve in curves if index == number and several], number)
        panel.name(number, measurement.label)
    if target is not None:
        panel.level(target, f"target {target:g}")
    table = quality_table(with_curve, name, over)
    title = f"{table.title}: {with_curve[0].benchmark}{_of(len(with_curve))}"
    return Figure(key, title, panel.svg(title), table)


def time_over_gpus(measurements: Sequence[Measurement]) -> list[Figure]:
    """Plot the time to the target over GPUs, with a magnified plot for short times."""
    all_lines = _lines(measurements)
    if not all_lines:
        return []
    lines = all_lines[:_MOST_LINES]
    longest = max(minutes for _, points in lines for _, minutes in points)
    small = [line for line in lines if max(minutes for _, minutes in line[1]) < _SMALL * longest]
    rows = tuple((name, int(gpus), minutes) for name, points in all_lines for gpus, minutes in points)
    figures = []
    for key, addition, part in (("time", "", lines), ("time-short", ", the short ones magnified", small)):
        if not part or (part is small and len(small) == len(lines)):
            continue
        title = f"Training time over GPUs{addition}{_of(len(all_lines))}"
        numbers = [[name for name, _ in lines].index(name) + 1 for name, _ in part]
        table = Table(title=title, columns=("benchmark", "GPUs", "minutes"), rows=rows)
        figures.append(over_gpus(key, title, part, table, "minutes to the target", numbers=numbers))
    return figures


def efficiency(measurements: Sequence[Measurement]) -> Figure | None:
    table = scaling_efficiency(measurements)
    lines: dict[str, list[Point]] = {}
    for benchmark, system, base, gpus, value, _ in table.rows:
        name = f"{benchmark}, {system}" if len({row[1] for row in table.rows}) > 1 else str(benchmark)
        lines.setdefault(name, [(float(base or 0), 1.0)]).append((float(gpus or 0), float(value or 0)))
    if not lines:
        return None
    visible = list(lines.items())[:_MOST_LINES]
    title = f"{table.title}{_of(len(lines))}"
    ends = [x for _, points in visible for x, _ in points]
    linear = [(min(ends), 1.0), (max(ends), 1.0)]
    return over_gpus("efficiency", title, visible, table, "speed-up over growth in GPUs", linear=linear)


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
    """Draw lines over GPUs, or over another ``axis``, from 0; ``linear`` shows perfect scaling.

    ``spans``: intervals by line name. Intervals wider than half of the values are cut at the plot's edge.
    """
    panel = Panel(WIDTH, _HEIGHT)
    counts = sorted({x for _, points in lines for x, _ in points})
    highest = max(y for points in [*(points for _, points in lines), linear] for _, y in points)
    ends = [high for name, _ in lines for _, _, high in (spans or {}).get(name, ())]
    highest = max(highest, min(max(ends, default=0.0), _WIDEST * highest))
    panel.axes((counts[0], counts[-1]), (0.0, highest * 1.08), axis, label, x_ticks=counts)
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
    """Draw bars from 0 with the full label above the bar; ratios get a line at 1."""
    if not table.rows:
        return None
    rows, row = table.rows[:_MOST_BARS], 34
    panel = Panel(WIDTH, row * len(rows) + 46, left=2, right=44, top=6)
    values = [float(cells[value] or 0) for cells in rows]
    panel.axes((min(*values, 0.0), max(*values, 1.0)), None, axis)
    for number, (cells, length) in enumerate(zip(rows, values, strict=True)):
        top = 6 + row * number
        panel.text(2, top + 11, ", ".join(str(cells[column]) for column in label))
        panel.bar((0.0, length), top + 15, 12, 1)
        panel.text(panel.x(max(length, 0.0)) + 5, top + 25, f"{length:.2f}")
    if not axis.endswith("%"):
        panel.vertical_line(1.0)
    return Figure(key, table.title, panel.svg(table.title), table)


# Note for the title if there are more lines than colours; the table contains all lines.
def _of(count: int) -> str:
    return f" (the first {_MOST_LINES} of {count}; all are in the table)" if count > _MOST_LINES else ""


# Minutes over GPUs per benchmark with at least two GPU counts.
def _lines(measurements: Sequence[Measurement]) -> list[tuple[str, list[Point]]]:
    grouped: dict[str, dict[float, float]] = {}
    several = len({(measurement.framework, measurement.release) for measurement in measurements}) > 1
    for measurement in measurements:
        if measurement.gpus and measurement.minutes:
            system = f", {measurement.system.rpartition('nodes, ')[2]}" if several else ""
            name = f"{measurement.benchmark}{system}"
            best = grouped.setdefault(name, {})
            best[float(measurement.gpus)] = min(measurement.minutes, best.get(float(measurement.gpus), math.inf))
    return [(name, sorted(points.items())) for name, points in grouped.items() if len(points) > 1]
