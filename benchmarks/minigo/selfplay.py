"""A rank's self-play in a generation: the engine searches, the network evaluates, finished games are appended to a
file.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Sequence, Set, Tuple

import numpy as np

from benchmarks.minigo import schedule
from benchmarks.minigo.engine import Evaluate, Game, Games
from benchmarks.minigo.models import PLANES
from benchmarks.minigo.records import GameFile, generation_folder
from benchmarks.minigo.schedule import match_search, rules_of, search_of

SLICE_SECONDS = 0.25  # Interval between stop votes of the ranks
Array = Any


def play_for(seconds: float, turn: Callable[[], Iterator[Game]], is_done: Callable[[], bool]) -> Iterator[Game]:
    """Take turns for a while, or until all is done, and yield the games that end."""
    until = time.monotonic() + seconds
    while not is_done() and time.monotonic() < until:
        yield from turn()


def match_turn(games: Games, evaluators: Sequence[Evaluate], planes: Array) -> Iterator[Game]:
    """Search and evaluate the games of all players, one evaluator per player, and yield finished games."""
    for player, evaluate in enumerate(evaluators):
        count = games.leaves(planes, player)
        yield from games.answer(*evaluate(planes[:count]), player)


def batch_of(config: Any) -> Array:
    """Return uint8 (batch, N, N, planes): input buffer of the network."""
    size = config.board_size
    return np.zeros((config.inference_batch, size, size, PLANES[config.features]), np.uint8)


class Worker:
    """Plays a rank's games in a generation, except games that already exist."""

    def __init__(
        self, config: Any, output: Path, generation: int, part: int, parts: int, evaluate: Evaluate, done: Set[int]
    ) -> None:
        """Play the games of player ``part`` out of ``parts``, except ``done``, the numbers of existing games."""
        self._file = GameFile(generation_folder(output, generation) / f"worker_{part:04d}.games")
        numbers = schedule.game_numbers(config, generation, part, parts)
        self._left = set(numbers) - done
        if self._left:
            games = Games(
                rules_of(config),
                [search_of(config)],
                games=min(config.concurrent_games, len(self._left)),
                seed=config.seed,
                first=min(self._left),
                threads=config.selfplay_threads,
                count=numbers.stop - min(self._left),
            )
            self._turn = partial(match_turn, games, [evaluate], batch_of(config))

    @property
    def missing(self) -> int:
        return len(self._left)

    def play(self, seconds: float = SLICE_SECONDS) -> None:
        if self._left:
            for game in play_for(seconds, self._turn, lambda: not self._left):
                if game.number in self._left:
                    self._file.add([game])
                    self._left.remove(game.number)

    def close(self) -> None:
        self._file.close()


def outcomes(games: Sequence[Game]) -> Dict[str, float]:
    count = len(games)
    return {
        "games": count,
        "moves": sum(len(game.moves) for game in games) / count,
        "black_wins": sum(game.outcome > 0 for game in games) / count,
        "resigned": sum(game.resigned for game in games) / count,
    }


class MatchWorker:
    """Plays a rank's games in a match between two networks with alternating colours."""

    def __init__(self, config: Any, evaluators: Tuple[Evaluate, Evaluate], games: range, seed: int) -> None:
        self._count = len(games)
        # Finished games, and wins of the first network; a draw counts half
        self.played, self.wins = 0, 0.0
        if games:
            played = Games(
                rules_of(config),
                [match_search(config)] * 2,
                games=min(config.concurrent_games, len(games)),
                seed=seed,
                first=games.start,
                threads=config.selfplay_threads,
                count=len(games),
            )
            self._turn = partial(match_turn, played, evaluators, batch_of(config))

    @property
    def missing(self) -> int:
        return self._count - self.played

    def play(self, seconds: float = SLICE_SECONDS) -> None:
        if self.missing:
            for game in play_for(seconds, self._turn, lambda: not self.missing):
                self.played += 1
                self.wins += 0.5 + 0.5 * (game.outcome if game.black == 0 else -game.outcome)
