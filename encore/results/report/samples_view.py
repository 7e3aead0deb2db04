"""Files of lines that a training leaves for people to look at: translations, continued texts, detections, games."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator

from encore.results.format import printable
from encore.results.report.figures import Plot
from encore.results.report.svg_plot import Panel, pad_range
from encore.results.table import Table

Line = TypeVar("Line", bound=BaseModel)


# Data URL for an image: page styles do not apply to it.
def _data_url(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode("utf-8", "replace")).decode("ascii")


def read_first(
    folder: Path | None, name: str, kind: type[Line], max_lines: int, max_chars: int
) -> tuple[Path, list[Line]]:
    """Return the first experiment's file with valid records, and the records; an empty path and list without any."""
    files = {
        path.parent.name[11:]: path for path in (folder.glob(f"experiment_*/{name}") if folder is not None else ())
    }
    ordered = (files[number] for number in sorted(filter(str.isdecimal, files), key=int))
    contents = ((path, list(read(path, kind, max_lines, max_chars))) for path in ordered)
    return next(((path, lines) for path, lines in contents if lines), (Path(), []))


def read(path: Path, kind: type[Line], max_lines: int, max_chars: int) -> Iterator[Line]:
    """Yield the valid records of the first ``max_lines`` lines; skip damaged, other and overlong lines."""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in islice(iter(lambda: file.readline(max_chars), ""), max_lines):
            with suppress(ValidationError, TypeError):
                yield kind.model_validate_json(line)


TRANSLATIONS = "translations.jsonl"  # One JSON object per test sentence, in the experiment folder
SHOWN = 5  # Number of best and of worst sentences
LONGEST = 300  # Longest displayed text, characters
_MOST_LINES = 100_000
_LONGEST_LINE = 1 << 16


class Translation(BaseModel):
    index: int
    source: str
    hypothesis: str
    reference: str
    bleu: float = Field(allow_inf_nan=False)  # Sentence BLEU, 0 to 100; the run's quality is corpus BLEU
    # Character agreement, 0 to 100; ranks sentences that share no 4-gram with the reference.
    chrf: float = Field(allow_inf_nan=False)
    epoch: int


def translations_table(folder: Path | None) -> Table | None:
    """Return the best and the worst translations of the first experiment that has some; None without any."""
    path, translations = read_first(folder, TRANSLATIONS, Translation, _MOST_LINES, _LONGEST_LINE)
    if not translations:
        return None
    ranked = sorted(translations, key=lambda translation: (-translation.bleu, -translation.chrf, translation.index))
    best = [("best", translation) for translation in ranked[:SHOWN]]
    worst = [("worst", translation) for translation in reversed(ranked[SHOWN:][-SHOWN:])]
    return Table(
        title="Translations, best and worst by BLEU and chrF of the sentence",
        columns=("which", "sentence", "BLEU", "chrF", "source", "translation", "reference"),
        formats={"BLEU": ".1f", "chrF": ".1f"},
        rows=tuple(
            (
                which,
                line.index + 1,
                line.bleu,
                line.chrf,
                *map(_shorten, (line.source, line.hypothesis, line.reference)),
            )
            for which, line in (*best, *worst)
        ),
        note=f"Of {len(ranked):,} after epoch {ranked[0].epoch} of result_{path.parent.name[11:]}.txt. BLEU of a "
        f"sentence is no quality of the run. Texts longer than {LONGEST} characters are cut.",
    )


TEXTS = "texts.jsonl"  # One JSON object per continued text, in the experiment folder
_MOST_TEXTS = 8


class Continuation(BaseModel):
    text: str
    reference: str
    likeliest: str
    drawn: str


def texts_table(folder: Path | None) -> Table | None:
    """Return the texts continued by the network of the first experiment with texts, or None."""
    path, texts = read_first(folder, TEXTS, Continuation, _MOST_TEXTS, _LONGEST_LINE)
    if not texts:
        return None
    return Table(
        title="Texts that the trained network continues",
        columns=("prompt", "reference", "greedy", "sampled"),
        rows=tuple(tuple(map(_shorten, (text.text, text.reference, text.likeliest, text.drawn))) for text in texts),
        note=f"Prompts from evaluation samples, after result_{path.parent.name[11:]}.txt; sampled at temperature "
        f"0.8. Texts longer than {LONGEST} characters are cut.",
    )


# Text on one line, cut, without characters that control a terminal or turn the direction of writing.
def _shorten(text: str) -> str:
    line = " ".join(_printable(text, 4 * LONGEST).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


DETECTIONS = "detections.jsonl"  # One JSON object per image, in the experiment folder
IN_REPORT = 2  # Number of best and of worst images in a report
PANEL, GAP = 360, 8  # Panel width and gap, pixels
KEY = (
    "Left: detections with a score of at least 0.3, 20 at most; dashed: matches no object at IoU 0.5. "
    "Right: the objects; dotted: a crowd."
)
_MOST_IMAGES = 64
_LONGEST_IMAGE = 1 << 24
_MOST_SHAPES = 400
_MOST_RUNS = 1 << 18
_LARGEST = 4096
# Okabe and Ito's palette, which colour-blind readers can distinguish, without black and yellow.
_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7")


# Text that controls no terminal and turns no direction of writing, cut.
def _printable(text: object, max_chars: int = 60) -> str:
    return printable(str(text)[:max_chars], " ")


def _jpeg(text: str) -> str:
    if not base64.b64decode(text, validate=True).startswith(b"\xff\xd8\xff"):
        raise ValueError("no JPEG")
    return text


Finite = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, BeforeValidator(_printable)]
Size = Annotated[int, Field(gt=0, le=_LARGEST)]


class Shape(BaseModel):
    label: Name
    box: tuple[Finite, Finite, Finite, Finite]  # x, y, width and height
    # Pixel runs of the mask as (x, y, length) triples; empty without a mask.
    runs: Annotated[tuple[int, ...], BeforeValidator(lambda runs: runs[:_MOST_RUNS])] = ()
    score: Finite | None = None  # A detection's
    matched: bool = True  # Whether a detection matches an object
    crowd: bool = False


Shapes = Annotated[tuple[Shape, ...], BeforeValidator(lambda shapes: shapes[:_MOST_SHAPES])]


class Detected(BaseModel):
    which: Annotated[str, BeforeValidator(lambda which: "best" if which == "best" else "worst")]  # best or worst
    image: int
    file: Name
    epoch: int
    precision: Finite  # Average precision at IoU 0.5 in this image, 0 to 1; the run's quality covers all images
    width: Size
    height: Size
    jpeg: Annotated[str, AfterValidator(_jpeg)]  # In base64
    found: Shapes
    objects: Shapes = Field(alias="truth")

    @property
    def name(self) -> str:
        return f"{self.which}_{self.image}"

    @property
    def shown_size(self) -> tuple[int, int]:
        return 2 * PANEL + GAP, round(self.height * PANEL / self.width)

    @property
    def source(self) -> str:
        return _data_url(image_svg(self))

    @property
    def title(self) -> str:
        return (
            f"{self.which}: {self.file} after epoch {self.epoch}, average precision {self.precision:.2f} at IoU 0.5; "
            f"detections: {len(self.found)}, objects: {len(self.objects)}"
        )


def images_of(folder: Path | None) -> list[Detected]:
    """Return the images of the first experiment that has some, the best from the best on, then the worst."""
    return read_first(folder, DETECTIONS, Detected, _MOST_IMAGES, _LONGEST_IMAGE)[1]


def select_for_report(images: Sequence[Detected]) -> list[Detected]:
    """Return a few of the best and of the worst images."""
    return [image for which in ("best", "worst") for image in [i for i in images if i.which == which][:IN_REPORT]]


def image_svg(image: Detected) -> str:
    """Return a self-contained SVG of the image and its boxes."""
    unit = image.width / PANEL
    gap = GAP * unit
    (width, height), total_width = image.shown_size, 2 * image.width + gap
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width:.2f} {image.height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{escape(image.title)}</title>",
        f'<defs><image id="image" width="{image.width}" height="{image.height}" '
        f'href="data:image/jpeg;base64,{image.jpeg}"/></defs>',
    ]
    for shapes, offset in ((image.found, 0.0), (image.objects, image.width + gap)):
        # A label at the edge is cut at the panel's end.
        parts.append(f'<svg x="{offset:.2f}" width="{image.width}" height="{image.height}"><use href="#image"/>')
        parts += [_mask(shape) for shape in shapes if shape.runs]
        parts += [_box(shape, unit, image) for shape in reversed(shapes)]
        parts.append("</svg>")
    return "".join([*parts, "</svg>\n"])


def _mask(shape: Shape) -> str:
    numbers = iter(shape.runs)
    path = "".join(f"M{x} {y}h{length}v1h-{length}z" for x, y, length in zip(numbers, numbers, numbers, strict=False))
    return f'<path d="{path}" fill="{_colour(shape)}" fill-opacity=".4" shape-rendering="crispEdges"/>'


def _box(shape: Shape, unit: float, image: Detected) -> str:
    x, y, width, height = shape.box
    dashes = f' stroke-dasharray="{6 * unit:.2f} {4 * unit:.2f}"' if not shape.matched else ""
    dashes = f' stroke-dasharray="{1.5 * unit:.2f} {3 * unit:.2f}"' if shape.crowd else dashes
    text = shape.label if shape.score is None else f"{shape.label} {shape.score:.2f}"
    # Label above the box, or inside if the room is insufficient; its width is estimated from the number of letters.
    label_y = y - 13 * unit if y > 13 * unit else y
    label_x = max(0.0, min(x, image.width - (6.4 * len(text) + 6) * unit))
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="none" '
        f'stroke="{_colour(shape)}" stroke-width="{2 * unit:.2f}"{dashes}/>'
        f'<rect x="{label_x:.2f}" y="{label_y:.2f}" width="{(6.4 * len(text) + 6) * unit:.2f}" '
        f'height="{13 * unit:.2f}" fill="{_colour(shape)}"/>'
        f'<text x="{label_x + 3 * unit:.2f}" y="{label_y + 10 * unit:.2f}" font-family="ui-monospace,monospace" '
        f'font-size="{10.5 * unit:.2f}" fill="#000">{escape(text)}</text>'
    )


def _colour(shape: Shape) -> str:
    return _COLOURS[zlib.crc32(shape.label.encode("utf-8", "replace")) % len(_COLOURS)]


# One JSON object per generation, in the experiment folder.
GENERATIONS, EVALUATIONS, GAMES = "generations.jsonl", "evaluations.jsonl", "shown_games.jsonl"
LETTERS = "ABCDEFGHJKLMNOPQRST"  # Board columns; I is skipped by convention
UNIT = 28  # Pixels between board lines
_LIMITS = (10_000, 1 << 16)  # Largest number of lines per file, and of characters per line
_WIDTH, _HEIGHT = 400, 296


class Generation(BaseModel):
    generation: int = Field(ge=1)
    games: float
    moves: float  # A game, in the mean
    black_wins: float  # Fraction of the games
    resigned: float
    policy_loss: float = Field(allow_inf_nan=False)
    value_loss: float = Field(allow_inf_nan=False)


class Evaluation(BaseModel):
    generation: int = Field(ge=1)
    win_rate: float = Field(ge=0, le=1)  # Against the target model
    win_rate_first: float | None = Field(default=None, ge=0, le=1)  # Against the model of the first generation


class Game(BaseModel):
    """Self-play game. Points are row * size + column from the top left; size * size is a pass."""

    generation: int = Field(ge=1)
    game: int
    size: int = Field(ge=2, le=len(LETTERS))
    moves: list[int] = Field(max_length=4000)
    stones: list[int]  # At the end, of every point: 0 empty, 1 black, 2 white
    outcome: float  # Above 0: black won
    margin: float  # Black's points less white's
    resigned: bool

    @model_validator(mode="after")
    def _fits_the_board(self) -> Game:
        points = self.size**2
        if len(self.stones) != points or not set(self.stones) <= {0, 1, 2}:
            raise ValueError("stones of another board")
        if any(not 0 <= move <= points for move in self.moves):
            raise ValueError("a move off the board")
        return self

    @property
    def title(self) -> str:
        winner = "black" if self.outcome > 0 else "white" if self.outcome < 0 else "nobody"
        result = "by resignation" if self.resigned else f"by {abs(self.margin):g}"
        return f"a game of generation {self.generation}: {len(self.moves)} moves, {winner} won {result}"

    @property
    def source(self) -> str:
        return _data_url(board_svg(self))

    @property
    def shown_size(self) -> tuple[int, int]:
        return (self.size + 2) * UNIT, (self.size + 2) * UNIT


def generations_table(folder: Path | None) -> Table | None:
    """Return the generations of the first experiment that has any, or None."""
    generations, matches = generations_of(folder)
    if not generations:
        return None
    columns = ("generation", "games", "moves a game", "black wins", "resigned", "policy loss", "value loss", "win rate")
    first = next((match for match in reversed(list(matches.values())) if match.win_rate_first is not None), None)
    against = f" Generation {first.generation} won {first.win_rate_first:.1%} against generation 1." if first else ""
    return Table(
        title="Generations",
        columns=columns,
        formats={
            "moves a game": ".1f",
            "black wins": ".1%",
            "resigned": ".1%",
            "policy loss": ".4f",
            "value loss": ".4f",
            "win rate": ".1%",
        },
        rows=tuple(
            (
                generation.generation,
                int(generation.games),
                generation.moves,
                generation.black_wins,
                generation.resigned,
                generation.policy_loss,
                generation.value_loss,
                matches[generation.generation].win_rate if generation.generation in matches else None,
            )
            for generation in generations.values()
        ),
        note=f"Win rate: against the target model, evaluated after the clock.{against}",
    )


def generation_plots(folder: Path | None) -> list[Plot]:
    """Plot losses and win rate over generations; empty for a single generation."""
    generations, matches = generations_of(folder)
    series_by_title = {
        "Losses over generations": {
            "policy loss": [(float(n), entry.policy_loss) for n, entry in generations.items()],
            "value loss": [(float(n), entry.value_loss) for n, entry in generations.items()],
        },
        "Win rate over generations": {"win rate": [(float(n), entry.win_rate) for n, entry in matches.items()]},
    }
    return [plot for title, series in series_by_title.items() if (plot := _lines(title, series)) is not None]


def _lines(title: str, series: Mapping[str, list[tuple[float, float]]]) -> Plot | None:
    points = [point for line in series.values() for point in line]
    if len({x for x, _ in points}) < 2:
        return None
    panel = Panel(_WIDTH, _HEIGHT, top=20)
    x = (min(x for x, _ in points), max(x for x, _ in points))
    panel.axes(x, pad_range([y for _, y in points]), "generation", integers=True)
    for number, (name, line) in enumerate(series.items(), 1):
        panel.line(line, number)
        panel.marks(line, number)
        panel.name(number, name)
    ends = ", ".join(f"{name} {line[0][1]:.4g} to {line[-1][1]:.4g}" for name, line in series.items() if line)
    return Plot(title, panel.svg(f"{title}: {ends}"))


def generations_of(folder: Path | None) -> tuple[dict[int, Generation], dict[int, Evaluation]]:
    """Return generations and evaluations by number, from the first experiment that has any.

    Resumed runs repeat generations: the last line counts.
    """
    path, lines = read_first(folder, GENERATIONS, Generation, *_LIMITS)
    evaluations = read(path.with_name(EVALUATIONS), Evaluation, *_LIMITS) if lines else ()
    generations = {entry.generation: entry for entry in lines}
    matches = {entry.generation: entry for entry in evaluations}
    return dict(sorted(generations.items())), dict(sorted(matches.items()))


def game_of(folder: Path | None) -> Game | None:
    """Return the shown game of the last generation of the first experiment that has one."""
    games = reversed(read_first(folder, GAMES, Game, *_LIMITS)[1])
    return max(games, key=lambda game: game.generation, default=None)


# -- the board ---------------------------------------------------------------------------------------------


def last_moves(game: Game) -> dict[int, int]:
    """Return the move number, from 1, for all points with a stone at the end."""
    numbers = {move: number for number, move in enumerate(game.moves, 1)}
    return {point: numbers[point] for point, stone in enumerate(game.stones) if stone and point in numbers}


def board_svg(game: Game) -> str:
    """Return a self-contained SVG of the final board with move numbers."""
    size, width = game.size, (game.size + 2) * UNIT
    first, last = UNIT * 1.5, UNIT * (game.size + 0.5)
    lines = "".join(f"M{first} {first + UNIT * n}H{last}M{first + UNIT * n} {first}V{last}" for n in range(size))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {width}" width="{width}" height="{width}" '
        f'role="img" font-family="sans-serif" text-anchor="middle">',
        f"<title>{escape(game.title)}</title>",
        f'<rect width="{width}" height="{width}" fill="#f2d9a8"/><path d="{lines}" stroke="#5b4a2f" fill="none"/>',
    ]
    for n in range(size):
        offset = first + UNIT * n
        for x, y, text in ((offset, UNIT * 0.7, LETTERS[n]), (UNIT * 0.6, offset + 4, str(size - n))):
            parts.append(f'<text x="{x:g}" y="{y:g}" font-size="12" fill="#5b4a2f">{text}</text>')
    numbers = last_moves(game)
    parts += [_stone(point, stone, numbers.get(point), size) for point, stone in enumerate(game.stones) if stone]
    return "".join([*parts, "</svg>\n"])


def _stone(point: int, stone: int, number: int | None, size: int) -> str:
    row, column = divmod(point, size)
    x, y = UNIT * (column + 1.5), UNIT * (row + 1.5)
    fill, ink = ("#111", "#fff") if stone == 1 else ("#fff", "#111")
    text = "" if number is None else f'<text x="{x:g}" y="{y + 4:g}" font-size="11" fill="{ink}">{number}</text>'
    return f'<circle cx="{x:g}" cy="{y:g}" r="{UNIT * 0.47:g}" fill="{fill}" stroke="#111"/>{text}'
