"""The rules of Go as the reference of MLPerf has them, and a position to play moves on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Iterable, List, Optional, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.minigo.engine.native import NativeRules, engine

SIZES = (5, 9, 13, 19)
BLACK, WHITE = 1, 2
# Planes by the name of the reference's feature set: ``agz`` in v0.5 and v0.6, ``mlperf07`` in v0.7
FEATURES = {"agz": 17, "mlperf07": 13}
COLUMNS = "ABCDEFGHJKLMNOPQRST"
REASONS = (
    "",
    "it is off the board",
    "there is a stone already",
    "it is suicide",
    "it takes back a ko at once",
    "it repeats an earlier position (positional superko)",
)
Array = Any


class IllegalMove(Problem):
    """A move that the rules do not allow."""


@dataclass(frozen=True)
class Rules:
    """What is played: board, komi and the choices that rule sets differ in."""

    size: int = 9
    komi: float = 7.5
    # Positional superko, as cc/position.h of the reference has it; without it the simple ko rule alone
    superko: bool = True
    # Unconditional life owns what it encloses, and a game in which it owns all ends (v0.7); v0.6 counts area alone
    pass_alive: bool = True
    features: str = "agz"

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise Problem(f"size {self.size}", "5, 9, 13 or 19", "set a board size that the engine has")
        if not math.isfinite(self.komi):
            raise Problem(f"komi {self.komi}", "a number such as 7.5", "set another komi")
        if self.features not in FEATURES:
            raise Problem(f"features {self.features!r}", " or ".join(FEATURES), "set one of them")

    @property
    def moves(self) -> int:
        """Number of moves: points, and the pass as the last."""
        return self.size**2 + 1

    @property
    def planes(self) -> int:
        """Channels of the network's input."""
        return FEATURES[self.features]

    def native(self) -> NativeRules:
        """Return the structure that crosses to the compiled engine."""
        features = list(FEATURES).index(self.features)
        return NativeRules(self.size, self.komi, self.superko, self.pass_alive, features)


def fixed_handicap(size: int, stones: int) -> List[int]:
    """Return the points of a handicap (Go Text Protocol, version 2, 4.1.1).

    Raises:
        Problem: there is no such handicap on the board.
    """
    if stones == 0:
        return []
    if not 2 <= stones <= 9 or size < 7:
        raise Problem(f"handicap {stones} on {size} x {size}", "0, or 2 to 9 from 9 x 9 on", "set another handicap")
    low = 3 if size >= 13 else 2
    high, middle = size - 1 - low, size // 2
    places = [(high, low), (low, high), (low, low), (high, high)][: min(stones, 4)]
    if stones >= 6:
        places += [(middle, low), (middle, high)]
    if stones >= 8:
        places += [(high, middle), (low, middle)]
    if stones in (5, 7, 9):
        places.append((middle, middle))
    return [row * size + column for row, column in places]


def name_of(move: int, size: int) -> str:
    """Return a move as people write it, such as ``D4`` or ``pass``."""
    if move == size**2:
        return "pass"
    if not 0 <= move < size**2:
        return str(move)
    return f"{COLUMNS[move % size]}{size - move // size}"


class Position:
    """A position with the moves that led to it. A move is row * size + column from the top left; size**2 passes."""

    def __init__(self, rules: Rules, black: Iterable[int] = (), white: Iterable[int] = (), to_play: int = 0) -> None:
        """Begin with an empty board, or with the stones given.

        Raises:
            Problem: the stones given leave one without a liberty.
        """
        self.rules = rules
        self.moves: Tuple[int, ...] = ()
        self.start = np.zeros(rules.size**2, np.int8)
        self.start[list(black)] = BLACK
        self.start[list(white)] = WHITE
        self.first = to_play or BLACK
        self._handle = engine().minigo_position(rules.native())
        engine().minigo_position_setup(self._handle, self.start.ctypes.data, self.first)
        if not np.array_equal(self.stones().ravel(), self.start):
            raise Problem(
                "stones without a liberty in the position to start from",
                "each chain with a liberty",
                "take the captured stones away",
            )

    def __del__(self) -> None:
        handle = self.__dict__.get("_handle")
        if handle:
            engine().minigo_position_free(handle)

    def copy(self) -> "Position":
        """Return a position that can be played on by itself."""
        other = object.__new__(Position)
        other.__dict__.update(self.__dict__, _handle=engine().minigo_position_copy(self._handle))
        return other

    def beginning(self, rules: Optional[Rules] = None, first: int = 0) -> "Position":
        """Return the position before the first move, by other ``rules`` or with another side to move if given."""
        black, white = (np.flatnonzero(self.start == color).tolist() for color in (BLACK, WHITE))
        return Position(rules or self.rules, black, white, first or self.first)

    def play(self, move: int) -> None:
        """Play for the side to move.

        Raises:
            IllegalMove: the rules do not allow it; nothing has changed.
        """
        refused = engine().minigo_position_play(self._handle, move)
        if refused:
            raise illegal(move, self.rules.size, self.to_play, REASONS[refused], len(self.moves))
        self.moves = (*self.moves, move)

    def legal(self) -> Array:
        """Return bool (size**2 + 1,): the moves that may be played; the pass always may."""
        out = np.empty(self.rules.moves, np.uint8)
        engine().minigo_position_legal(self._handle, out.ctypes.data)
        return out.astype(bool)

    def stones(self) -> Array:
        """Return int8 (size, size): 0 empty, 1 black, 2 white."""
        out = np.empty((self.rules.size, self.rules.size), np.int8)
        engine().minigo_position_stones(self._handle, out.ctypes.data)
        return out

    def held(self) -> Array:
        """Return int8 (size, size): 1 where black holds the point by unconditional life (Benson 1976), 2 white."""
        out = np.empty((self.rules.size, self.rules.size), np.int8)
        engine().minigo_position_held(self._handle, out.ctypes.data)
        return out

    def liberties(self, point: int) -> int:
        """Return the liberties of the chain on a point; 0 where it is empty."""
        return int(engine().minigo_position_liberties(self._handle, point))

    def score(self) -> float:
        """Return black's area minus white's and minus komi, in points."""
        return int(engine().minigo_position_area(self._handle, self.rules.pass_alive)) - self.rules.komi

    @property
    def to_play(self) -> int:
        """1 black, 2 white."""
        return int(engine().minigo_position_to_play(self._handle))

    @property
    def over(self) -> bool:
        """Whether the last two moves were passes; playing on is possible."""
        return bool(engine().minigo_position_over(self._handle))

    def planes(self, out: Array, symmetry: int = 0) -> None:
        """Fill ``out``, uint8 or float32 (size, size, planes), with the network's input, turned by a symmetry."""
        size = self.rules.size
        floats = checked_planes(out, (size, size, self.rules.planes))
        features = self.rules.native().features
        engine().minigo_position_planes(self._handle, out.ctypes.data, floats, features, symmetry)


def illegal(move: int, size: int, to_play: int, reason: str, played: int) -> IllegalMove:
    """Return the error of a move that is refused, by its name and its reason."""
    color = "black" if to_play == BLACK else "white"
    return IllegalMove(
        f"move {played + 1}, {color} {name_of(move, size)}: {reason}", "a legal move", "play another, or pass"
    )


def checked_planes(out: Array, shape: Tuple[int, ...]) -> bool:
    """Return whether a buffer for planes has float32 rather than uint8; Problem where it has another type or shape."""
    kinds = (np.uint8, np.bool_, np.float32)
    if out.dtype not in kinds or out.shape[-len(shape) :] != shape or not out.flags.c_contiguous:
        found = f"planes of {out.dtype} {list(out.shape)}"
        raise Problem(found, f"uint8 or float32 [..., {', '.join(map(str, shape))}] in C order", "pass such an array")
    return bool(out.dtype == np.float32)
