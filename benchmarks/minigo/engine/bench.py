"""Playouts per second of the search without a network: ``python -m benchmarks.minigo.engine.bench``.

The network returns a uniform policy and value 0 at no cost; its input is filled. Measurements alternate, so that
other load affects all of them, and use CPU time, or wall time with threads; the median counts. OpenSpiel's C++
search is measured if the package ``open_spiel`` is installed. Its evaluator plays a random game to the end;
``open_spiel_cut`` stops games after four moves, so that these are almost free: faster than a free network would be,
because the depth of the tree is limited to four.
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

CUT = 4  # Moves in a random game in open_spiel_cut
Array = Any


def engine_playouts(size: int, readouts: int, seconds: float, threads: int = 1, games: int = 8) -> float:
    """Return the playouts per second over several games; playouts that end the game without a network call are not
    counted.
    """
    rules = Rules(size=size)
    pool = Games(rules, [Search(readouts=readouts, parallel_leaves=8)], games, seed=1, threads=threads)
    batch = 8 * games
    planes = np.zeros((batch, size, size, rules.planes), np.uint8)
    policy, value = np.full((batch, rules.moves), 1 / rules.moves, np.float32), np.zeros(batch, np.float32)
    clock = time.process_time if threads == 1 else time.perf_counter
    count, start = 0, clock()
    while clock() < start + seconds:
        rows = pool.leaves(planes)
        pool.answer(policy[:rows], value[:rows])
        count += rows
    return count / (clock() - start)


def openings(size: int) -> List[List[int]]:
    """Return move sequences of random games with a fixed seed: empty, a quarter and half of the points."""
    position, generator, openings_found = Position(Rules(size=size)), np.random.RandomState(3), []
    for number in range(size**2 // 2 + 1):
        if number % (size**2 // 4) == 0:
            openings_found.append([*position.moves])
        position.play(int(generator.choice(np.flatnonzero(position.legal()[:-1]))))
    return openings_found


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
            # OpenSpiel counts rows from the bottom.
            state.apply_action((size - 1 - move // size) * size + move % size)
        start = time.process_time()
        bot.mcts_search(state)
        seconds += time.process_time() - start
    return len(openings(size)) * readouts / seconds


def measure_all(size: int, readouts: int, seconds: float, repeats: int, threads: int) -> Dict[str, float]:
    """Return the playouts per second for a board size, and the ratios to OpenSpiel."""
    kinds: Dict[str, Callable[[], float]] = {"engine": lambda: engine_playouts(size, readouts, seconds)}
    if threads > 1:
        kinds[f"engine_{threads}_threads"] = lambda: engine_playouts(size, readouts, seconds, threads)
    if importlib.util.find_spec("pyspiel") is not None:
        kinds["open_spiel"] = lambda: open_spiel(size, readouts, 0)
        kinds["open_spiel_cut"] = lambda: open_spiel(size, readouts, CUT)
    figures = [{name: measure() for name, measure in kinds.items()} for _ in range(repeats)]
    medians = {name: statistics.median(figure[name] for figure in figures) for name in kinds}
    ratios = {
        f"engine_over_{name}": medians["engine"] / medians[name] for name in medians if not name.startswith("engine")
    }
    return {**medians, **ratios}


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[9, 19])
    parser.add_argument("--readouts", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    for size in options.sizes:
        result = measure_all(size, options.readouts, options.seconds, options.repeats, options.threads)
        print(json.dumps({"size": size, "readouts": options.readouts, **{k: round(v, 1) for k, v in result.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
