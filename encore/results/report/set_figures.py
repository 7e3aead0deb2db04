"""The plots of one set of runs: each run's time, the quality over minutes, and where the time went.

from encore.results.report.set_figures import run_dots
plot = run_dots(ours, theirs, within=0.05)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from encore.results.compare.compare import Factor
from encore.results.compare.sides import Side
from encore.results.logs.timing import Curve
from encore.results.report.panel import CROSS, DOT, SQUARE, Panel, Point, Range, Scale, padded
from encore.results.statistics import LEVEL, interval
from encore.results.words import percent

_WIDTH = 400
_HEIGHT = 296
_LANE = 62
_DOT = 8.0
_ROWS = (0, 1, -1, 2, -2)
_PHASES = (("start_s", "start", "s6"), ("train_s", "train", "s1"), ("evaluate_s", "evaluate", "s3"))
_ZOOM = 0.6  # A view that shows more than this share of all qualities enlarges nothing
_LONGEST = 4.0  # A run that missed the target is drawn up to this many times the longest that reached it
_MOST_MARKS = 40
_ROUNDED = 1e-4  # By which a published score may differ from the mean of its runs
_DIAMOND = "m-4.4 0l4.4-4.4 4.4 4.4-4.4 4.4z"
_SHAPES = {"ours": DOT, "theirs": SQUARE}
_HOLLOW = {"ours": "m-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0", "theirs": "m-2.7-2.7h5.4v5.4h-5.4z"}


@dataclass(frozen=True)
class Plot:
    """A plot of one set, with its caption and how to read it."""

    title: str
    svg: str
    note: str = ""


def run_dots(ours: Side, theirs: Side | None, within: float) -> Plot | None:
    """Return every run as a dot, with the interval of the mean: ours above the submission."""
    lanes = [("yours", "ours", ours), *([("theirs", "theirs", theirs)] if theirs else [])]
    lanes = [lane for lane in lanes if lane[2].score is not None or missed(lane[2])]
    values = [value for _, _, side in lanes for value in _positions(side)]
    if len(set(values)) < 2 or not all(map(math.isfinite, values)):
        return None
    panel = Panel(_WIDTH, _LANE * len(lanes) + 44, left=10, top=4)
    panel.axes(padded(values), None, "minutes to the target")
    reference = theirs.score.estimate if theirs is not None and theirs.score is not None else None
    if reference is not None:
        margin = (reference / (1 + within), reference * (1 + within))
        panel.bar(margin, panel.top, panel.bottom - panel.top, "within")
    for number, (name, style, side) in enumerate(lanes):
        _lane(panel, panel.top + number * _LANE, name, style, side)
    words = "; ".join(f"{name} {_described(side)}" for name, _, side in lanes)
    notes = [f"Bar: {percent(LEVEL)} interval of the mean."] if any(_span(side) for _, _, side in lanes) else []
    notes += ["Hollow: dropped from the score."] if any(any(_cut(side)) for _, _, side in lanes) else []
    notes += [f"Shaded: within {percent(within)} of theirs."] if reference is not None else []
    notes += ["Cross: did not reach the target."] if any(missed(side) for _, _, side in lanes) else []
    return Plot("Time of each run", panel.svg(f"Minutes of each run: {words}"), " ".join(notes))


def _lane(panel: Panel, top: float, name: str, style: str, side: Side) -> None:
    middle = top + 38
    span = _span(side)
    if span is not None:
        panel.bar(span, middle - 8, 16, f"span {style}")
    if side.score is not None:
        panel.bar((side.score.estimate, side.score.estimate), middle - 11, 22, f"mean {style}")
    panel.y = Scale(0.0, 1.0, middle, middle - 1)
    ordered, (fastest, slowest) = sorted(_minutes(side)), _cut(side)
    dots = list(zip(ordered, _offsets([panel.x(value) for value in ordered]), strict=True))
    last = len(dots) - slowest
    panel.marks(dots[fastest:last], style, _SHAPES[style])
    panel.marks([*dots[:fastest], *dots[last:]], f"hollow {style}", _HOLLOW[style])
    panel.marks([(value, 0.0) for value in missed(side)], "missed", CROSS)
    panel.text(panel.left, top + 15, f"{name}: {_described(side)}", "halo")


# Each run's minutes, scaled as the score next to them is.
def _minutes(side: Side) -> list[float]:
    scaled = side.score_kind == "official" and side.score_is_official
    return [minutes * (side.scaling_factor or 1.0 if scaled else 1.0) for minutes in side.minutes]


def _described(side: Side) -> str:
    if side.score is None:
        return f"none of {side.runs} runs reached the target"
    kind = "score" if side.score_is_official else "mean"
    counted = f"{side.converged} of {side.runs}" if side.converged != side.runs else f"{side.runs}"
    return f"{counted} run{'' if counted == '1' else 's'}, {kind} {side.score.estimate:.2f} min"


# How many of the fastest and of the slowest runs the score leaves out: the ones without which it is the mean. A run
# that missed its target is dropped first, in place of the slowest.
def _cut(side: Side) -> tuple[int, int]:
    ordered = sorted(_minutes(side))
    if side.score is None or not side.score_is_official:
        return 0, 0
    for fastest in range(len(ordered) // 2):
        for slowest in range(fastest + 1):
            kept = ordered[fastest : len(ordered) - slowest]
            if math.isclose(math.fsum(kept) / len(kept), side.score.estimate, rel_tol=_ROUNDED):
                return fastest, slowest
    return 0, 0


def _span(side: Side) -> Range | None:
    return interval(side.score) if side.score is not None else None


def _positions(side: Side) -> Iterator[float]:
    yield from _minutes(side)
    yield from missed(side)
    if side.score is not None:
        yield side.score.estimate
    yield from _span(side) or ()


def missed(side: Side) -> list[float]:
    """Return the minutes of the runs that ended without reaching the target."""
    limit = _LONGEST * max(side.minutes, default=float("inf"))
    ended = [run.elapsed_minutes for run in side.logs if not run.converged]
    return [minutes for minutes in ended if minutes is not None and 0 < minutes < min(limit, 1e6)]


# How far above the middle each dot is, so that none hides another.
def _offsets(pixels: Sequence[float]) -> list[float]:
    placed: list[Point] = []
    for x in pixels:
        rows = [_DOT * row for row in _ROWS]
        free = [y for y in rows if all(abs(x - px) >= _DOT or y != py for px, py in placed)]
        placed.append((x, free[0] if free else 0.0))
    return [y for _, y in placed]


def quality_plots(ours: Side, theirs: Side | None) -> list[Plot]:
    """Return quality over minutes for each metric, the submission behind, and once more enlarged at the target."""
    mine, others = ours.curves, theirs.curves if theirs is not None else ()
    known = ours.targets or (theirs.targets if theirs else ())
    targets, qualities = {each.name: each.value for each in known}, {each.name: each.quality for each in known}
    stated = ours.settings.get("configuration.quality_target")
    if isinstance(stated, int | float):
        targets = {name: float(stated) for name in targets or ("value",)}
    found = []
    for name in dict.fromkeys(name for curve in mine for name in curve.values):
        front, back = _points(mine, name), _points(others, name)
        if not front:
            continue
        target = targets.get(name)
        metric = qualities.get(name) or ("quality" if name == "value" else name)
        metric = f"{metric[0].upper()}{metric[1:]}"
        found.append(_quality(front, back, target, f"{metric} over minutes", None))
        view = _close(front, target) if isinstance(target, int | float) else None
        if view is not None:
            found.append(_quality(front, back, target, f"{metric} around the target, enlarged", view))
    return found


# Points of each curve that has a finite one.
def _points(curves: Sequence[Curve], name: str) -> list[list[Point]]:
    lines = [list(zip(curve.minutes, curve.values.get(name, ()), strict=False)) for curve in curves]
    return [line for line in lines if line and all(abs(x) < 1e6 and abs(y) < 1e9 for x, y in line)]


# Ranges of minutes and quality around the target; None where that would enlarge nothing.
def _close(lines: Sequence[Sequence[Point]], target: float) -> tuple[Range, Range] | None:
    levels = [y for line in lines for _, y in line]
    whole = max(*levels, target) - min(*levels, target)
    away = max(abs(line[-1][1] - target) for line in lines)
    half = max(1.5 * away, 0.06 * whole)
    if not 0 < 2 * half < _ZOOM * whole:
        return None
    inside = [x for line in lines for x, y in line if abs(y - target) <= half]
    if not inside or max(inside) <= min(inside):
        return None
    return padded(inside, 0.12), (target - half, target + half)


def _quality(
    front: Sequence[Sequence[Point]],
    back: Sequence[Sequence[Point]],
    target: float | None,
    title: str,
    view: tuple[Range, Range] | None,
) -> Plot:
    every = [point for line in (*front, *back) for point in line]
    levels = [y for _, y in every] + ([target] if target is not None else [])
    x, y = view or ((0.0, max(x for x, _ in every) * 1.03), padded(levels))
    panel = Panel(_WIDTH, _HEIGHT, top=20)
    panel.axes(x, y, "minutes since run_start")
    panel.clip()
    for lines, style in ((back, "theirs"), (front, "ours")):
        seen = [part for line in lines if (part := _in_view(line, x))]
        for part in seen:
            panel.line(part, style)
        every = [point for part in seen for point in part]
        marked = every if style == "ours" and len(every) <= _MOST_MARKS else [line[-1] for line in lines]
        panel.marks([point for point in marked if y[0] <= point[1] <= y[1]], style, _SHAPES[style])
    panel.clip(end=True)
    if target is not None:
        panel.level(target, f"target {target:g}")
    ends = ", ".join(f"{line[-1][1]:.4g} after {line[-1][0]:.4g} min" for line in front[:5])
    return Plot(title, panel.svg(f"{title}; {len(front)} of your runs end with {ends}"), "")


# Points of a line in a range of minutes, and the ones before and after it.
def _in_view(line: Sequence[Point], x: Range) -> list[Point]:
    near = [n for n, point in enumerate(line) if x[0] <= point[0] <= x[1]]
    return list(line[max(near[0] - 1, 0) : near[-1] + 2]) if near else []


def ratio_line(factor: Factor, within: float, *, named: bool = True) -> str:
    """Return a ratio with its interval on one line of text, the margin shaded; 0.8 and 1.25 are its ends.

    ``named``: it is read out; else the numbers are next to it.
    """
    if factor.ratio is None or factor.ratio <= 0:
        return ""
    panel = Panel(120, 18, left=4, right=4, top=0)
    panel.x = Scale(0.8, 1.25, 4, 116, logarithmic=True)
    panel.y = Scale(0, 1, 9, 8)
    panel.bar((1 / (1 + within), 1 + within), 1, 16, "within")
    panel.bar((1.0, 1.0), 1, 16, "one")
    low, high = (min(max(value, 0.78), 1.28) for value in factor.interval or (factor.ratio, factor.ratio))
    if factor.interval is not None:
        panel.bar((low, high), 7.6, 2.8, "ours")
    shown = min(max(factor.ratio, 0.78), 1.28)
    panel.marks([(shown, 0.0)], "ours", _SHAPES["ours"] if shown == factor.ratio else _DIAMOND)
    span = f", {percent(LEVEL)} {factor.interval[0]:.3f} to {factor.interval[1]:.3f}" if factor.interval else ""
    return panel.svg(f"{factor.name}: ratio {factor.ratio:.3f}{span}" if named else "")


def phase_bars(ours: Side, theirs: Side | None) -> Plot | None:
    """Return where the time on the clock went, ours above the submission."""
    sides = [("yours", ours), *([("theirs", theirs)] if theirs else [])]
    lanes = [(name, side.phases) for name, side in sides if side.phases.get("train_s", 0.0) > 0]
    if not lanes or lanes[0][0] != "yours":
        return None
    totals = [sum(phases.get(key, 0.0) for key, _, _ in _PHASES) for _, phases in lanes]
    most = max(totals) / 60
    panel = Panel(_WIDTH, 50 * len(lanes) + 44, left=10, top=4)
    panel.axes((0.0, most), None, "minutes")
    words = []
    for number, (name, phases) in enumerate(lanes):
        top, at, parts = panel.top + 50 * number, 0.0, []
        for key, label, style in _PHASES:
            minutes = phases.get(key, 0.0) / 60
            panel.bar((at, at + minutes), top + 21, 18, f"phase {style}")
            at += minutes
            parts.append(f"{label} {minutes:.2f}")
        words.append(f"{name}: {', '.join(parts)} min")
        panel.text(panel.left, top + 15, words[-1])
    return Plot(
        "Where the time went",
        panel.svg(f"Where the time went; {'; '.join(words)}"),
        "From left to right: start, train, evaluate; means of the runs that the score counts.",
    )
