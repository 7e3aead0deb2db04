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

Point = tuple[float, float]
Range = tuple[float, float]
Span = tuple[float, float, float]  # A value of x, and from where to where y is there

SERIES = 8
_LETTER = 6.9  # Width of a letter at 12 px, on average
_ROW = 17.0
_LOGARITHMIC_FROM = 16
_HALF_DIGIT = 3.5
_TICKS_APART = 30.0
# Each series has a colour and a marker of its own, so that neither print nor colour vision hides which is which.
# Paths relative to the marker's centre.
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
# Lines of no length: their round or square ends make the marker, in a fifth of an outline's text.
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
        place: Callable[[float], float] = math.log if self.logarithmic else float
        span = place(self.high) - place(self.low) or 1.0
        return self.start + (place(value) - place(self.low)) / span * (self.end - self.start)


class Panel:
    """An SVG that is being drawn. What is drawn before ``axes`` is in pixels, afterwards in the axes' units."""

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
        at: Sequence[float] = (),
        *,
        whole: bool = False,
    ) -> None:
        """Draw axes with their grid.

        Args:
            x: range of x.
            y: range of y; None: no axis.
            x_label: name of x.
            y_label: name of y.
            at: the ticks of x, on a logarithmic axis where they span a factor of 16.
            whole: x counts something, and has no tick between two whole numbers.
        """
        logarithmic = len(at) > 1 and at[-1] / at[0] > _LOGARITHMIC_FROM
        self.x = Scale(*x, self.left, self.right, logarithmic)
        marks = self._apart(at) if at else ticks(*x, whole=whole)
        self._path("axis", f"M{_n(self.left)} {_n(self.bottom)}H{_n(self.right)}")
        for value in marks:
            self._below(value, written(value, marks))
        if y is not None:
            self.y = Scale(*y, self.bottom, self.top)
            levels = ticks(*y)
            self._path("grid", "".join(f"M{_n(self.left)} {_n(self.y(v))}H{_n(self.right)}" for v in levels))
            for value in levels:
                self.text(self.left - 6, self.y(value) + 4, written(value, levels), "end")
        self.text(self.right, self.bottom + 31, x_label, "end quiet")
        if y_label:
            self.text(0, 12, y_label, "quiet")

    # Write a tick's value below the axis, at the edge of the picture where it would be cut.
    def _below(self, value: float, words: str) -> None:
        half, x = _HALF_DIGIT * len(words), self.x(value)
        inside = (0.0, "") if x < half else (x, "mid")
        place, anchor = (self.width, "end") if x + half > self.width else inside
        self.text(place, self.bottom + 15, words, anchor)

    def _apart(self, at: Sequence[float]) -> list[float]:
        kept = list(at[:1])
        for value in at[1:]:
            if self.x(value) - self.x(kept[-1]) >= _TICKS_APART:
                kept.append(value)
        return kept

    def line(self, points: Sequence[Point], style: str | int) -> None:
        """Draw a line; a number is that series' style."""
        # Steps of whole pixels: a page has thousands of them.
        placed = [(round(self.x(x)), round(self.y(y))) for x, y in points]
        steps = (f"{x - left} {y - high}" for (left, high), (x, y) in itertools.pairwise(placed))
        if len(placed) > 1:
            self._path(f"l {_style(style)}", f"M{placed[0][0]} {placed[0][1]}l{' '.join(steps).replace(' -', '-')}")

    def marks(self, points: Sequence[Point], style: str | int, shape: str | None = None) -> None:
        """Draw a marker at each point, all of one shape: the series' own, or the given one."""
        form = shape or _SHAPES[_index(style)]
        if points:
            spots = (f"M{_n(self.x(x))} {_n(self.y(y))}{form}" for x, y in points)
            self._path(f"{_DRAWN.get(form, 'm')} {_style(style)}", "".join(spots))

    def whiskers(self, spans: Sequence[Span], style: str | int, aside: float = 0.0) -> None:
        """Draw intervals as vertical lines, cut at the axes, ``aside`` pixels from their x."""
        inside = ((x, max(low, self.y.low), min(high, self.y.high)) for x, low, high in spans)
        ends = ((_n(self.x(x) + aside), _n(self.y(low)), _n(self.y(high))) for x, low, high in inside)
        if spans:
            self._path(f"l thin {_style(style)}", "".join(f"M{x} {low}V{high}" for x, low, high in ends))

    def clip(self, *, end: bool = False) -> None:
        """Hide what is drawn outside of the axes from here on, until the end of the clip."""
        box = f"{_n(self.left)} {_n(self.top)} {_n(self.right - self.left)} {_n(self.bottom - self.top)}"
        x, y, width, height = box.split(" ")
        shape = f'x="{x}" y="{y}" width="{width}" height="{height}" viewBox="{box}"'
        self._parts.append("</svg>" if end else f"<svg {shape}>")

    def level(self, value: float, label: str) -> None:
        """Draw a horizontal line, such as a target; its label is above the axes, where it covers nothing."""
        self._path("level", f"M{_n(self.left)} {_n(self.y(value))}H{_n(self.right)}")
        self.text(self.right, 9, label, "end")
        self._path("level", f"M{_n(self.right - len(label) * _LETTER - 28)} 5h22")

    def upright(self, value: float) -> None:
        self._path("level", f"M{_n(self.x(value))} {_n(self.top)}V{_n(self.bottom)}")

    def bar(self, x: Range, top: float, height: float, style: str | int) -> None:
        """Draw a bar from one value of x to the other; ``top`` and ``height`` are in pixels."""
        start, end = sorted((self.x(x[0]), self.x(x[1])))
        start, end = max(start, self.left - 1), min(end, self.right + 1)
        shape = f'x="{_n(start)}" y="{_n(top)}" width="{_n(max(end - start, 0.5))}" height="{_n(height)}"'
        self._parts.append(f'<rect class="b {_style(style)}" {shape}/>')

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        given = f' class="{style}"' if style else ""
        self._parts.append(f'<text{given} x="{_n(x)}" y="{_n(y)}">{escaped(text)}</text>')

    def name(self, series: int | None, label: str) -> None:
        """Add an entry to the legend; None is the dashed line of ``level``."""
        if series is None:
            swatch = '<path class="level" d="M0-4h16"/>'
        else:
            swatch = f'<path class="l {_style(series)}" d="M0-4h16"/>'
            form = _SHAPES[_index(series)]
            swatch += f'<path class="{_DRAWN.get(form, "m")} {_style(series)}" d="M8-4{form}"/>'
        if (swatch, label) not in self._legend:
            self._legend.append((swatch, label))

    def svg(self, label: str) -> str:
        """Return the drawing as an element of a page, with the label that is read out; without one it is silent."""
        low = self._draw_legend()
        named = f'role="img" aria-label="{escaped(label)}"' if label else 'aria-hidden="true"'
        return f'<svg viewBox="0 0 {_n(self.width)} {_n(low)}" {named}>{"".join(self._parts)}</svg>'

    # Write the names below the axes, whole: a long one continues in the next row.
    def _draw_legend(self) -> float:
        x, y = 0.0, self.height + 6
        for swatch, label in self._legend:
            lines = textwrap.wrap(label, int((self.width - 24) / _LETTER), break_long_words=True) or [""]
            wide = 24 + len(lines[0]) * _LETTER + 14
            if x and x + wide > self.width:
                x, y = 0.0, y + _ROW
            self._parts.append(f'<g transform="translate({_n(x)} {_n(y + 12)})">{swatch}</g>')
            for number, line in enumerate(lines):
                self.text(x + 22, y + 12 + number * _ROW, line)
            x, y = x + wide, y + _ROW * (len(lines) - 1)
        return y + _ROW + 4 if self._legend else self.height

    def _path(self, style: str, d: str) -> None:
        self._parts.append(f'<path class="{style}" d="{d}"/>')


def _index(style: str | int) -> int:
    return (style - 1) % SERIES if isinstance(style, int) else 0


def _style(style: str | int) -> str:
    return f"s{_index(style) + 1}" if isinstance(style, int) else style


# Coordinate to 0.1 px.
def _n(value: float) -> str:
    return f"{round(value, 1) + 0.0:g}" if abs(value) < 1e5 else "0"


def ticks(low: float, high: float, most: int = 6, *, whole: bool = False) -> list[float]:
    """Return round numbers from low to high, at most ``most`` of them; whole ones where they count something."""
    if not high > low:
        return [low]
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def written(value: float, among: Sequence[float]) -> str:
    """Return a tick's number with the digits that its step needs."""
    step = min((b - a for a, b in itertools.pairwise(among)), default=abs(value) or 1.0)
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    if any(round(each, digits) != each and abs(round(each, digits) - each) > 1e-9 for each in among):
        digits += 1
    return f"{value + 0.0:,.{min(digits, 8)}f}"


def padded(values: Sequence[float], share: float = 0.06) -> Range:
    """Return a range around these values."""
    low, high = min(values), max(values)
    around = (high - low) * share or abs(high) * 0.02 or 1.0
    return low - around, high + around


def escaped(text: str) -> str:
    return html.escape("".join(each if each.isprintable() else "?" for each in text))
