"""The generations of a run that learns from games against itself: figures, plots, and a game as a picture of its board.

from encore.results.report.generations import drawing, game_of
game = game_of(Path("results/20260101T120000Z-minigo-tensorflow-cpu"))
Path("game.svg").write_text(drawing(game), encoding="utf-8")
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path

from pydantic import BaseModel, Field, model_validator

from encore.results.report.panel import Panel, padded
from encore.results.report.set_figures import Plot
from encore.results.report.shown import first_read, read
from encore.results.table import Table

# In the folder of an experiment: one JSON object a generation.
FILE, EVALUATIONS, GAMES = "generations.jsonl", "evaluations.jsonl", "shown_games.jsonl"
LETTERS = "ABCDEFGHJKLMNOPQRST"  # Of the columns of a board, which has no I
UNIT = 28  # Pixels between two lines of a board
LONGEST_LIST = 12  # Moves without a stone at the end that are listed below a board
_LIMITS = (10_000, 1 << 16)  # Lines of a file, and characters of one
_WIDTH, _HEIGHT = 400, 296


class Generation(BaseModel):
    """What a generation's games and training came to."""

    generation: int = Field(ge=1)
    games: float
    moves: float  # A game, in the mean
    black_wins: float  # Share of the games
    resigned: float
    policy_loss: float = Field(allow_inf_nan=False)
    value_loss: float = Field(allow_inf_nan=False)


class Evaluation(BaseModel):
    """What the model of a generation won in a match after the clock."""

    generation: int = Field(ge=1)
    win_rate: float = Field(ge=0, le=1)  # Against the target model
    win_rate_first: float | None = Field(default=None, ge=0, le=1)  # Against the model of the first generation


class Game(BaseModel):
    """A game of self-play; a point is row * size + column from the top left, size * size is a pass."""

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
        """One line on it."""
        winner = "black" if self.outcome > 0 else "white" if self.outcome < 0 else "nobody"
        how = "by resignation" if self.resigned else f"by {abs(self.margin):g}"
        return f"a game of generation {self.generation}: {len(self.moves)} moves, {winner} won {how}"

    @property
    def source(self) -> str:
        """Its picture as the address of an image, which no style of a page reaches."""
        return "data:image/svg+xml;base64," + base64.b64encode(drawing(self).encode()).decode("ascii")

    @property
    def shown_size(self) -> tuple[int, int]:
        """Width and height of its picture."""
        return (self.size + 2) * UNIT, (self.size + 2) * UNIT

    @property
    def unseen(self) -> str:
        """Moves that have no stone of their own at the end: captured, played upon, passes."""
        seen, numbered = set(last_moves(self).values()), enumerate(self.moves, 1)
        listed = [f"{number} {point_name(move, self.size)}" for number, move in numbered if number not in seen]
        rest = f" and {len(listed) - LONGEST_LIST} more" if len(listed) > LONGEST_LIST else ""
        return ", ".join(listed[:LONGEST_LIST]) + rest


def generations_table(folder: Path | None) -> Table | None:
    """Return the figures of each generation of the first experiment that has some; None without any."""
    found, matches = generations_of(folder)
    if not found:
        return None
    columns = ("generation", "games", "moves a game", "black wins", "resigned", "policy loss", "value loss", "win rate")
    first = next((each for each in reversed(list(matches.values())) if each.win_rate_first is not None), None)
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
                each.generation,
                int(each.games),
                each.moves,
                each.black_wins,
                each.resigned,
                each.policy_loss,
                each.value_loss,
                matches[each.generation].win_rate if each.generation in matches else None,
            )
            for each in found.values()
        ),
        note=f"Win rate: against the target model, evaluated after the clock.{against}",
    )


def generation_plots(folder: Path | None) -> list[Plot]:
    """Return the losses and the win rate over generations; nothing of a single generation."""
    found, matches = generations_of(folder)
    losses = {
        "policy loss": [(float(n), each.policy_loss) for n, each in found.items()],
        "value loss": [(float(n), each.value_loss) for n, each in found.items()],
    }
    rates = {"win rate": [(float(n), each.win_rate) for n, each in matches.items()]}
    drawn = (_lines("Losses over generations", losses), _lines("Win rate over generations", rates))
    return [plot for plot in drawn if plot is not None]


def _lines(title: str, series: Mapping[str, list[tuple[float, float]]]) -> Plot | None:
    points = [point for line in series.values() for point in line]
    if len({x for x, _ in points}) < 2:
        return None
    panel = Panel(_WIDTH, _HEIGHT, top=20)
    x = (min(x for x, _ in points), max(x for x, _ in points))
    panel.axes(x, padded([y for _, y in points]), "generation", whole=True)
    for number, (name, line) in enumerate(series.items(), 1):
        panel.line(line, number)
        panel.marks(line, number)
        panel.name(number, name)
    ends = ", ".join(f"{name} {line[0][1]:.4g} to {line[-1][1]:.4g}" for name, line in series.items() if line)
    return Plot(title, panel.svg(f"{title}: {ends}"))


def generations_of(folder: Path | None) -> tuple[dict[int, Generation], dict[int, Evaluation]]:
    """Return generations and evaluations by their number, of the first experiment that has some.

    A resumed run writes a generation again: its last line counts.
    """
    path, lines = first_read(folder, FILE, Generation, *_LIMITS)
    evaluations = read(path.with_name(EVALUATIONS), Evaluation, *_LIMITS) if lines else ()
    found, matches = {each.generation: each for each in lines}, {each.generation: each for each in evaluations}
    return dict(sorted(found.items())), dict(sorted(matches.items()))


def game_of(folder: Path | None) -> Game | None:
    """Return the shown game of the last generation of the first experiment that has one."""
    games = reversed(first_read(folder, GAMES, Game, *_LIMITS)[1])
    return max(games, key=lambda game: game.generation, default=None)


# -- the board ---------------------------------------------------------------------------------------------


def last_moves(game: Game) -> dict[int, int]:
    """Return, for each point with a stone at the end, the number of the move that put it there, from 1."""
    numbers = {move: number for number, move in enumerate(game.moves, 1)}
    return {point: numbers[point] for point, stone in enumerate(game.stones) if stone and point in numbers}


def point_name(move: int, size: int) -> str:
    """Return a move as people write it, such as ``D4`` or ``pass``."""
    return "pass" if move == size**2 else f"{LETTERS[move % size]}{size - move // size}"


def drawing(game: Game) -> str:
    """Return the board at the end as SVG that needs nothing else, with the number of each stone's move."""
    size, side = game.size, (game.size + 2) * UNIT
    first, last = UNIT * 1.5, UNIT * (game.size + 0.5)
    lines = "".join(f"M{first} {first + UNIT * n}H{last}M{first + UNIT * n} {first}V{last}" for n in range(size))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}" width="{side}" height="{side}" '
        f'role="img" font-family="sans-serif" text-anchor="middle">',
        f"<title>{escape(game.title)}</title>",
        f'<rect width="{side}" height="{side}" fill="#f2d9a8"/><path d="{lines}" stroke="#5b4a2f" fill="none"/>',
    ]
    for n in range(size):
        at = first + UNIT * n
        for x, y, text in ((at, UNIT * 0.7, LETTERS[n]), (UNIT * 0.6, at + 4, str(size - n))):
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
