"""Playouts a second of the search by itself: ``python -m benchmarks.minigo.engine.bench``.

The network is free: every move is as likely, no side is ahead; its input is filled all the same. Measured in turn, so
that what else the machine does meets all alike, and in seconds of the processor, with threads in those of the clock;
the median counts. OpenSpiel's C++ search is measured where the package ``open_spiel`` is installed. Its evaluator is a
random game to the end; ``open_spiel_cut`` ends all games after four moves, so that those are almost free too: more
than it can do with a free network, because its tree is then no deeper than four.
"""

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, Optional

import numpy as np

from benchmarks.minigo.engine import Games, Position, Rules, Search

CUT = 4  # Moves of a game whose random ends cost next to nothing
Array = Any


def compiled(size: int, readouts: int, seconds: float, threads: int = 1, games: int = 8) -> float:
    """Return playouts a second of many games; what ends a game in the tree and needs no network is not counted."""
    rules = Rules(size=size)
    pool = Games(rules, [Search(readouts=readouts, parallel_leaves=8)], games, seed=1, threads=threads)
    batch = 8 * games
    planes = np.zeros((batch, size, size, rules.planes), np.uint8)
    policy, value = np.full((batch, rules.moves), 1 / rules.moves, np.float32), np.zeros(batch, np.float32)
    clock = time.process_time if threads == 1 else time.perf_counter
    count, begin = 0, clock()
    while clock() < begin + seconds:
        rows = pool.leaves(planes)
        pool.answer(policy[:rows], value[:rows])
        count += rows
    return count / (clock() - begin)


def openings(size: int) -> List[List[int]]:
    """Return the moves to positions over a game: none, a quarter and half of the points, drawn with a fixed seed."""
    position, chance, found = Position(Rules(size=size)), np.random.RandomState(3), []
    for number in range(size**2 // 2 + 1):
        if number % (size**2 // 4) == 0:
            found.append([*position.moves])
        position.play(int(chance.choice(np.flatnonzero(position.legal()[:-1]))))
    return found


def open_spiel(size: int, readouts: int, cut: int) -> float:
    """Return playouts a second of OpenSpiel's search, from the same positions; games end after ``cut`` moves."""
    pyspiel: Any = importlib.import_module("pyspiel")
    seconds = 0.0
    for moves in openings(size):
        settings = {"board_size": size, "komi": 7.5, **({"max_game_length": len(moves) + cut} if cut else {})}
        game = pyspiel.load_game("go", settings)
        bot = pyspiel.MCTSBot(game, pyspiel.RandomRolloutEvaluator(1, 7), 2.0, readouts, 1000, False, 7, False)
        state = game.new_initial_state()
        for move in moves:
            # Its rows are counted from the bottom.
            state.apply_action((size - 1 - move // size) * size + move % size)
        begin = time.process_time()
        bot.mcts_search(state)
        seconds += time.process_time() - begin
    return len(openings(size)) * readouts / seconds


def measured(size: int, readouts: int, seconds: float, repeats: int, threads: int) -> Dict[str, float]:
    """Return the figures of one board, and how often as fast as OpenSpiel's the compiled search is."""
    kinds: Dict[str, Callable[[], float]] = {"engine": lambda: compiled(size, readouts, seconds)}
    if threads > 1:
        kinds[f"engine_{threads}_threads"] = lambda: compiled(size, readouts, seconds, threads)
    if importlib.util.find_spec("pyspiel") is not None:
        kinds["open_spiel"] = lambda: open_spiel(size, readouts, 0)
        kinds["open_spiel_cut"] = lambda: open_spiel(size, readouts, CUT)
    figures = [{name: measure() for name, measure in kinds.items()} for _ in range(repeats)]
    found = {name: statistics.median(each[name] for each in figures) for name in kinds}
    ratios = {f"engine_over_{name}": found["engine"] / found[name] for name in found if not name.startswith("engine")}
    return {**found, **ratios}


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[9, 19])
    parser.add_argument("--readouts", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    for size in options.sizes:
        found = measured(size, options.readouts, options.seconds, options.repeats, options.threads)
        print(json.dumps({"size": size, "readouts": options.readouts, **{k: round(v, 1) for k, v in found.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
