"""Minigo's rules: random games next to recorded ones, and the planes of the network's input."""

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


def facts(position: Position) -> bytes:
    liberties = [position.liberties(point) for point in range(position.rules.size**2)]
    found = np.array([*position.legal(), *position.stones().flat, *liberties, position.to_play, position.over])
    return found.astype(np.int16).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "games"), [(5, 60), (9, 6), (19, 1)])
def test_random_games_are_the_recorded_ones(size: int, games: int) -> None:
    chance, positions, checksum = random.Random(size), 0, 0
    for _ in range(games):
        position = Position(Rules(size=size, komi=6.5))
        while not position.over and len(position.moves) < 3 * size**2:
            checksum = zlib.crc32(facts(position), checksum)
            if len(position.moves) % (4 * size) == 4 * size - 1:
                held = position.held().astype(np.int16).tobytes()
                checksum = zlib.crc32(held + np.float32(position.score()).tobytes(), checksum)
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
    own = np.logical_and.reduce([each == position.to_play for each in around]).ravel()
    return chance.choice([move for move in moves if not own[move]] or [size**2])


def test_copy_is_played_on_by_itself() -> None:
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
def test_handicap_is_that_of_gtp(size: int, stones: int, names: str) -> None:
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


@pytest.mark.parametrize("features", ["agz", "mlperf07"])
def test_planes(features: str) -> None:
    size, chance = 9, random.Random(3)
    position = Position(Rules(size=size, features=features))
    boards = [position.stones()]
    for _ in range(60):
        position.play(chance.choice(np.flatnonzero(position.legal()[:-1]).tolist()))
        boards.append(position.stones())
    own, count = position.to_play, 8 if features == "agz" else 4
    wanted = [boards[-1 - k] == color for k in range(count) for color in (own, 3 - own)]
    wanted.append(np.full((size, size), own == BLACK))
    if features == "mlperf07":
        liberties = np.array([position.liberties(point) for point in range(size**2)]).reshape(size, size)
        captures = np.zeros(size**2, bool)
        for move in np.flatnonzero(position.legal()[:-1]):
            after = position.copy()
            after.play(int(move))
            captures[move] = (after.stones() == 3 - own).sum() < (boards[-1] == 3 - own).sum()
        wanted += [liberties == 1, liberties == 2, liberties >= 3, captures.reshape(size, size)]
    plain = np.stack(wanted, -1)
    seen = set()
    for symmetry in range(8):
        out = np.full((size, size, position.rules.planes), 7, np.float32 if symmetry % 2 else np.uint8)
        position.planes(out, symmetry)
        turned = plain.transpose(1, 0, 2) if symmetry & 4 else plain
        turned = turned[::-1] if symmetry & 1 else turned
        turned = turned[:, ::-1] if symmetry & 2 else turned
        assert np.array_equal(out, turned)
        seen.add(out.astype(np.uint8).tobytes())
    assert len(seen) == 8
    with pytest.raises(Problem, match="planes of float64"):
        position.planes(np.zeros((size, size, position.rules.planes)))
