"""Minigo's rules, compared with recorded games, and the planes of the network's input."""

import random
import zlib

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.minigo.engine import BLACK, IllegalMove, Position, Rules, name_of
from benchmarks.minigo.engine.position import fixed_handicap

# -- rules ------------------------------------------------------------------------------------------------


# Positions and checksum of random games by board: legal moves by positional superko, stones, liberties, whose turn it
# is and, at some, unconditional life and the score. Slow rules in Python found the same in each of them
# (tests/benchmarks/go_reference.py at commit f22ea4a)
RECORDED = {5: (2451, 1727091776), 9: (673, 691764500), 19: (472, 4019843690)}


def state(position: Position) -> bytes:
    liberties = [position.liberties(point) for point in range(position.rules.size**2)]
    values = np.array([*position.legal(), *position.stones().flat, *liberties, position.to_play, position.over])
    return values.astype(np.int16).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "games"), [(5, 60), (9, 6), (19, 1)])
def test_random_games_equal_the_recorded_ones(size: int, games: int) -> None:
    chance, positions, checksum = random.Random(size), 0, 0
    for _ in range(games):
        position = Position(Rules(size=size, komi=6.5))
        while not position.over and len(position.moves) < 3 * size**2:
            checksum = zlib.crc32(state(position), checksum)
            if len(position.moves) % (4 * size) == 4 * size - 1:
                alive = position.held().astype(np.int16).tobytes()
                checksum = zlib.crc32(alive + np.float32(position.score()).tobytes(), checksum)
            positions += 1
            position.play(random_move(position, chance))
    assert (positions, checksum) == RECORDED[size]


def random_move(position: Position, chance: random.Random) -> int:
    # A move that fills no own point, so that games are long and have captures; rarely any move
    size, stones = position.rules.size, np.pad(position.stones(), 1, constant_values=position.to_play)
    moves = np.flatnonzero(position.legal()[:-1]).tolist()
    if chance.random() < 0.02:
        return chance.choice([*moves, size**2])
    around = [stones[:-2, 1:-1], stones[2:, 1:-1], stones[1:-1, :-2], stones[1:-1, 2:]]
    own = np.logical_and.reduce([neighbor == position.to_play for neighbor in around]).ravel()
    return chance.choice([move for move in moves if not own[move]] or [size**2])


def test_copy_is_independent() -> None:
    position = Position(Rules(size=9))
    position.play(40)
    other = position.copy()
    other.play(41)
    assert (position.moves, other.moves) == ((40,), (40, 41))
    assert position.stones()[4, 5] == 0


@pytest.mark.parametrize(
    ("size", "stones", "names"),
    [
        (9, 4, "C3 G7 C7 G3"),
        (9, 8, "C3 G7 C7 G3 C5 G5 E3 E7"),
        (13, 2, "D4 K10"),
        (19, 9, "D4 Q16 D16 Q4 D10 Q10 K4 K16 K10"),
    ],
)
def test_handicap_equals_that_of_gtp(size: int, stones: int, names: str) -> None:
    assert " ".join(name_of(point, size) for point in fixed_handicap(size, stones)) == names
    for board, count in ((5, 3), (9, 1), (9, 10)):
        with pytest.raises(Problem, match=f"handicap {count} on {board} x {board}"):
            fixed_handicap(board, count)


def test_illegal_moves_have_their_reasons() -> None:
    # . X O .    White takes at c1 and black may not take back at once.
    # X O . O
    # . X O .
    ko = Position(Rules(size=5), black=[1, 5, 11], white=[2, 6, 8, 12], to_play=BLACK)
    ko.play(7)
    for move, reason in ((6, "takes back a ko"), (7, "a stone already"), (0, "suicide"), (25 + 1, "off the board")):
        with pytest.raises(IllegalMove, match=reason):
            ko.play(move)
    with pytest.raises(Problem, match="without a liberty"):
        Position(Rules(size=5), black=[1, 5], white=[0])


# -- features ---------------------------------------------------------------------------------------------


# Checksum of the planes in each symmetry. Slices of the board history, liberties and captures that were computed in
# Python had the same values
PLANES: dict[str, list[int]] = {
    "agz": [3330509885, 1651511029, 2504152849, 3285677535, 4210037481, 1368885397, 1159353458, 3308085463],
    "mlperf07": [2101662461, 1800732387, 223948433, 3943807461, 253376434, 3916721827, 3930198019, 1569495701],
}


@pytest.mark.parametrize("features", PLANES)
def test_planes_equal_the_recorded_ones(features: str) -> None:
    chance, position = random.Random(3), Position(Rules(size=9, features=features))
    for _ in range(60):
        position.play(chance.choice(np.flatnonzero(position.legal()[:-1]).tolist()))
    checksums = []
    for symmetry in range(8):
        out = np.full((9, 9, position.rules.planes), 7, np.float32 if symmetry % 2 else np.uint8)
        position.planes(out, symmetry)
        checksums.append(zlib.crc32(out.astype(np.uint8).tobytes()))
    assert checksums == PLANES[features]
    with pytest.raises(Problem, match="planes of float64"):
        position.planes(np.zeros((9, 9, position.rules.planes)))
