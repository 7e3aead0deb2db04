"""Minigo's rules, compared with recorded games, and the planes of the network's input."""

import io
import random
import subprocess
import sys
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.minigo import gtp, models, sgf
from benchmarks.minigo.engine import BLACK, WHITE, IllegalMove, Position, Rules, Search, name_of
from benchmarks.minigo.engine.position import fixed_handicap
from encore import paths
from encore.errors import EncoreError
from encore.run import programs

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
    assert (position.moves, other.moves, position.stones()[4, 5]) == ((40,), (40, 41), 0)


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


GAMES = paths.ROOT.parent / "shared" / "data" / "go_sgf_9x9.tar.xz"
EVERY_GAME = 12  # Every 12th shared game is replayed; all games were replayed once by the same function


# -- sgf --------------------------------------------------------------------------------------------------


def test_the_main_line_of_a_game_is_read() -> None:
    # Properties in any order, escapes, comments, passes, a side that plays twice, and no variation
    text = "(;GM[1]FF[4]SZ[9]KM[6.5]RE[W+12.5]AB[cc][gg:hh]C[a \\] b]\n;W[ee]BL[3](;B[];W[tt];W[ab])(;B[aa]))"
    record = sgf.parse(text, features="mlperf07")
    assert record == sgf.Record(
        Rules(size=9, komi=6.5, features="mlperf07"), (20, 60, 61, 69, 70), (), WHITE, (40, 81, 81, 81, 9), WHITE,
        -12.5, "W+12.5",
    )  # fmt: skip
    for result, found in (("B+R", (1, None)), ("B+3", (1, 3.0)), ("Draw", (0, 0.0)), ("Void", (0, None))):
        record = sgf.parse(f"(;SZ[5]AB[aa]PL[B]RE[{result}])")
        assert (record.winner, record.margin, record.to_play) == (*found, BLACK)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("(;SZ[9];B[ee];W[ee])", "move 2, white E5: there is a stone already"),
        ("(;SZ[9];B[ee];W[ed]", "ends within a game"),
        ("(;SZ[9];B[ee];W[e", "is not SGF"),
        ("(;SZ[9];B[zz])", r"(?s)\[zz\] is not a point on 9 x 9.*aa to ii"),
        ("(;SZ[7];B[aa])", "a board of 7"),
        ("(;SZ[nine];B[aa])", "not|a number"),
        ("(;GM[2]SZ[9];B[aa])", "another game"),
        ("", "no node|ends within"),
        ("\x00\x01 binary", "is not SGF"),
    ],
)
def test_damaged_sgf_is_named_with_a_hint(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "game.sgf"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(Problem, match=found) as caught:
        sgf.read(path)
    assert str(path) in str(caught.value) and caught.value.hint


@pytest.mark.slow
@pytest.mark.skipif(not GAMES.exists(), reason="shared/data/go_sgf_9x9.tar.xz is not next to the project")
def test_shared_games_replay_and_scores_agree() -> None:
    # Without positional superko all replay; a program's count of a finished game is the engine's
    counted = 0
    with tarfile.open(GAMES) as archive:
        files = [member for member in archive if member.name.endswith(".sgf")]
        for member in files[::EVERY_GAME]:
            text = archive.extractfile(member).read().decode("utf-8", "replace")
            record = sgf.parse(text, member.name, superko=False)
            # CGOS counts the board as it stands; people take dead stones away first.
            if "CGOS" in text and record.margin is not None:
                end = sgf.replay(replace(record, rules=replace(record.rules, pass_alive=False)))
                assert end.score() == record.margin, member.name
                counted += 1
    assert len(files) == 10_268 and counted > 50


# -- gtp --------------------------------------------------------------------------------------------------


def asked(commands: str, *arguments: str) -> list[str]:
    out = io.StringIO()
    server = gtp.Server(gtp.uniform, Rules(size=9), Search(readouts=30, noise_mix=0.0, soft_pick_cutoff=0), 0)
    server.serve(commands.splitlines(), out)
    return out.getvalue().split("\n\n")[:-1]


def test_gtp_speaks_the_protocol() -> None:
    commands = "1 protocol_version|# nothing|2 boardsize 9|komi 5.5|play b e5|play b D5|genmove w|undo|undo|undo|undo"
    found = asked(commands.replace("|", "\n") + "\nfinal_score\nknown_command play\nplay w j9\n7 quit\nname")
    assert found[:5] == ["=1 2", "=2 ", "= ", "= ", "= "]
    assert found[5][:3] in {f"= {column}" for column in "ABCDEFGHJ"}
    # Four of: e5, a pass between black's two moves, d5, and white's answer.
    assert found[10:] == ["= W+5.5", "= true", "= ", "=7 "]
    board = asked("boardsize 9\nfixed_handicap 5\nplay w a1\nshowboard\nclear_board\nset_free_handicap a1 b2")
    assert (board[1], board[-1]) == ("= C3 G7 C7 G3 E5", "= A1 B2")
    rows = {9: ". . . . . . . . .", 7: ". . X . . . X . .", 5: ". . . . X . . . .", 3: ". . X . . . X . ."}
    rows = {**dict.fromkeys(range(9, 0, -1), rows[9]), **rows, 1: "O . . . . . . . ."}
    columns = "   A B C D E F G H J"
    assert board[3].splitlines()[1:] == [columns, *(f" {number} {row}" for number, row in rows.items()), columns]


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("boardsize 19", "? unacceptable size: the model plays on 9 x 9; use a model of 19"),
        ("play b e5\nplay w e5", "? illegal move: move 2, white E5: there is a stone already"),
        ("play b z9", "? syntax error"),
        ("play b e10", "? invalid vertex: it is off the board"),
        ("fixed_handicap 12", "? handicap 12 on 9 x 9"),
        ("moo", "? unknown command"),
        ("undo", "? cannot undo"),
        ("play", "? syntax error"),
    ],
)
def test_gtp_refuses(command: str, answer: str) -> None:
    assert asked(command)[-1].startswith(answer)


def test_gtp_over_standard_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.minigo.gtp", "--model"]
    done = subprocess.run(
        [*command, "uniform", "--size", "5", "--readouts", "20"],
        input="genmove b\nquit\n", capture_output=True, text=True, cwd=paths.ROOT, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("= ")
    done = subprocess.run([*command, str(tmp_path / "none.npz")], capture_output=True, text=True, cwd=paths.ROOT)
    assert done.returncode == 2 and "no model" in done.stderr and "Traceback" not in done.stderr


def test_play_is_for_games_and_models_of_their_size(tmp_path: Path) -> None:
    with pytest.raises(EncoreError, match="ncf has no game to play"):
        programs.player("ncf", "x", (), None, print)
    command = programs.player("minigo", "uniform", (), Path(sys.executable), print)
    assert command[1:4] == ["-m", "benchmarks.minigo.gtp", "--model"]
    shape = models.Shape(board_size=9, features="agz", conv_width=2, trunk_layers=1, fc_width=2)
    arrays = {name: np.zeros(size, np.float32) for name, size in models.weight_shapes(shape).items()}
    models.save(tmp_path / "model.npz", shape, arrays)
    with pytest.raises(Problem, match="a model for 9 x 9"):
        gtp.evaluator_of(str(tmp_path / "model.npz"), 19, "benchmarks.minigo.tensorflow", 1)
