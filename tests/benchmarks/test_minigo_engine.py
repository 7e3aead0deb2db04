"""Minigo's engine: its rules against slow ones, its search on problems made by rule, SGF and GTP."""

from __future__ import annotations

import importlib.util
import io
import itertools
import random
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.minigo import gtp, models, sgf
from benchmarks.minigo.engine import (
    BLACK,
    WHITE,
    Games,
    IllegalMove,
    Match,
    Position,
    Rules,
    Search,
    Study,
    bench,
    build,
    plain,
)
from encore import paths
from encore.errors import EncoreError
from encore.run import playing
from tests.benchmarks.go_openspiel import compared
from tests.benchmarks.go_reference import SlowGo

GAMES = paths.ROOT.parent / "shared" / "data" / "go_sgf_9x9.tar.xz"
EVERY_GAME = 12
"""Every so many of the shared games are replayed here; all of them were once, by the same function."""


# ---------------------------------------------------------------------------------------------------------- rules


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


# ------------------------------------------------------------------------------------------------------- features


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


# --------------------------------------------------------------------------------------------------------- search


class Net:
    """A network of whole numbers: a row's answer is the same to the last bit, whatever else is in its batch."""

    def __init__(self, rules: Rules, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.weights = generator.integers(-3, 4, (rules.size**2 * rules.planes, rules.moves + 1))
        self.table = np.exp(np.arange(-40, 41) / 8).astype(np.float32)
        self.values = np.tanh(np.arange(-40, 41) / 40).astype(np.float32)

    def __call__(self, planes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = np.clip(planes.reshape(-1, len(self.weights)).astype(np.int64) @ self.weights, -40, 40) + 40
        return self.table[found[:, :-1]], self.values[found[:, -1]]


def played(rules: Rules, search: Search, at_once: int, batch: int, threads: int = 1, net_seed: int = 0) -> dict:
    """Twelve games by number, as bytes."""
    net, games = Net(rules, net_seed), Games(rules, search, games=at_once, seed=5, threads=threads)
    games.stop(12)
    planes = np.zeros((batch, rules.size, rules.size, rules.planes), np.uint8)
    found = {}
    while games.running:
        rows = games.leaves(planes)
        for game in games.answer(*net(planes[:rows])):
            assert len(game.moves) == len(game.visits) == len(game.values)
            found[game.number] = (game.moves.tobytes(), game.visits.tobytes(), game.values.tobytes(), game.margin)
    return found


RULES = Rules(size=5, komi=0.5)
PLAIN = Search(readouts=24, parallel_leaves=1, move_limit=30)


@pytest.fixture(scope="module")
def one_by_one() -> dict:
    """Games played alone, one leaf at a time."""
    return played(RULES, PLAIN, at_once=1, batch=1)


@pytest.mark.parametrize(("at_once", "batch", "threads"), [(12, 12, 1), (5, 64, 1), (12, 3, 1), (12, 12, 2)], ids=str)
def test_games_do_not_depend_on_their_batch(one_by_one: dict, at_once: int, batch: int, threads: int) -> None:
    assert len(one_by_one) == 12 and len(set(one_by_one.values())) == 12
    assert played(RULES, PLAIN, at_once, batch, threads) == one_by_one


def test_games_depend_on_the_network(one_by_one: dict) -> None:
    assert played(RULES, PLAIN, 12, 12, net_seed=1) != one_by_one


def test_same_seed_same_visits_with_a_cache_and_many_leaves() -> None:
    search = replace(PLAIN, parallel_leaves=4, cache_entries=5000, fastplay_frequency=0.3, fastplay_readouts=8,
                     disable_resign_pct=0.2, min_resign_threshold=-0.5, max_resign_threshold=-0.3)  # fmt: skip
    assert played(RULES, search, 12, 48) == played(RULES, search, 12, 48)


def test_virtual_loss_changes_little() -> None:
    rules = Rules(size=9)
    net, found = Net(rules), []
    for leaves in (1, 8):
        study = Study(Position(rules), Search(readouts=600, parallel_leaves=leaves, noise_mix=0.0))
        study.search_with(net)
        found.append(study.visits().astype(float))
        assert 599 <= found[-1].sum() <= 599 + leaves
    likeness = found[0] @ found[1] / np.sqrt((found[0] @ found[0]) * (found[1] @ found[1]))
    assert likeness > 0.95


def games_of(search: Search, count: int, rules: Rules = RULES) -> list:
    net, games = Net(rules), Games(rules, search, games=count, seed=1)
    games.stop(count)
    planes, found = np.zeros((256, rules.size, rules.size, rules.planes), np.uint8), []
    while games.running:
        rows = games.leaves(planes)
        found += games.answer(*net(planes[:rows]))
    return sorted(found, key=lambda game: game.number)


def test_games_end_by_the_rules() -> None:
    for game in games_of(PLAIN, 12):
        position = Position(RULES)
        for move, visits in zip(game.moves.tolist(), game.visits, strict=True):
            assert not visits[: RULES.size**2][~position.legal()[:-1]].any()
            position.play(move)
        assert game.margin == position.score()
        assert game.outcome == np.sign(game.margin)
        assert not game.resigned and not game.resignation_allowed
        assert sgf.parse(sgf.write(sgf.of_game(game, RULES))).moves == tuple(game.moves.tolist())


def test_resignation_with_a_share_played_out() -> None:
    games = games_of(replace(PLAIN, disable_resign_pct=0.5, min_resign_threshold=-0.2, max_resign_threshold=-0.1), 60)
    allowed = sum(game.resignation_allowed for game in games)
    assert 15 < allowed < 45
    assert any(game.resigned for game in games)
    assert all(game.resignation_allowed and game.outcome != 0 for game in games if game.resigned)


def test_fast_plays_are_not_trained_on() -> None:
    games = games_of(replace(PLAIN, fastplay_frequency=0.75, fastplay_readouts=6), 12)
    searched = np.concatenate([game.visits.any(axis=1) for game in games])
    assert 0.1 < searched.mean() < 0.45
    assert all(game.visits[0].any() for game in games)


def test_cache_serves_positions_that_come_again() -> None:
    rows = []
    for entries in (0, 1 << 14):
        net, games, count = Net(RULES), Games(RULES, replace(PLAIN, cache_entries=entries), games=12, seed=1), 0
        games.stop(12)
        planes = np.zeros((64, 5, 5, 17), np.uint8)
        while games.running:
            filled = games.leaves(planes)
            count += filled
            games.answer(*net(planes[:filled]))
        rows.append(count)
    assert rows[1] < 0.8 * rows[0]


def test_match_takes_black_in_turn_and_the_stronger_wins() -> None:
    rules = Rules(size=5, komi=0.5)
    strong = Search(readouts=60, noise_mix=0.0, soft_pick_cutoff=4, move_limit=50)
    random_one = Search(readouts=0, noise_mix=0.0, soft_pick_cutoff=50, policy_softmax_temp=1.0, move_limit=50)
    match = Match(rules, (strong, random_one), games=10, seed=2, count=20)
    results = match.play((by_area(rules), gtp.uniform), batch=32)
    assert sorted(game.number for game in results) == list(range(20))
    assert all(game.black == game.number % 2 for game in results)
    assert match.wins(0) >= 18 and match.wins(0) + match.wins(1) == 20


def test_refused_searches_and_evaluations() -> None:
    with pytest.raises(Problem, match="readouts -1"):
        Search(readouts=-1)
    with pytest.raises(Problem, match="size 7"):
        Rules(size=7)
    games = Games(RULES, replace(PLAIN, parallel_leaves=4), games=2, seed=0)
    with pytest.raises(Problem, match="a batch of 3"):
        games.leaves(np.zeros((3, 5, 5, 17), np.uint8))
    rows = games.leaves(np.zeros((8, 5, 5, 17), np.uint8))
    with pytest.raises(Problem, match="not finite"):
        games.answer(np.full((rows, 26), np.nan), np.zeros(rows))


# ------------------------------------------------------------------------------------------------------- problems


def by_area(rules: Rules):
    """An evaluator that counts the board as it stands; every move is as likely."""

    def evaluate(planes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values = np.zeros(len(planes), np.float32)
        for row, each in enumerate(planes):
            black = each[..., 1 - int(each[0, 0, 16])].ravel()
            white = each[..., int(each[0, 0, 16])].ravel()
            position = Position(rules, np.flatnonzero(black), np.flatnonzero(white))
            values[row] = np.tanh(position.score() / 10) * (1 if each[0, 0, 16] else -1)
        return np.ones((len(planes), rules.moves), np.float32), values

    return evaluate


def turned(points: set[tuple[int, int]], symmetry: int, size: int) -> list[int]:
    """The points under one of the eight symmetries."""
    found = []
    for row, column in points:
        y, x = (column, row) if symmetry & 4 else (row, column)
        y, x = (size - 1 - y if symmetry & 1 else y), (size - 1 - x if symmetry & 2 else x)
        found.append(y * size + x)
    return found


def around(points: set[tuple[int, int]], size: int, corners: bool = False) -> set[tuple[int, int]]:
    steps = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1) if (corners and (y or x)) or abs(y) + abs(x) == 1]
    found = {(row + y, column + x) for row, column in points for y, x in steps}
    return {(row, column) for row, column in found - points if 0 <= row < size and 0 <= column < size}


def solve(rules: Rules, position: Position, readouts: int = 800) -> int:
    study = Study(position, Search(readouts=readouts, parallel_leaves=4, noise_mix=0.0, soft_pick_cutoff=0))
    study.search_with(by_area(rules))
    return study.choose()


CHAINS = [
    {(4, 4)},
    {(4, 4), (4, 5)},
    {(4, 3), (4, 4), (5, 4)},
    {(0, 4), (0, 5), (1, 4)},
    {(3, 3), (3, 4), (3, 5), (4, 4)},
]


@pytest.mark.parametrize("color", [BLACK, WHITE], ids=["black", "white"])
@pytest.mark.parametrize("chain", range(len(CHAINS)))
def test_captures(chain: int, color: int) -> None:
    """A chain with one liberty left is taken, wherever that liberty is."""
    rules, stones = Rules(size=9, komi=0), CHAINS[chain]
    liberties = sorted(around(stones, 9))
    for symmetry, last in zip(itertools.cycle(range(8)), liberties, strict=False):
        wall, (point,) = turned(set(liberties) - {last}, symmetry, 9), turned({last}, symmetry, 9)
        inside = turned(stones, symmetry, 9)
        sides = (wall, inside) if color == BLACK else (inside, wall)
        assert solve(rules, Position(rules, *sides, color), readouts=400) == point


EYES = {
    "straight three": ({(0, 0), (0, 1), (0, 2)}, (0, 1)),
    "bent three": ({(0, 0), (0, 1), (1, 0)}, (0, 0)),
    "pyramid four": ({(0, 0), (0, 1), (0, 2), (1, 1)}, (0, 1)),
    "bulky five": ({(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)}, (0, 1)),
    "crossed five": ({(0, 1), (1, 0), (1, 1), (1, 2), (2, 1)}, (1, 1)),
}
"""Eye spaces with the one point that makes two eyes, or none, of them."""


@pytest.mark.parametrize("to_play", ["attacker", "defender"])
@pytest.mark.parametrize("shape", EYES)
def test_life_and_death(shape: str, to_play: str) -> None:
    """A chain around an eye space, another around it, and the rest of the board settled for the attacker."""
    size, (eye, vital) = 9, EYES[shape]
    for symmetry, (down, right) in itertools.product(range(8), [(0, 0), (0, 3), (3, 0), (0, 1)]):
        space = {(row + down, column + right) for row, column in eye}
        chain = around(space, size, corners=True)
        taken = space | chain
        # Two eyes of its own far away make the attacker's stones alive.
        free = {(8, 8), (8, 6)}
        attackers = {(row, column) for row in range(size) for column in range(size)} - taken - free
        defender = BLACK if symmetry % 2 else WHITE
        sides = [turned(attackers, symmetry, size), turned(chain, symmetry, size)]
        black, white = sides if defender == WHITE else sides[::-1]
        mover = defender if to_play == "defender" else 3 - defender
        # Who wins is whether the chain lives: it has fewer points than the rest.
        lead = size**2 - len(taken) + 0.5
        rules = Rules(size=size, komi=lead if defender == WHITE else -lead)
        position = Position(rules, black, white, mover)
        (answer,) = turned({(vital[0] + down, vital[1] + right)}, symmetry, size)
        assert solve(rules, position) == answer, (symmetry, down, right)


# ------------------------------------------------------------------------------------------------------------ SGF


def test_sgf_comes_back_as_it_was_written() -> None:
    text = "(;GM[1]FF[4]SZ[9]KM[6.5]RE[W+12.5]AB[cc][gg]C[a \\] b]\n;W[ee]BL[3](;B[];W[tt])(;B[aa]))"
    record = sgf.parse(text)
    assert (record.moves, record.to_play, record.margin) == ((40, 81, 81), WHITE, -12.5)
    assert sgf.parse(sgf.write(record, PB="a]b")) == record
    assert record.rules.komi == 6.5


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("(;SZ[9];B[ee];W[ee])", "move 2, white E5: there is a stone already"),
        ("(;SZ[9];B[ee];W[ed]", "ends before its game does"),
        ("(;SZ[9];B[ee];W[e", "is no SGF"),
        ("(;SZ[9];B[zz])", r"\[zz\] is no point on 9 x 9"),
        ("(;SZ[7];B[aa])", "a board of 7"),
        ("(;SZ[nine];B[aa])", "not|a number"),
        ("(;GM[2]SZ[9];B[aa])", "another game"),
        ("", "no node|ends before"),
        ("\x00\x01 binary", "no SGF|no node"),
    ],
)
def test_damaged_sgf_is_named_with_a_remedy(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "game.sgf"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(Problem, match=found) as caught:
        sgf.read(path)
    assert str(path) in str(caught.value) and caught.value.remedy


@pytest.mark.skipif(not GAMES.exists(), reason="shared/data/go_sgf_9x9.tar.xz is not next to the project")
def test_shared_games_replay_and_scores_agree() -> None:
    """Without positional superko all replay; a program's count of a finished game is the engine's."""
    counted = 0
    with tarfile.open(GAMES) as archive:
        files = [each for each in archive if each.name.endswith(".sgf")]
        for member in files[::EVERY_GAME]:
            text = archive.extractfile(member).read().decode("utf-8", "replace")
            record = sgf.parse(text, member.name, superko=False)
            # CGOS counts the board as it stands; people take dead stones away first.
            if "CGOS" in text and record.margin is not None:
                end = sgf.replay(replace(record, rules=replace(record.rules, pass_alive=False)))
                assert end.score() == record.margin, member.name
                counted += 1
    assert len(files) == 10_268 and counted > 50


# ------------------------------------------------------------------------------------------------------------ GTP


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
    with pytest.raises(EncoreError, match="ncf is no game"):
        playing.command(playing.Request(name="ncf", model="x"), print)
    command = playing.command(playing.Request(name="minigo", model="uniform", python=Path(sys.executable)), print)
    assert command[1:4] == ["-m", "benchmarks.minigo.gtp", "--model"]
    shape = models.Shape(board_size=9, features="agz", conv_width=2, trunk_layers=1, fc_width=2)
    arrays = {name: np.zeros(size, np.float32) for name, size in models.weight_shapes(shape).items()}
    models.save(tmp_path / "model.npz", shape, arrays)
    with pytest.raises(Problem, match="a model for 9 x 9"):
        gtp.evaluator_of(str(tmp_path / "model.npz"), 19, "benchmarks.minigo.tensorflow", 1)


def test_bench_measures_both_searches() -> None:
    found = bench.measured(size=5, readouts=16, seconds=0.01, repeats=1, threads=1)
    assert found["engine"] > 0 and found["plain_python"] > 0
    # The first playout opens the root, the others go through it.
    root = plain.search(5, 50)
    assert root.count == sum(root.visits.values()) == 49


# ---------------------------------------------------------------------------------------------------------- build


def test_missing_or_failing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(build.FOLDER, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Problem, match="no C\\+\\+ compiler") as caught:
        build.library()
    assert "apt-get install g++" in caught.value.remedy
    monkeypatch.setenv("CXX", shutil.which("false", path="/bin:/usr/bin") or "")
    with pytest.raises(Problem, match="does not compile"):
        build.library()
    assert not list((tmp_path / "encore" / "engine").glob("minigo-*"))


def test_built_engine_of_an_image_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / build.file_name("plain")).write_bytes(b"")
    monkeypatch.setenv(build.FOLDER, str(tmp_path))
    assert build.library() == tmp_path / build.file_name("plain")
