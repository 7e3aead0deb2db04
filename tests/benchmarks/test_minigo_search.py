"""Minigo's search: what its games depend on, problems that are made by rule, its speed, and how it is compiled."""

from __future__ import annotations

import itertools
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.minigo import gtp, sgf
from benchmarks.minigo.engine import (
    BLACK,
    WHITE,
    Games,
    Match,
    Position,
    Rules,
    Search,
    Study,
    bench,
    build,
    plain,
)
from benchmarks.minigo.rules import match_search, rules_of
from tests.benchmarks import minigo_original
from tests.benchmarks.test_minigo import config_of

# -- search -----------------------------------------------------------------------------------------------


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


def test_batches_are_full_while_games_wait() -> None:
    rules = Rules(size=5, komi=0.5)
    net, games = Net(rules), Games(rules, replace(PLAIN, parallel_leaves=2), games=64, seed=5)
    planes, rows = np.zeros((64, 5, 5, 17), np.uint8), []
    for _ in range(60):
        rows.append(games.leaves(planes))
        games.answer(*net(planes[: rows[-1]]))
    assert min(rows) >= 63


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


# -- the original's rule ----------------------------------------------------------------------------------


class Drawn:
    """A network whose answer is drawn for each position, so that no two moves tie."""

    def __init__(self, rules: Rules, seed: int) -> None:
        self.rules, self.seed, self.positions = rules, seed, 0

    def __call__(self, planes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.positions += len(planes)
        policies, values = np.zeros((len(planes), self.rules.moves), np.float32), np.zeros(len(planes), np.float32)
        for row, each in enumerate(planes):
            generator = np.random.default_rng([self.seed, zlib.crc32(each.tobytes())])
            policies[row] = generator.dirichlet(np.full(self.rules.moves, 0.3))
            values[row] = generator.uniform(-1, 1)
        return policies, values


ORIGINAL = Search(readouts=30, parallel_leaves=4, fastplay_frequency=0.6, fastplay_readouts=7, random_symmetry=False,
                  noise_mix=0.3, dirichlet_alpha=0.4, soft_pick_cutoff=6, move_limit=24)  # fmt: skip
SEARCHES = {
    "self-play of v0.7": ORIGINAL,
    "always a reused tree": replace(ORIGINAL, fastplay_frequency=0.0, parallel_leaves=1),
    "no move into life": replace(ORIGINAL, restrict_pass_alive_play_threshold=0, readouts=12),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_self_play_searches_by_the_originals_rule(name: str) -> None:
    """Visits, moves, values and evaluations of whole games, against the reference's rules in plain Python."""
    search, rules, seed = SEARCHES[name], Rules(size=5, komi=0.5), 4
    kept = 0
    for number in range(3):
        net, pool = Drawn(rules, seed), Games(rules, search, games=1, seed=seed, first=number)
        pool.stop(number + 1)
        (found,) = drive(pool, net)
        wanted_net = Drawn(rules, seed)
        wanted = minigo_original.game(rules, [search.native(5)], [wanted_net], seed, number)
        assert wanted.smallest_gap > minigo_original.SLACK, "a choice that rounding decides: take another seed"
        assert found.moves.tolist() == wanted.moves
        assert np.array_equal(found.visits, wanted.visits)
        assert found.values == pytest.approx(wanted.values, abs=1e-4)
        assert net.positions == wanted_net.positions
        kept += sum(count > search.readouts + search.parallel_leaves for count in wanted.readouts)
    if name == "self-play of v0.7":
        assert kept > 5, "full searches that make up for the visits they forget"


def drive(pool: Games, net: Drawn) -> list:
    planes, found = np.zeros((8, 5, 5, 17), np.uint8), []
    while pool.running:
        rows = pool.leaves(planes)
        found += pool.answer(*net(planes[:rows]))
    return found


def test_a_match_searches_by_the_originals_rule() -> None:
    """As in cc/eval.cc of v0.7: no noise, the most visited move, never one into unconditional life."""
    config = config_of("cpu", "v0.7", "eval_readouts=14", "eval_soft_moves=0", "move_limit=40", "komi=0.5")
    rules, search = rules_of(config), replace(match_search(config), random_symmetry=False)
    # In the first of these a side would play into life where only passes forbid it.
    for seed, number in ((4, 0), (0, 1)):
        nets = Drawn(rules, seed), Drawn(rules, seed + 1)
        (found,) = Match(rules, (search, search), games=1, seed=seed, first=number).play(nets, batch=8)
        wanted = minigo_original.game(rules, [search.native(5)] * 2, list(nets), seed, number)
        assert wanted.smallest_gap > minigo_original.SLACK, "a choice that rounding decides: take another seed"
        assert found.moves.tolist() == wanted.moves
        assert np.array_equal(found.visits, wanted.visits)


# -- problems ---------------------------------------------------------------------------------------------


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


# -- speed and build -------------------------------------------------------------------------------------


def test_bench_measures_both_searches() -> None:
    found = bench.measured(size=5, readouts=16, seconds=0.01, repeats=1, threads=1)
    assert found["engine"] > 0 and found["plain_python"] > 0
    # The first playout opens the root, the others go through it.
    root = plain.search(5, 50)
    assert root.count == sum(root.visits.values()) == 49


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
