"""Go with search: the rules of MLPerf's reference, PUCT over many games at once, compiled from C++."""

from benchmarks.minigo.engine.games import Evaluate, Game, Games, Search, Study
from benchmarks.minigo.engine.position import BLACK, FEATURES, WHITE, IllegalMove, Position, Rules, name_of

__all__ = [
    "BLACK", "FEATURES", "WHITE", "Evaluate", "Game", "Games", "IllegalMove", "Position", "Rules", "Search",
    "Study", "name_of",
]  # fmt: skip
