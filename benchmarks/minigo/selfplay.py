"""A rank's self-play in a generation: the engine searches, the network evaluates, finished games are appended to a
file.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Set, Tuple

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


class Groups:
    """Alternates groups of games: while a thread evaluates a group's leaves, the next group is searched.

    Evaluations are applied in a fixed order, so that games do not depend on timing.
    """

    def __init__(self, games: Games, evaluate: Evaluate, planes: Sequence[Array]) -> None:
        """Start with games in ``len(planes)`` groups; ``planes`` are the batches of leaves."""
        self._games, self._evaluate, self._planes = games, evaluate, planes
        self._thread = ThreadPoolExecutor(1)
        self._waiting: "Dict[int, Future[Any]]" = {}

    def turn(self) -> Iterator[Game]:
        """Apply evaluations and search, group by group, and yield finished games."""
        for group, planes in enumerate(self._planes):
            if group in self._waiting:
                policy, value = self._waiting.pop(group).result()
                yield from self._games.answer(policy, value, group=group)
            count = self._games.leaves(planes, group=group)
            self._waiting[group] = self._thread.submit(self._evaluate, planes[:count])

    def close(self) -> None:
        self._thread.shutdown()


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
        self._groups: Optional[Groups] = None
        if self._left:
            at_once = min(config.concurrent_games, len(self._left))
            groups = min(config.selfplay_groups, at_once)
            games = Games(
                rules_of(config),
                [search_of(config, schedule.readouts(config, generation))],
                games=at_once,
                groups=groups,
                seed=config.seed,
                first=min(self._left),
                threads=config.selfplay_threads,
                count=numbers.stop - min(self._left),
            )
            self._turn: Callable[[], Iterator[Game]] = partial(match_turn, games, [evaluate], batch_of(config))
            if groups > 1:
                self._groups = Groups(games, evaluate, [batch_of(config) for _ in range(groups)])
                self._turn = self._groups.turn

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
        if self._groups is not None:
            self._groups.close()
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
