"""One rank's games of a generation: the engine searches, the network evaluates, whole games go to a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Set, Tuple

import numpy as np

from benchmarks.minigo import schedule
from benchmarks.minigo.engine import Evaluate, Game, Games, Match
from benchmarks.minigo.models import PLANES
from benchmarks.minigo.records import GameFile, generation_folder
from benchmarks.minigo.rules import match_search, rules_of, search_of

SLICE_SECONDS = 0.25
"""Between two moments at which the ranks ask each other whether to stop."""
Array = Any


class Worker:
    """Plays its share of a generation's games; those that its files have already are not played again."""

    def __init__(
        self, config: Any, output: Path, generation: int, part: int, parts: int, evaluate: Evaluate, done: Set[int]
    ) -> None:
        """``part`` is which of ``parts`` players this is, ``done`` the games that are there."""
        self._file = GameFile(generation_folder(output, generation) / f"worker_{part:04d}.games")
        self._numbers = schedule.game_numbers(config, generation, part, parts)
        self._missing = set(self._numbers) - done
        self._evaluate = evaluate
        shape = (config.inference_batch, config.board_size, config.board_size, PLANES[config.features])
        self._planes = np.zeros(shape, np.uint8)
        self.evaluations = 0
        if self._missing:
            self._games = self._begin(config, schedule.readouts(config, generation))

    def _begin(self, config: Any, readouts: int) -> Games:
        first = min(self._missing)
        games = Games(
            rules_of(config),
            search_of(config, readouts),
            games=min(config.concurrent_games, len(self._missing)),
            seed=config.seed,
            first=first,
            threads=config.selfplay_threads,
        )
        games.stop(self._numbers.stop)
        return games

    @property
    def missing(self) -> int:
        """Games that are still to be played."""
        return len(self._missing)

    def play(self, seconds: float = SLICE_SECONDS) -> None:
        """Play for a while, or until all games are there."""
        until = time.monotonic() + seconds
        while self._missing and time.monotonic() < until:
            count = self._games.leaves(self._planes)
            policy, value = self._evaluate(self._planes[:count])
            ended = [game for game in self._games.answer(policy, value) if game.number in self._missing]
            self._file.add(ended)
            self._missing -= {game.number for game in ended}
            self.evaluations += count

    def close(self) -> None:
        """Write all games to the disk."""
        self._file.close()


def outcomes(games: Sequence[Game]) -> Dict[str, float]:
    """Return figures of a generation's games: their number and length, and how they ended."""
    count = len(games)
    return {
        "games": count,
        "moves": sum(len(game.moves) for game in games) / count,
        "black_wins": sum(game.outcome > 0 for game in games) / count,
        "resigned": sum(game.resigned for game in games) / count,
    }


def rounds(remaining: Callable[[], float], work: Callable[[], None]) -> Iterator[None]:
    """Work in slices until no rank has anything left; all ranks come to each slice together."""
    while remaining() > 0:
        work()
        yield


class MatchWorker:
    """Plays its share of a match between two networks, each of which has black in every other game."""

    def __init__(self, config: Any, evaluators: Tuple[Evaluate, Evaluate], games: range, seed: int) -> None:
        """``games`` are the numbers of this rank's games."""
        self._evaluators, self.missing, self.played = evaluators, len(games), 0
        self._match: Optional[Match] = None
        search = match_search(config)
        shape = (config.inference_batch, config.board_size, config.board_size, PLANES[config.features])
        self._planes = np.zeros(shape, np.uint8)
        if games:
            self._match = Match(
                rules_of(config),
                (search, search),
                games=min(config.concurrent_games, len(games)),
                seed=seed,
                first=games.start,
                threads=config.selfplay_threads,
                count=len(games),
            )

    @property
    def wins(self) -> float:
        """Games that the first network won; a draw counts half."""
        return self._match.wins(0) if self._match is not None else 0.0

    def play(self, seconds: float = SLICE_SECONDS) -> None:
        """Play for a while, or until all games are over."""
        until = time.monotonic() + seconds
        while self._match is not None and self.missing and time.monotonic() < until:
            for side, evaluate in enumerate(self._evaluators):
                count = self._match.leaves(side, self._planes)
                answers = evaluate(self._planes[:count])
                ended = len(self._match.answer(side, *answers))
                self.missing, self.played = self.missing - ended, self.played + ended
