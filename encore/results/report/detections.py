"""The detections of a run: images of its last evaluation with what was found in them next to what is there.

from encore.results.report.detections import drawing, images_of
for image in images_of(Path("results/20260101T120000Z-maskrcnn-pytorch-cpu")):
    Path(f"{image.name}.svg").write_text(drawing(image), encoding="utf-8")
"""

import base64
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from encore.results.report.shown import first_read

FILE = "detections.jsonl"  # In the folder of an experiment: one JSON object per image
IN_REPORT = 2  # Images at each end that a report shows
PANEL, GAP = 360, 8  # Width in pixels in which each side is shown, and between them
KEY = (
    "Left: detections with a score of at least 0.3, 20 at most; dashed: matches no object at IoU 0.5. "
    "Right: the objects; dotted: a crowd."
)
_MOST_LINES = 64
_LONGEST_LINE = 1 << 24
_MOST_SHAPES = 400
_MOST_RUNS = 1 << 18
_LARGEST = 4096
# Okabe and Ito's palette, which colour-blind readers can distinguish, without black and yellow.
_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7")


# Name that controls no terminal and turns no direction of writing, cut.
def _name(text: object) -> str:
    return "".join(each if each.isprintable() else " " for each in str(text)[:60])


def _at_most(count: int) -> BeforeValidator:
    return BeforeValidator(lambda items: items[:count])


def _jpeg(text: str) -> str:
    if not base64.b64decode(text, validate=True).startswith(b"\xff\xd8\xff"):
        raise ValueError("no JPEG")
    return text


Finite = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, BeforeValidator(_name)]
Size = Annotated[int, Field(gt=0, le=_LARGEST)]


class Shape(BaseModel):
    """A detection or an object, in pixels of the picture."""

    label: Name
    box: tuple[Finite, Finite, Finite, Finite]  # x, y, width and height
    # x, y and length of each run of pixels of the mask, one after the other; empty without a mask.
    runs: Annotated[tuple[int, ...], _at_most(_MOST_RUNS)] = ()
    score: Finite | None = None  # Of a detection
    matched: bool = True  # Whether a detection matches an object
    crowd: bool = False


Shapes = Annotated[tuple[Shape, ...], _at_most(_MOST_SHAPES)]


class Detected(BaseModel):
    """An image with its detections and objects."""

    which: Annotated[str, BeforeValidator(lambda which: "best" if which == "best" else "worst")]  # best or worst
    image: int
    file: Name
    epoch: int
    precision: Finite  # Average precision at IoU 0.5 within this image, 0 to 1: not what a run is judged by
    width: Size
    height: Size
    jpeg: Annotated[str, AfterValidator(_jpeg)]  # In base64
    found: Shapes
    objects: Shapes = Field(alias="truth")

    @property
    def name(self) -> str:
        """Name of its picture."""
        return f"{self.which}_{self.image}"

    @property
    def shown_size(self) -> tuple[int, int]:
        """Width and height of its picture."""
        return 2 * PANEL + GAP, round(self.height * PANEL / self.width)

    @property
    def source(self) -> str:
        """Its picture as the address of an image, which no style of a page reaches."""
        return "data:image/svg+xml;base64," + base64.b64encode(drawing(self).encode("utf-8", "replace")).decode("ascii")

    @property
    def title(self) -> str:
        """One line on it."""
        return (
            f"{self.which}: {self.file} after epoch {self.epoch}, average precision {self.precision:.2f} at IoU 0.5; "
            f"detections: {len(self.found)}, objects: {len(self.objects)}"
        )


def images_of(folder: Path | None) -> list[Detected]:
    """Return the images of the first experiment that has some, the best from the best on, then the worst."""
    return first_read(folder, FILE, Detected, _MOST_LINES, _LONGEST_LINE)[1]


def shown_in_report(images: Sequence[Detected]) -> list[Detected]:
    """Return a few of both ends."""
    return [each for which in ("best", "worst") for each in [i for i in images if i.which == which][:IN_REPORT]]


def drawing(image: Detected) -> str:
    """Return a picture as SVG that needs nothing else."""
    unit = image.width / PANEL
    gap = GAP * unit
    (width, height), whole = image.shown_size, 2 * image.width + gap
    sides = ((image.found, 0.0), (image.objects, image.width + gap))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole:.2f} {image.height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{escape(image.title)}</title>",
        f'<defs><image id="image" width="{image.width}" height="{image.height}" '
        f'href="data:image/jpeg;base64,{image.jpeg}"/></defs>',
    ]
    for shapes, left in sides:
        # A label at the edge is cut at the panel's end.
        parts.append(f'<svg x="{left:.2f}" width="{image.width}" height="{image.height}"><use href="#image"/>')
        parts += [_mask(shape) for shape in shapes]
        parts += [_box(shape, unit, image) for shape in reversed(shapes)]
        parts.append("</svg>")
    return "".join([*parts, "</svg>\n"])


def _mask(shape: Shape) -> str:
    if not shape.runs:
        return ""
    numbers = iter(shape.runs)
    path = "".join(f"M{x} {y}h{length}v1h-{length}z" for x, y, length in zip(numbers, numbers, numbers, strict=False))
    return f'<path d="{path}" fill="{_colour(shape)}" fill-opacity=".4" shape-rendering="crispEdges"/>'


def _box(shape: Shape, unit: float, image: Detected) -> str:
    x, y, width, height = shape.box
    dashes = f' stroke-dasharray="{6 * unit:.2f} {4 * unit:.2f}"' if not shape.matched else ""
    dashes = f' stroke-dasharray="{1.5 * unit:.2f} {3 * unit:.2f}"' if shape.crowd else dashes
    score = "" if shape.score is None else f" {shape.score:.2f}"
    text = f"{shape.label}{score}"
    # Above the box, or inside it where there is no room; about as wide as its letters.
    top = y - 13 * unit if y > 13 * unit else y
    left = max(0.0, min(x, image.width - (6.4 * len(text) + 6) * unit))
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="none" '
        f'stroke="{_colour(shape)}" stroke-width="{2 * unit:.2f}"{dashes}/>'
        f'<rect x="{left:.2f}" y="{top:.2f}" width="{(6.4 * len(text) + 6) * unit:.2f}" height="{13 * unit:.2f}" '
        f'fill="{_colour(shape)}"/>'
        f'<text x="{left + 3 * unit:.2f}" y="{top + 10 * unit:.2f}" font-family="ui-monospace,monospace" '
        f'font-size="{10.5 * unit:.2f}" fill="#000">{escape(text)}</text>'
    )


def _colour(shape: Shape) -> str:
    return _COLOURS[zlib.crc32(shape.label.encode("utf-8", "replace")) % len(_COLOURS)]
