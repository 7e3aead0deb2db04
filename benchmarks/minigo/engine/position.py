"""Rules of Go as in the MLPerf reference, positions, and the interface to the compiled engine.

Functions of the engine are called with ctypes, which releases the GIL.
"""

import ctypes
import functools
import math
from ctypes import POINTER, c_float, c_int, c_int16, c_int32, c_uint16, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Optional, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.minigo.engine import build

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


# -- the compiled engine ---------------------------------------------------------------------------------


class NativeRules(ctypes.Structure):
    """Rules of the engine (options.h); NativeSearch and NativeSummary correspond to Search and Summary."""

    _fields_ = (
        ("size", c_int32),
        ("komi", c_float),
        ("superko", c_int32),
        ("pass_alive", c_int32),
        ("features", c_int32),
    )


class NativeSearch(ctypes.Structure):
    _fields_ = (
        ("readouts", c_int32),
        ("parallel_leaves", c_int32),
        ("soft_pick_cutoff", c_int32),
        ("reuse_tree", c_int32),
        ("random_symmetry", c_int32),
        ("allow_pass", c_int32),
        ("target_pruning", c_int32),
        ("restrict_pass_alive_play_threshold", c_int32),
        ("fastplay_readouts", c_int32),
        ("move_limit", c_int32),
        ("cache_entries", c_int32),
        ("c_puct_init", c_float),
        ("c_puct_base", c_float),
        ("value_init_penalty", c_float),
        ("policy_softmax_temp", c_float),
        ("noise_mix", c_float),
        ("dirichlet_alpha", c_float),
        ("min_resign_threshold", c_float),
        ("max_resign_threshold", c_float),
        ("disable_resign_pct", c_float),
        ("fastplay_frequency", c_float),
    )


class NativeSummary(ctypes.Structure):
    _fields_ = (
        ("number", c_int32),
        ("plies", c_int32),
        ("outcome", c_float),
        ("margin", c_float),
        ("resigned", c_int32),
        ("resignation_allowed", c_int32),
        ("black", c_int32),
    )


_RULES, _SEARCH = POINTER(NativeRules), POINTER(NativeSearch)
_FUNCTIONS: Dict[str, Tuple[Any, List[Any]]] = {
    "minigo_position": (c_void_p, [_RULES]),
    "minigo_position_copy": (c_void_p, [c_void_p]),
    "minigo_position_free": (None, [c_void_p]),
    "minigo_position_setup": (None, [c_void_p, c_void_p, c_int]),
    "minigo_position_play": (c_int, [c_void_p, c_int]),
    "minigo_position_legal": (None, [c_void_p, c_void_p]),
    "minigo_position_stones": (None, [c_void_p, c_void_p]),
    "minigo_position_held": (None, [c_void_p, c_void_p]),
    "minigo_position_liberties": (c_int, [c_void_p, c_int]),
    "minigo_position_area": (c_int, [c_void_p, c_int]),
    "minigo_position_to_play": (c_int, [c_void_p]),
    "minigo_position_over": (c_int, [c_void_p]),
    "minigo_position_planes": (None, [c_void_p, c_void_p, c_int, c_int, c_int]),
    "minigo_study": (c_void_p, [_RULES, _SEARCH, c_uint64, c_void_p, c_int]),
    "minigo_study_free": (None, [c_void_p]),
    "minigo_study_play": (c_int, [c_void_p, c_int]),
    "minigo_study_begin": (None, [c_void_p]),
    "minigo_study_leaves": (c_int, [c_void_p, c_void_p, c_int, c_int]),
    "minigo_study_answer": (None, [c_void_p, c_void_p, c_void_p]),
    "minigo_study_choose": (c_int, [c_void_p, c_int]),
    "minigo_study_value": (c_float, [c_void_p]),
    "minigo_study_visits": (None, [c_void_p, c_void_p]),
    "minigo_pool": (c_void_p, [_RULES, _SEARCH, c_int, c_int, c_uint64, c_int, c_int, c_void_p, c_int]),
    "minigo_pool_free": (None, [c_void_p]),
    "minigo_pool_leaves": (c_int, [c_void_p, c_int, c_void_p, c_int, c_int]),
    "minigo_pool_answer": (c_int, [c_void_p, c_int, c_void_p, c_void_p]),
    "minigo_pool_take": (
        c_int,
        [c_void_p, POINTER(NativeSummary), POINTER(POINTER(c_int16)), POINTER(POINTER(c_uint16)),
         POINTER(POINTER(c_float))],
    ),
    "minigo_pool_stop": (None, [c_void_p, c_int]),
    "minigo_pool_running": (c_int, [c_void_p]),
}  # fmt: skip


@functools.lru_cache(maxsize=None)
def engine() -> Any:
    """Return the library with function signatures; compiles it if necessary (raises Problem on failure)."""
    loaded = ctypes.CDLL(str(build.library()))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


# -- rules and positions --------------------------------------------------------------------------------


class IllegalMove(Problem):
    """A move that the rules do not allow."""


@dataclass(frozen=True)
class Rules:
    size: int = 9
    komi: float = 7.5
    # Positional superko, as in cc/position.h of the reference; otherwise only the simple ko rule
    superko: bool = True
    # Unconditional life owns enclosed points, and a game ends if it owns all points (v0.7); v0.6 counts only area
    pass_alive: bool = True
    features: str = "agz"

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise Problem(f"size {self.size}", "5, 9, 13 or 19", "set another size")
        if not math.isfinite(self.komi):
            raise Problem(f"komi {self.komi}", "a number such as 7.5", "set another komi")
        if self.features not in FEATURES:
            raise Problem(f"features {self.features!r}", " or ".join(FEATURES), "set another features")

    @property
    def moves(self) -> int:
        return self.size**2 + 1

    @property
    def planes(self) -> int:
        return FEATURES[self.features]

    def native(self) -> NativeRules:
        features = list(FEATURES).index(self.features)
        return NativeRules(self.size, self.komi, self.superko, self.pass_alive, features)


def fixed_handicap(size: int, stones: int) -> List[int]:
    """Return the fixed handicap points (Go Text Protocol, version 2, 4.1.1).

    Raises:
        Problem: the handicap is not possible on this board.
    """
    if stones == 0:
        return []
    if not 2 <= stones <= 9 or size < 7:
        raise Problem(
            f"handicap {stones} on {size} x {size}", "0, or 2 to 9 on boards of at least 9 x 9", "set another handicap"
        )
    near = 3 if size >= 13 else 2
    far, middle = size - 1 - near, size // 2
    points = [(far, near), (near, far), (near, near), (far, far)]
    points += [(middle, near), (middle, far), (far, middle), (near, middle)]
    points = points[:3] if stones == 3 else points[: stones // 2 * 2] + [(middle, middle)] * (stones % 2)
    return [row * size + column for row, column in points]


def name_of(move: int, size: int) -> str:
    """Return a move as people write it, such as ``D4`` or ``pass``."""
    if move == size**2:
        return "pass"
    if not 0 <= move < size**2:
        return str(move)
    return f"{COLUMNS[move % size]}{size - move // size}"


class Position:
    """Position with the previous moves. A move is row * size + column from the top left; size**2 is a pass."""

    def __init__(self, rules: Rules, black: Iterable[int] = (), white: Iterable[int] = (), to_play: int = 0) -> None:
        """Start with an empty board, or with given stones.

        Raises:
            Problem: a given stone is without liberties.
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
                "stones without a liberty in the initial position",
                "each chain with a liberty",
                "remove the captured stones",
            )

    def __del__(self) -> None:
        handle = self.__dict__.get("_handle")
        if handle:
            engine().minigo_position_free(handle)

    def copy(self) -> "Position":
        other = object.__new__(Position)
        other.__dict__.update(self.__dict__, _handle=engine().minigo_position_copy(self._handle))
        return other

    def initial(self, rules: Optional[Rules] = None, first: int = 0) -> "Position":
        """Return the position before the first move, optionally with other ``rules`` or another player to move."""
        black, white = (np.flatnonzero(self.start == color).tolist() for color in (BLACK, WHITE))
        return Position(rules or self.rules, black, white, first or self.first)

    def play(self, move: int) -> None:
        """Play a move for the player to move.

        Raises:
            IllegalMove: the move is illegal; the position is unchanged.
        """
        reason = engine().minigo_position_play(self._handle, move)
        if reason:
            raise illegal(move, self.rules.size, self.to_play, REASONS[reason], len(self.moves))
        self.moves = (*self.moves, move)

    def _filled(self, name: str, shape: Tuple[int, ...], kind: Any = np.int8) -> Array:
        out = np.empty(shape, kind)
        getattr(engine(), f"minigo_position_{name}")(self._handle, out.ctypes.data)
        return out

    def legal(self) -> Array:
        """Return bool (size**2 + 1,): the moves that may be played; the pass always may."""
        return self._filled("legal", (self.rules.moves,), np.uint8).astype(bool)

    def stones(self) -> Array:
        """Return int8 (size, size): 0 empty, 1 black, 2 white."""
        return self._filled("stones", (self.rules.size, self.rules.size))

    def held(self) -> Array:
        """Return int8 (size, size): 1 for points of black by unconditional life (Benson 1976), 2 for white."""
        return self._filled("held", (self.rules.size, self.rules.size))

    def liberties(self, point: int) -> int:
        return int(engine().minigo_position_liberties(self._handle, point))

    def score(self) -> float:
        """Return black's area minus white's and minus komi, in points."""
        return int(engine().minigo_position_area(self._handle, self.rules.pass_alive)) - self.rules.komi

    @property
    def to_play(self) -> int:
        return int(engine().minigo_position_to_play(self._handle))

    @property
    def over(self) -> bool:
        """Whether the last two moves were passes; playing on is possible."""
        return bool(engine().minigo_position_over(self._handle))

    def planes(self, out: Array, symmetry: int = 0) -> None:
        """Fill ``out``, uint8 or float32 (size, size, planes), with the network's input, turned by a symmetry."""
        size = self.rules.size
        floats = check_planes(out, (size, size, self.rules.planes))
        features = self.rules.native().features
        engine().minigo_position_planes(self._handle, out.ctypes.data, floats, features, symmetry)


def illegal(move: int, size: int, to_play: int, reason: str, played: int) -> IllegalMove:
    """Return the exception for an illegal move, with its name and the reason."""
    return IllegalMove(
        f"move {played + 1}, {'black' if to_play == BLACK else 'white'} {name_of(move, size)}: {reason}",
        "a legal move",
        "play another, or pass",
    )


def check_planes(out: Array, shape: Tuple[int, ...]) -> bool:
    """Return whether a buffer for planes is float32 (not uint8); raises Problem for other types or shapes."""
    kinds = (np.uint8, np.bool_, np.float32)
    if out.dtype not in kinds or out.shape[-len(shape) :] != shape or not out.flags.c_contiguous:
        raise Problem(
            f"planes of {out.dtype} {list(out.shape)}",
            f"uint8 or float32 [..., {', '.join(map(str, shape))}] in C order",
            "pass such an array",
        )
    return bool(out.dtype == np.float32)
