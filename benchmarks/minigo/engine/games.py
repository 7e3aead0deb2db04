"""Self-play games in parallel, and single position search."""

import ctypes
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.minigo.engine.position import (
    REASONS,
    NativeSearch,
    NativeSummary,
    Position,
    Rules,
    check_planes,
    engine,
    illegal,
)

RANGES = {
    "readouts": (0, 1 << 24),
    "parallel_leaves": (1, 1024),
    "fastplay_readouts": (1, 1 << 24),
    "fastplay_frequency": (0, 1),
    "noise_mix": (0, 1),
    "dirichlet_alpha": (1e-4, 100),
    "policy_softmax_temp": (0, 100),
    "disable_resign_pct": (0, 1),
    "min_resign_threshold": (-2, 2),
    "max_resign_threshold": (-2, 2),
    "c_puct_base": (1, 1e9),
    "move_limit": (0, 1 << 20),
    "cache_entries": (0, (1 << 31) - 1),
}


@dataclass(frozen=True)
class Search:
    """PUCT with the constants of cc/constants.h and ml_perf/flags/9/selfplay.flags (v0.7) as defaults."""

    readouts: int = 240  # Visits added per move; 0: play the policy of the network
    # Leaves per game and batch, with a virtual loss until the value is available (flag virtual_losses)
    parallel_leaves: int = 2
    c_puct_init: float = 1.25
    c_puct_base: float = 19652.0
    value_init_penalty: float = 0.2  # Subtracted from the parent's value to initialize unvisited moves
    noise_mix: float = 0.3  # Fraction of Dirichlet noise in the root priors; 0 in matches
    dirichlet_alpha: Optional[float] = None  # None: 0.03 * 361 / points (cc/constants.h)
    # First moves in a game that are sampled by visits; later moves are the most visited; None: points / 12, rounded to
    # even
    soft_pick_cutoff: Optional[int] = None
    policy_softmax_temp: float = 0.98  # Exponent of visits for sampled moves
    min_resign_threshold: float = -1.0
    # A game's threshold is random between the two; --resign_threshold of v0.6 is both
    max_resign_threshold: float = -0.8
    disable_resign_pct: float = 1.0  # Fraction of games that are played to the end, 0 to 1
    # Fraction of moves that are searched with fastplay_readouts, without noise, and not used for training
    fastplay_frequency: float = 0.0
    fastplay_readouts: int = 80
    # Remove visits that the search would not have made with the final values
    target_pruning: bool = True
    allow_pass: bool = True
    # Consecutive opponent passes after which no move is played into unconditional life; 0: never play there
    restrict_pass_alive_play_threshold: int = 4
    reuse_tree: bool = True
    # Evaluate a position under one of the eight symmetries, selected by position hash and game
    random_symmetry: bool = True
    move_limit: int = 0  # Moves after which a game is counted as it is; 0: twice the points (kMaxSearchDepth in v0.6)
    # Number of cached evaluations, shared by all games and symmetries
    cache_entries: int = 0

    def __post_init__(self) -> None:
        for name, (minimum, maximum) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not minimum <= value <= maximum:
                raise Problem(f"{name} {value}", f"from {minimum} to {maximum}", f"set another {name}")

    def native(self, size: int) -> NativeSearch:
        """Return the ctypes structure for the compiled engine, including values that depend on the board size."""
        points = size**2
        values = {name: getattr(self, name) for name, _ in NativeSearch._fields_}
        if self.dirichlet_alpha is None:
            values["dirichlet_alpha"] = 0.03 * 361 / points
        if self.soft_pick_cutoff is None:
            values["soft_pick_cutoff"] = points // 12 // 2 * 2
        return NativeSearch(**values)


Array = Any
# From planes [n, N, N, planes] to policies [n, moves] (probabilities) and values [n] (for the player to move)
Evaluate = Callable[[Array], Tuple[Array, Array]]


@dataclass(frozen=True)
class Game:
    number: int
    moves: Array  # int16 [plies]
    visits: Array  # uint16 [plies, size**2 + 1], after target pruning; a row of zeros where the search was a fast one
    values: Array  # float32 [plies]: root value after the search, for black
    outcome: float  # 1 black won, -1 white won, 0 draw (only with an integer komi)
    margin: float  # Score for black; 0 after a resignation
    resigned: bool
    resignation_allowed: bool
    black: int = 0  # In a match, which of the two players had black


class Games:
    """Parallel games with batched leaves, with a single player for both colours or two players with alternating
    colours.

    A game is a function of the seed, the game number and the evaluations: with one thread, or without a cache, games
    are reproducible for any number of parallel games. No lock is held between ``leaves`` and ``answer``, and the GIL
    is released during both.
    """

    def __init__(
        self,
        rules: Rules,
        searches: Sequence[Search],
        games: int,
        seed: int,
        first: int = 0,
        threads: int = 1,
        count: Optional[int] = None,
    ) -> None:
        """Prepare ``games`` parallel games, numbered from ``first``; they start with the first call of ``leaves``.

        Two ``searches`` are for player 0 and player 1, with separate trees: player ``number & 1`` is black, and
        resignation follows the first search (cc/eval.cc, v0.7). ``count`` games are played; None: no limit.
        """
        if games < 1 or threads < 1:
            raise Problem(f"games {games}, threads {threads}", "at least one of each", "set them")
        self.rules, self._leaves = rules, [search.parallel_leaves for search in searches]
        self._rows = [0] * len(searches)
        native = (NativeSearch * len(searches))(*[search.native(rules.size) for search in searches])
        start = Position(rules)
        self._handle = engine().minigo_pool(
            rules.native(), native, len(searches), games, seed & (1 << 64) - 1, first, threads,
            start.start.ctypes.data, start.first,
        )  # fmt: skip
        if count is not None:
            engine().minigo_pool_stop(self._handle, first + count)

    def __del__(self) -> None:
        handle = self.__dict__.get("_handle")
        if handle:
            engine().minigo_pool_free(handle)

    @property
    def running(self) -> bool:
        return bool(engine().minigo_pool_running(self._handle))

    def leaves(self, planes: Array, player: int = 0) -> int:
        """Fill rows of ``planes``, uint8 or float32 [batch, N, N, planes], and return the number of leaves to evaluate.

        The leaves are from games in which ``player`` is to move. The batch needs at least ``parallel_leaves`` rows; if
        it is too small for all games, they are served in turn. Returns 0 if all leaves were resolved by the cache or
        the rules; call ``answer`` for finished games.
        """
        floats = check_planes(planes, (self.rules.size, self.rules.size, self.rules.planes))
        if len(planes) < self._leaves[player]:
            raise Problem(
                f"a batch of {len(planes)}",
                f"at least the {self._leaves[player]} leaves that one game searches at once",
                "make the batch larger, or set fewer parallel_leaves",
            )
        address = planes.ctypes.data
        self._rows[player] = int(engine().minigo_pool_leaves(self._handle, player, address, len(planes), floats))
        return self._rows[player]

    def answer(self, policy: Array, value: Array, player: int = 0) -> List[Game]:
        """Set the policies float32 [n, moves] and values float32 [n] for the player to move; return finished games."""
        rows, self._rows[player] = self._rows[player], 0
        policy = np.ascontiguousarray(policy, np.float32).reshape(-1, self.rules.moves)
        value = np.ascontiguousarray(value, np.float32).reshape(-1)
        if len(policy) < rows or len(value) < rows:
            raise Problem(
                f"{len(policy)} policies and {len(value)} values for {rows} leaves",
                "an evaluation for each leaf",
                "evaluate the rows that leaves() filled",
            )
        if not (np.isfinite(policy[:rows]).all() and np.isfinite(value[:rows]).all()):
            raise Problem(
                "an evaluation that is not finite", "numbers", "check why the network returns NaN or infinity"
            )
        count = engine().minigo_pool_answer(self._handle, player, policy.ctypes.data, value.ctypes.data)
        return [self._next() for _ in range(count)]

    def _next(self) -> Game:
        summary = NativeSummary()
        moves, visits = ctypes.POINTER(ctypes.c_int16)(), ctypes.POINTER(ctypes.c_uint16)()
        values = ctypes.POINTER(ctypes.c_float)()
        engine().minigo_pool_take(self._handle, summary, moves, visits, values)
        plies = summary.plies

        def copied(source: Any, kind: Any, shape: Tuple[int, ...]) -> Array:
            return np.ctypeslib.as_array(source, shape).copy() if plies else np.zeros(shape, kind)

        return Game(
            number=summary.number,
            moves=copied(moves, np.int16, (plies,)),
            visits=copied(visits, np.uint16, (plies, self.rules.moves)),
            values=copied(values, np.float32, (plies,)),
            outcome=summary.outcome,
            margin=summary.margin,
            resigned=bool(summary.resigned),
            resignation_allowed=bool(summary.resignation_allowed),
            black=summary.black,
        )


class Study:
    """Single position search, with moves played by the caller: for GTP, problems and analysis."""

    def __init__(self, position: Position, search: Search, seed: int = 0) -> None:
        """Start with a position; previous moves count for superko and the planes."""
        self.rules, self.search = position.rules, search
        self._handle = engine().minigo_study(
            self.rules.native(), search.native(self.rules.size), seed & (1 << 64) - 1,
            position.start.ctypes.data, position.first,
        )  # fmt: skip
        self._planes = np.zeros((search.parallel_leaves, self.rules.size, self.rules.size, self.rules.planes), np.uint8)
        self.position = position.initial()  # current position; modify it only with ``play``
        for move in position.moves:
            self.play(move)

    def __del__(self) -> None:
        handle = self.__dict__.get("_handle")
        if handle:
            engine().minigo_study_free(handle)

    def play(self, move: int) -> None:
        """Play a move for the player to move; raises IllegalMove."""
        reason = engine().minigo_study_play(self._handle, move)
        if reason:
            played = len(self.position.moves)
            raise illegal(move, self.rules.size, self.position.to_play, REASONS[reason], played)
        self.position.play(move)

    def search_with(self, evaluate: Evaluate) -> None:
        """Search the position with the configured readouts, in addition to visits in the reused tree."""
        native = engine()
        native.minigo_study_begin(self._handle)
        while True:
            rows = native.minigo_study_leaves(self._handle, self._planes.ctypes.data, len(self._planes), False)
            if rows == 0:
                return
            policy, value = evaluate(self._planes[:rows])
            policy, value = np.ascontiguousarray(policy, np.float32), np.ascontiguousarray(value, np.float32)
            if policy.size != rows * self.rules.moves or value.size != rows:
                raise Problem(
                    f"policies {list(policy.shape)} and values {list(value.shape)} for {rows} leaves",
                    f"[{rows}, {self.rules.moves}] and [{rows}]",
                    "use a model of this board size",
                )
            native.minigo_study_answer(self._handle, policy.ctypes.data, value.ctypes.data)

    def choose(self, restrict_pass_alive: bool = False) -> int:
        """Return the move after a search: sampled before ``soft_pick_cutoff``, otherwise the most visited."""
        return int(engine().minigo_study_choose(self._handle, restrict_pass_alive))

    def visits(self) -> Array:
        """Return the visits by move, int32 (size**2 + 1,)."""
        out = np.empty(self.rules.moves, np.int32)
        engine().minigo_study_visits(self._handle, out.ctypes.data)
        return out

    @property
    def value(self) -> float:
        return float(engine().minigo_study_value(self._handle))
