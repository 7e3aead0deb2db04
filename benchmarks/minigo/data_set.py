"""A prepared data set: professional games for the supervised start and v0.5's evaluation, and the target model.

``moves.npy`` (int16) has the moves of all games one after the other, ``starts.npy`` (int64) where each begins and the
last one ends, ``outcomes.npy`` (int8) 1 where black won and -1 where white did. The last ``held_out`` games are never
trained on. ``target.npz`` is the target model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.minigo.engine import Game

FILES = ("moves.npy", "starts.npy", "outcomes.npy", "target.npz")
TARGET = "target.npz"
Array = Any


class GoGames:
    """Games of a prepared folder, each as a record in which every move has one visit."""

    def __init__(self, folder: Path, board_size: int) -> None:
        """Open the folder; raises Problem if its games are of another board size."""
        facts = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))["facts"]
        if facts["board_size"] != board_size:
            found = f"{folder} has games on {facts['board_size']} x {facts['board_size']}"
            raise Problem(found, f"{board_size} x {board_size}", "name another data set with --data, or set board_size")
        self._moves, self._starts, self._outcomes = (np.load(str(folder / name), mmap_mode="r") for name in FILES[:3])
        self._size, self.held_out = board_size, int(facts["held_out"])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Game:
        moves = np.asarray(self._moves[self._starts[number] : self._starts[number + 1]])
        visits = np.zeros((len(moves), self._size**2 + 1), np.uint16)
        visits[np.arange(len(moves)), moves] = 1
        outcome = float(self._outcomes[number])
        return Game(int(number), moves, visits, np.zeros(len(moves), np.float32), outcome, 0.0, False, False)

    def places(self, held_out: bool) -> Array:
        """Return all positions of the held-out games, or of the others: (positions, 2) of game and ply."""
        first = len(self) - self.held_out
        games = range(first, len(self)) if held_out else range(first)
        lengths = np.diff(self._starts)[games.start : games.stop]
        plies = np.concatenate([np.arange(length) for length in lengths] or [np.zeros(0, np.int64)])
        return np.stack([np.repeat(np.arange(games.start, games.stop), lengths), plies], 1)


def open_data(folder: Path) -> Tuple[int, int]:
    """Open a data set for a check; return how many games it trains on and holds out."""
    facts = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))["facts"]
    games = GoGames(folder, facts["board_size"])
    return len(games) - games.held_out, games.held_out
