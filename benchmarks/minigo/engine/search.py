"""What a search does; the names and most defaults are those of the reference's flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from benchmarks.common.data.problem import Problem
from benchmarks.minigo.engine.native import NativeSearch

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
    """PUCT with the constants of cc/constants.h and ml_perf/flags/9/selfplay.flags (v0.7) unless a field says more."""

    readouts: int = 240  # Visits added for each move; 0: the network's policy plays by itself
    # Leaves of one game in a batch, each with a virtual loss until its value is there (flag virtual_losses)
    parallel_leaves: int = 2
    c_puct_init: float = 1.25
    c_puct_base: float = 19652.0
    value_init_penalty: float = 0.2  # Taken from the parent's value to start that of a move that was not visited
    noise_mix: float = 0.3  # Share of Dirichlet noise in the priors of the root; 0: none, as in a match
    dirichlet_alpha: Optional[float] = None  # None: 0.03 * 361 / points (cc/constants.h)
    # Moves of a game that are drawn by their visits, the most visited one after that; None: points / 12, made even
    soft_pick_cutoff: Optional[int] = None
    policy_softmax_temp: float = 0.98  # Power of the visits of a drawn move
    min_resign_threshold: float = -1.0
    # A game's threshold is drawn between the two; v0.6's single --resign_threshold is both
    max_resign_threshold: float = -0.8
    disable_resign_pct: float = 1.0  # Share of games, from 0 to 1, that are played to their end
    # Share of moves that are searched with fastplay_readouts, without noise, and not trained on
    fastplay_frequency: float = 0.0
    fastplay_readouts: int = 80
    # Take visits away that the search would not have spent, had it known the values that it found
    target_pruning: bool = True
    allow_pass: bool = True
    # Passes of the other side in a row after which no move is played into unconditional life; 0: never one
    restrict_pass_alive_play_threshold: int = 4
    reuse_tree: bool = True
    # Evaluate each position under one of the eight symmetries, drawn by its hash and the game
    random_symmetry: bool = True
    move_limit: int = 0  # Moves after which a game is counted as it is; 0: twice the points (kMaxSearchDepth in v0.6)
    # Evaluations that are kept for positions that come again, in any symmetry; all games share them
    cache_entries: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise Problem(f"{name} {value}", f"from {low} to {high}", f"set another {name}")

    def native(self, size: int) -> NativeSearch:
        """Return the structure that crosses to the compiled engine, with what depends on the board's size."""
        points = size**2
        values = {name: getattr(self, name) for name, _ in NativeSearch._fields_}
        if self.dirichlet_alpha is None:
            values["dirichlet_alpha"] = 0.03 * 361 / points
        if self.soft_pick_cutoff is None:
            values["soft_pick_cutoff"] = points // 12 // 2 * 2
        return NativeSearch(**values)
