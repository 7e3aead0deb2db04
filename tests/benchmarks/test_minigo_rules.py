"""Minigo's rules against slow ones and OpenSpiel's, and the planes of the network's input."""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.minigo import gtp
from benchmarks.minigo.engine import (
    BLACK,
    WHITE,
    IllegalMove,
    Position,
    Rules,
)
from tests.benchmarks.go_openspiel import compared
from tests.benchmarks.go_reference import SlowGo

# -- rules ------------------------------------------------------------------------------------------------


def random_move(slow: SlowGo, legal: list[bool], chance: random.Random) -> int:
    """A move that fills no own point, so that games are long and have captures; rarely any move."""
    moves = [move for move, allowed in enumerate(legal[:-1]) if allowed]
    if chance.random() < 0.02:
        return chance.choice([*moves, slow.size**2])
    open_ones = [move for move in moves if not all(slow.board[each] == slow.to_play for each in slow.neighbors(move))]
    return chance.choice(open_ones or [slow.size**2])


def assert_same(slow: SlowGo, fast: Position) -> None:
    """Everything that does not have to be looked at after each move."""
    for point, stone in enumerate(slow.board):
        if stone:
            assert fast.liberties(point) == len(slow.liberties(slow.board, point))
    held = fast.held().ravel()
    assert [set(np.flatnonzero(held == color)) for color in (BLACK, WHITE)] == [slow.held(BLACK), slow.held(WHITE)]
    assert fast.score() == slow.score() - fast.rules.komi


@pytest.mark.parametrize(("size", "games"), [(5, 90), (9, 7), (19, 1)])
def test_random_games_move_by_move(size: int, games: int) -> None:
    chance, repeated, kos = random.Random(size), 0, 0
    for _ in range(games):
        slow, fast = SlowGo(size), Position(Rules(size=size, komi=6.5))
        for number in range(3 * size**2 if size < 19 else 260):
            legal = fast.legal().tolist()
            assert legal == [slow.legal(move) for move in range(size**2 + 1)], fast.moves
            assert list(slow.board) == fast.stones().ravel().tolist()
            assert (fast.to_play, fast.over) == (slow.to_play, slow.passes >= 2)
            kos += slow.ko is not None
            repeated += sum(slow.after(move)[0] in slow.seen for move in range(size**2) if slow.board[move] == 0)
            if number % (8 * size) == 8 * size - 1:
                assert_same(slow, fast)
            if slow.passes >= 2:
                break
            move = random_move(slow, legal, chance)
            slow.play(move)
            fast.play(move)
        assert_same(slow, fast)
    # The games have what is rare in them; one on 19 x 19 is too short for it.
    assert size == 19 or (kos > 5 and repeated > 5)


@pytest.mark.parametrize("size", [5, 9, 19])
def test_random_games_against_openspiel(size: int) -> None:
    if importlib.util.find_spec("pyspiel") is None:
        pytest.skip("open_spiel is not installed: it needs Python 3.11")
    done, _ = compared(size, 12_000, seed=size)
    assert done >= 12_000


def test_copy_is_played_on_by_itself() -> None:
    position = Position(Rules(size=9))
    position.play(40)
    other = position.copy()
    other.play(41)
    assert (position.moves, other.moves) == ((40,), (40, 41))
    assert position.stones()[4, 5] == 0


@pytest.mark.parametrize(
    ("size", "stones", "names"),
    [(9, 4, {"C3", "G7", "C7", "G3"}), (19, 5, {"D4", "Q16", "D16", "Q4", "K10"}), (13, 2, {"D4", "K10"})],
)
def test_handicap_is_that_of_gtp(size: int, stones: int, names: set[str]) -> None:
    position = Position(Rules(size=size, handicap=stones))
    assert {gtp.name_of(int(point), size) for point in np.flatnonzero(position.stones())} == names
    assert position.to_play == WHITE
    with pytest.raises(Problem, match="handicap 3 on 5 x 5"):
        Rules(size=5, handicap=3)


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
        slow = SlowGo(size, superko=False, board=tuple(boards[-1].ravel().tolist()), to_play=own)
        captures = [
            bool(allowed and slow.after(move)[1]) for move, allowed in enumerate(position.legal()[:-1].tolist())
        ]
        wanted += [liberties == 1, liberties == 2, liberties >= 3, np.array(captures).reshape(size, size)]
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
