"""Games as samples, for benchmarks/common/data/sample_checks.py: their moves, which the rules allow, and who won."""

from pathlib import Path
from typing import Any, Iterator, List, Mapping, Optional, Tuple

import numpy as np

from benchmarks.common.data import sample_checks
from benchmarks.minigo.engine import IllegalMove, Position, Rules
from benchmarks.minigo.examples import GoGames

REPLAYED = 50  # games per part that are replayed
SHORT = 8  # moves up to which games repeat each other by chance


def _is_legal(moves: np.ndarray, size: int) -> bool:
    position = Position(Rules(size=size))
    try:
        for move in moves.tolist():
            position.play(move)
    except IllegalMove:
        return False
    return True


def view(directory: Path, manifest: Mapping[str, Any]) -> sample_checks.View:
    size = int(manifest["facts"]["board_size"])
    games = GoGames(directory, size)
    trained = len(games) - games.held_out

    def part(start: int, count: int) -> sample_checks.Part:
        def keys(indices: np.ndarray) -> List[Optional[bytes]]:
            sequences = (games[index + start].moves for index in indices.tolist())
            return [None if 0 < len(moves) <= SHORT else sample_checks.key(moves) for moves in sequences]

        def labels(indices: np.ndarray) -> np.ndarray:
            return np.array([(int(games[index + start].outcome) + 1) // 2 for index in indices.tolist()])

        return sample_checks.Part(count, keys, labels=labels)

    parts = {"train": part(0, trained), "test": part(trained, games.held_out)}

    def extra_checks() -> Iterator[Tuple[str, str]]:
        right = {
            index: _is_legal(games[index].moves, size) for index in sample_checks.spread(len(games), REPLAYED).tolist()
        }
        expected = "games by the rules: moves may be another one's, or shuffled"
        yield from sample_checks.agreement(right, "games have moves that are illegal", expected, 1.0)

    return sample_checks.View(parts, classes=2, is_shuffled=True, extra_checks=extra_checks)
