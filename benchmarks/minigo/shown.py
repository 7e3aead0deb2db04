"""One game of each generation with the position at its end, which `encore report` draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.minigo.engine import Game, Position
from benchmarks.minigo.rules import rules_of

# In the folder of an experiment: one line a game; a resumed run may write that of a generation again
FILE = "shown_games.jsonl"


def write(output: Path, generation: int, game: Game, config: Any) -> None:
    """Append a game of ``generation``, from 1: its moves, row * size + column from the top left, and the last stones.

    Stones are 0 empty, 1 black and 2 white, in the order of the points; outcome and margin are black's.
    """
    position = Position(rules_of(config))
    for move in game.moves.tolist():
        position.play(move)
    line = {
        "generation": generation,
        "game": game.number,
        "size": config.board_size,
        "moves": game.moves.tolist(),
        "stones": position.stones().ravel().tolist(),
        "outcome": game.outcome,
        "margin": game.margin,
        "resigned": game.resigned,
    }
    with (output / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
