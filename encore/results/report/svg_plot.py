"""One plot as a small SVG: axes, lines, markers and bars in the classes of figure.css.

from encore.results.report.svg_plot import Panel
panel = Panel(400, 260)
panel.axes((0, 40), (0.3, 0.8), "minutes", "quality")
panel.line([(4, 0.35), (38, 0.76)], 1)
Path("figure.svg").write_text(panel.svg("quality over minutes"))
"""

import html
import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from encore.results.format import printable

Point = tuple[float, float]
Range = tuple[float, float]
Span = tuple[float, float, float]  # x, and the lower and upper end in y

SERIES = 8
_LETTER = 6.9  # Average letter width at 12 px
_ROW = 17.0
_LOGARITHMIC_FROM = 16
_HALF_DIGIT = 3.5
_TICKS_APART = 30.0
# Series differ in colour and marker, which stay distinguishable in print and with colour blindness. SVG paths relative
# to the marker's centre.
_SHAPES = (
    "h0",
    "v0",
    "m-3.8 0l3.8-3.8 3.8 3.8-3.8 3.8z",
    "m-3.5 3l3.5-6.4 3.5 6.4z",
    "m-3.5-3l3.5 6.4 3.5-6.4z",
    "m-3.6-1.2h2.4v-2.4h2.4v2.4h2.4v2.4h-2.4v2.4h-2.4v-2.4h-2.4z",
    "m-3.2-1.8l3.2-1.8 3.2 1.8v3.6l-3.2 1.8-3.2-1.8z",
    "m-3.6-3l3.6 2 3.6-2v6l-3.6-2-3.6 2z",
)
CROSS = "m-3-3l6 6m0-6l-6 6"
# Zero-length lines: the round or square line caps draw the marker, in a fifth of an outline's size.
DOT, SQUARE = "h0", "v0"
_DRAWN = {CROSS: "x", DOT: "dot", SQUARE: "square"}


@dataclass(frozen=True, slots=True)
class Scale:
    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        transform: Callable[[float], float] = math.log if self.logarithmic else float
        span = transform(self.high) - transform(self.low) or 1.0
        return self.start + (transform(value) - transform(self.low)) / span * (self.end - self.start)


class Panel:
    """SVG under construction. Coordinates are pixels before ``axes`` and axis units afterwards."""

    def __init__(self, width: float, height: float, *, left: float = 46, right: float = 12, top: float = 24) -> None:
        self.width, self.height, self.bottom = width, height, height - 36
        self.left, self.right, self.top = left, width - right, top
        self.x = Scale(0, 1, self.left, self.right)
        self.y = Scale(0, 1, self.bottom, self.top)
        self._parts: list[str] = []
        self._legend: list[tuple[str, str]] = []

    def axes(
        self,
        x: Range,
        y: Range | None,
        x_label: str,
        y_label: str = "",
        x_ticks: Sequence[float] = (),
        *,
        integers: bool = False,
    ) -> None:
        """Add axes with a grid.

        Args:
            x: range of x.
            y: range of y; None: no axis.
            x_label: name of x.
            y_label: name of y.
            x_ticks: ticks of x; the axis is logarithmic if they span a factor of 16.
            integers: x is a count: only integer ticks.
        """
        logarithmic = len(x_ticks) > 1 and x_ticks[-1] / x_ticks[0] > _LOGARITHMIC_FROM
        self.x = Scale(*x, self.left, self.right, logarithmic)
        marks = list(x_ticks[:1]) or ticks(*x, integers=integers)
        for tick in x_ticks:
            if self.x(tick) - self.x(marks[-1]) >= _TICKS_APART:
                marks.append(tick)
        self._path("axis", f"M{_px(self.left)} {_px(self.bottom)}H{_px(self.right)}")
        for value in marks:
            # A label that would be cut is aligned with the edge of the picture.
            text = format_tick(value, marks)
            half, center = _HALF_DIGIT * len(text), self.x(value)
            text_x, anchor = (0.0, "") if center < half else (center, "mid")
            text_x, anchor = (self.width, "end") if center + half > self.width else (text_x, anchor)
            self.text(text_x, self.bottom + 15, text, anchor)
        if y is not None:
            self.y = Scale(*y, self.bottom, self.top)
            levels = ticks(*y)
            self._path("grid", "".join(f"M{_px(self.left)} {_px(self.y(v))}H{_px(self.right)}" for v in levels))
            for value in levels:
                self.text(self.left - 6, self.y(value) + 4, format_tick(value, levels), "end")
        self.text(self.right, self.bottom + 31, x_label, "end quiet")
        if y_label:
            self.text(0, 12, y_label, "quiet")

    def line(self, points: Sequence[Point], style: str | int) -> None:
        """Add a line; an integer selects a series' style."""
        # Relative whole pixels keep the page small: it has thousands of points.
        pixels = [(round(self.x(x)), round(self.y(y))) for x, y in points]
        steps = (
            f"{x - previous_x} {y - previous_y}" for (previous_x, previous_y), (x, y) in itertools.pairwise(pixels)
        )
        if len(pixels) > 1:
            self._path(f"l {_style(style)}", f"M{pixels[0][0]} {pixels[0][1]}l{' '.join(steps).replace(' -', '-')}")

    def marks(self, points: Sequence[Point], style: str | int, shape: str | None = None) -> None:
        """Add markers at the points, in the series' shape or in ``shape``."""
        form = shape or _SHAPES[(style - 1) % SERIES if isinstance(style, int) else 0]
        if points:
            markers = (f"M{_px(self.x(x))} {_px(self.y(y))}{form}" for x, y in points)
            self._path(f"{_DRAWN.get(form, 'm')} {_style(style)}", "".join(markers))

    def whiskers(self, spans: Sequence[Span], style: str | int, aside: float = 0.0) -> None:
        """Add intervals as vertical lines, clipped at the axes and shifted by ``aside`` pixels."""
        clipped = ((x, max(low, self.y.low), min(high, self.y.high)) for x, low, high in spans)
        ends = ((_px(self.x(x) + aside), _px(self.y(low)), _px(self.y(high))) for x, low, high in clipped)
        if spans:
            self._path(f"l thin {_style(style)}", "".join(f"M{x} {low}V{high}" for x, low, high in ends))

    def clip(self, *, end: bool = False) -> None:
        """Clip subsequent elements to the axes until ``end``."""
        x, y, width, height = map(_px, (self.left, self.top, self.right - self.left, self.bottom - self.top))
        shape = f'x="{x}" y="{y}" width="{width}" height="{height}" viewBox="{x} {y} {width} {height}"'
        self._parts.append("</svg>" if end else f"<svg {shape}>")

    def level(self, value: float, label: str) -> None:
        """Add a horizontal line, such as a target, with its label above the axes."""
        self._path("level", f"M{_px(self.left)} {_px(self.y(value))}H{_px(self.right)}")
        self.text(self.right, 9, label, "end")
        self._path("level", f"M{_px(self.right - len(label) * _LETTER - 28)} 5h22")

    def vertical_line(self, value: float) -> None:
        self._path("level", f"M{_px(self.x(value))} {_px(self.top)}V{_px(self.bottom)}")

    def bar(self, x: Range, top: float, height: float, style: str | int) -> None:
        """Add a bar between two x values; ``top`` and ``height`` are in pixels."""
        start, end = sorted((self.x(x[0]), self.x(x[1])))
        start, end = max(start, self.left - 1), min(end, self.right + 1)
        shape = f'x="{_px(start)}" y="{_px(top)}" width="{_px(max(end - start, 0.5))}" height="{_px(height)}"'
        self._parts.append(f'<rect class="b {_style(style)}" {shape}/>')

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        attribute = f' class="{style}"' if style else ""
        self._parts.append(f'<text{attribute} x="{_px(x)}" y="{_px(y)}">{escape_text(text)}</text>')

    def name(self, series: int | None, label: str) -> None:
        """Add an entry to the legend; None is the dashed line of ``level``."""
        if series is None:
            swatch = '<path class="level" d="M0-4h16"/>'
        else:
            swatch = f'<path class="l {_style(series)}" d="M0-4h16"/>'
            form = _SHAPES[(series - 1) % SERIES]
            swatch += f'<path class="{_DRAWN.get(form, "m")} {_style(series)}" d="M8-4{form}"/>'
        if (swatch, label) not in self._legend:
            self._legend.append((swatch, label))

    def svg(self, label: str) -> str:
        """Return the SVG element with ``label`` for screen readers; an empty label hides it from them."""
        height = self._draw_legend()
        label_attributes = f'role="img" aria-label="{escape_text(label)}"' if label else 'aria-hidden="true"'
        return f'<svg viewBox="0 0 {_px(self.width)} {_px(height)}" {label_attributes}>{"".join(self._parts)}</svg>'

    # Write the legend below the axes; long names wrap.
    def _draw_legend(self) -> float:
        x, y = 0.0, self.height + 6
        for swatch, label in self._legend:
            lines = textwrap.wrap(label, int((self.width - 24) / _LETTER), break_long_words=True) or [""]
            wide = 24 + len(lines[0]) * _LETTER + 14
            if x and x + wide > self.width:
                x, y = 0.0, y + _ROW
            self._parts.append(f'<g transform="translate({_px(x)} {_px(y + 12)})">{swatch}</g>')
            for number, line in enumerate(lines):
                self.text(x + 22, y + 12 + number * _ROW, line)
            x, y = x + wide, y + _ROW * (len(lines) - 1)
        return y + _ROW + 4 if self._legend else self.height

    def _path(self, style: str, d: str) -> None:
        self._parts.append(f'<path class="{style}" d="{d}"/>')


def _style(style: str | int) -> str:
    return f"s{(style - 1) % SERIES + 1}" if isinstance(style, int) else style


# Coordinate to 0.1 px.
def _px(value: float) -> str:
    return f"{round(value, 1) + 0.0:g}" if abs(value) < 1e5 else "0"


def ticks(low: float, high: float, max_ticks: int = 6, *, integers: bool = False) -> list[float]:
    """Return up to ``max_ticks`` round numbers from low to high; ``integers``: whole numbers only."""
    if not high > low:
        return [low]
    rough = (high - low) / (max_ticks - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    step = max(step, 1.0) if integers else step
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def format_tick(value: float, all_ticks: Sequence[float]) -> str:
    """Format a tick with the digits that the step needs."""
    step = min((b - a for a, b in itertools.pairwise(all_ticks)), default=abs(value) or 1.0)
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    digits += any(abs(round(tick, digits) - tick) > 1e-9 for tick in all_ticks)
    return f"{value + 0.0:,.{min(digits, 8)}f}"


def pad_range(values: Sequence[float], share: float = 0.06) -> Range:
    """Return a range around these values."""
    low, high = min(values), max(values)
    around = (high - low) * share or abs(high) * 0.02 or 1.0
    return low - around, high + around


def escape_text(text: str) -> str:
    return html.escape(printable(text, "?"))
