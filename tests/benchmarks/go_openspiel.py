"""The engine held against OpenSpiel's Go, move by move: ``python tests/benchmarks/go_openspiel.py POSITIONS``."""

from __future__ import annotations

import random
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.minigo.engine import Position, Rules


def compared(size: int, positions: int, seed: int) -> tuple[int, int]:
    """Play random games on both until so many positions agree; returns them, and the games that superko ended there.

    OpenSpiel knows the simple ko; a move that repeats a position ends its game, and is illegal here.
    """
    import pyspiel

    game = pyspiel.load_game("go", {"board_size": size, "komi": 0.5, "max_game_length": 4 * size**2})
    # An action of OpenSpiel is row * size + column from the bottom.
    points = [(size - 1 - action // size) * size + action % size for action in range(size**2)] + [size**2]
    actions = {point: action for action, point in enumerate(points)}
    rules = Rules(size=size, komi=0.5, superko=False, pass_alive=False)
    chance, done, repeated = random.Random(seed), 0, 0
    while done < positions:
        state, simple, strict = game.new_initial_state(), Position(rules), Position(Rules(size=size))
        while True:
            legal = [point for point, allowed in enumerate(simple.legal().tolist()) if allowed]
            assert sorted(points[action] for action in state.legal_actions()) == legal, simple.moves
            done += 1
            move = chance.choice(legal[:-1]) if len(legal) > 1 and chance.random() > 0.02 else size**2
            refused = not strict.legal()[move]
            state.apply_action(actions[move])
            simple.play(move)
            assert state.is_terminal() == (refused or simple.over or len(simple.moves) >= 4 * size**2)
            if state.is_terminal():
                break
            strict.play(move)
        repeated += refused
        if not refused:
            assert (state.returns()[0] > 0) == (simple.score() > 0), simple.moves
    return done, repeated


if __name__ == "__main__":
    for size in (5, 9, 19):
        done, repeated = compared(size, int(sys.argv[1]), seed=size)
        print(f"{size} x {size}: {done:,} positions agree; {repeated} games ended by a repetition")
