"""What each rank does when: roles, learning rate, game numbers, the window of generations; standard library only."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, List

# Game numbers of a generation begin at a multiple of this, so that a number is of one game of a run only
GAMES_PER_GENERATION = 10**6


@dataclass(frozen=True)
class Roles:
    """Which ranks of a run train and which play: as benchmark.toml declares, the first and the last ones."""

    training: range
    selfplay: range

    @classmethod
    def of(cls, config: Any, size: int) -> Roles:
        """Return the roles of ``size`` ranks; a count of 0, or above ``size``, means all."""
        players = min(config.selfplay_ranks or size, size)
        return cls(range(min(config.train_ranks or size, size)), range(size - players, size))


def learning_rate(config: Any, step: int) -> float:
    """Return the rate of a step, those of the initial weights included: tf.train.piecewise_constant of dual_net.py."""
    rate: float = config.rates[bisect_left(config.rate_boundaries, step)]
    return rate


def share(total: int, part: int, parts: int) -> range:
    """Return the part of ``total`` consecutive numbers that belongs to one of ``parts``, sizes within one."""
    return range(total * part // parts, total * (part + 1) // parts)


def game_numbers(config: Any, generation: int, part: int, parts: int) -> range:
    """Return the numbers of the games that one of ``parts`` players plays in a generation, from 1."""
    own = share(config.games, part, parts)
    first = generation * GAMES_PER_GENERATION
    return range(first + own.start, first + own.stop)


def window(config: Any, generation: int) -> List[int]:
    """Return the generations whose games one is trained on, the oldest first."""
    return list(range(max(1, generation - config.window + 1), generation + 1))


def readouts(config: Any, generation: int) -> int:
    """Return the readouts of a search in a generation's games."""
    count: int = config.first_readouts if generation == 1 and config.first_readouts else config.readouts
    return count
