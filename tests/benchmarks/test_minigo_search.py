"""Minigo's search: what its games depend on, games as the reference plays them, its speed and its build."""

import shutil
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.minigo.engine import Game, Games, Position, Rules, Search, bench, build
from benchmarks.minigo.schedule import match_search, rules_of
from benchmarks.minigo.selfplay import Groups
from tests.benchmarks.test_minigo import config_of

# -- search -----------------------------------------------------------------------------------------------

Evaluate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class Net:
    # A network of whole numbers: a row's answer is the same to the last bit, whatever else is in its batch
    def __init__(self, rules: Rules, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.weights = generator.integers(-3, 4, (rules.size**2 * rules.planes, rules.moves + 1))
        self.table = np.exp(np.arange(-40, 41) / 8).astype(np.float32)
        self.values = np.tanh(np.arange(-40, 41) / 40).astype(np.float32)

    def __call__(self, planes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = np.clip(planes.reshape(-1, len(self.weights)).astype(np.int64) @ self.weights, -40, 40) + 40
        return self.table[found[:, :-1]], self.values[found[:, -1]]


def played(games: Games, batch: int, *networks: Evaluate) -> tuple[list[Game], int]:
    # All games in the order of their numbers, and the evaluations that they took
    planes, found, evaluations = np.zeros((batch, 5, 5, 17), np.uint8), [], 0
    while games.running:
        for player, network in enumerate(networks):
            rows = games.leaves(planes, player)
            found += games.answer(*network(planes[:rows]), player)
            evaluations += rows
    return sorted(found, key=lambda game: game.number), evaluations


def twelve(
    search: Search, at_once: int, batch: int, threads: int = 1, net_seed: int = 0, count: int = 12
) -> list[Game]:
    games = Games(RULES, [search], games=at_once, seed=5, threads=threads, count=count)
    return played(games, batch, Net(RULES, net_seed))[0]


def content(games: list[Game]) -> list[tuple[object, ...]]:
    return [(game.number, *(each.tobytes() for each in (game.moves, game.visits, game.values))) for game in games]


RULES = Rules(size=5, komi=0.5)
PLAIN = Search(readouts=24, parallel_leaves=1, move_limit=30)
VARIED = replace(PLAIN, parallel_leaves=4, cache_entries=5000, fastplay_frequency=0.3, fastplay_readouts=8,
                 disable_resign_pct=0.2, min_resign_threshold=-0.5, max_resign_threshold=-0.3)  # fmt: skip


@pytest.fixture(scope="module")
def one_by_one() -> list[Game]:
    # Games played alone, one leaf at a time
    return twelve(PLAIN, at_once=1, batch=1)


def in_groups(search: Search, at_once: int, batch: int, groups: int, threads: int = 1) -> list[Game]:
    games = Games(RULES, [search], games=at_once, seed=5, threads=threads, count=12, groups=groups)
    together = Groups(games, Net(RULES), [np.zeros((batch, 5, 5, 17), np.uint8) for _ in range(groups)])
    found: list[Game] = []
    while games.running:
        found += together.turn()
    together.close()
    return sorted(found, key=lambda game: game.number)


@pytest.mark.slow
def test_games_in_groups_are_those_of_one_group(one_by_one: list[Game]) -> None:
    for at_once, batch, groups, threads in ((12, 6, 2, 1), (5, 64, 2, 1), (12, 3, 3, 2)):
        found = in_groups(PLAIN, at_once, batch, groups, threads)
        assert content(found) == content(one_by_one), (at_once, batch, groups)
    assert content(in_groups(VARIED, 12, 48, 2)) == content(in_groups(VARIED, 12, 48, 2)), "with a cache, by one thread"
    with pytest.raises(Problem, match="games 1, threads 1"):
        Games(RULES, [PLAIN], games=1, seed=0, groups=2)


def test_a_group_is_searched_while_another_one_is_evaluated() -> None:
    # An evaluation that waits for the next group's leaves: it would never end if they were asked for after it.
    net, games, searched = Net(RULES), Games(RULES, [PLAIN], games=4, seed=5, groups=2), threading.Event()
    leaves = games.leaves

    def search(planes: np.ndarray, player: int = 0, group: int = 0) -> int:
        found = leaves(planes, player, group)
        if group == 1:
            searched.set()
        return found

    def evaluate(planes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert searched.wait(60)
        return net(planes)

    games.leaves = search  # type: ignore[method-assign]
    together = Groups(games, evaluate, [np.zeros((4, 5, 5, 17), np.uint8) for _ in range(2)])
    for _ in range(3):
        list(together.turn())
    together.close()


@pytest.mark.slow
def test_games_depend_on_their_network_and_not_on_their_batch(one_by_one: list[Game]) -> None:
    alone = content(one_by_one)
    assert [each[0] for each in alone] == list(range(12)) and len({each[1:] for each in alone}) == 12
    for at_once, batch, threads in ((12, 12, 1), (5, 64, 1), (12, 3, 1), (12, 12, 2)):
        assert content(twelve(PLAIN, at_once, batch, threads)) == alone, (at_once, batch, threads)
    assert content(twelve(PLAIN, 12, 12, net_seed=1)) != alone
    assert content(twelve(VARIED, 12, 48)) == content(twelve(VARIED, 12, 48)), "with a cache, by one thread"


def test_games_end_by_the_rules(one_by_one: list[Game]) -> None:
    for game in one_by_one:
        position = Position(RULES)
        for move, visits in zip(game.moves.tolist(), game.visits, strict=True):
            assert not visits[: RULES.size**2][~position.legal()[:-1]].any()
            position.play(move)
        assert (game.margin, game.outcome) == (position.score(), np.sign(position.score()))
        assert not game.resigned and not game.resignation_allowed


@pytest.mark.slow
def test_options_of_self_play_have_their_effect() -> None:
    resigning = twelve(replace(PLAIN, disable_resign_pct=0.5, min_resign_threshold=-0.2, max_resign_threshold=-0.1),
                       60, 256, count=60)  # fmt: skip
    assert 15 < sum(game.resignation_allowed for game in resigning) < 45
    resigned = [game for game in resigning if game.resigned]
    assert resigned and all(game.resignation_allowed and game.outcome != 0 for game in resigned)
    fast = twelve(replace(PLAIN, fastplay_frequency=0.75, fastplay_readouts=6), 12, 64)
    assert 0.1 < np.concatenate([game.visits.any(axis=1) for game in fast]).mean() < 0.45
    cached, plain = (
        played(Games(RULES, [replace(PLAIN, cache_entries=entries)], 12, 1, count=12), 64, Net(RULES))[1]
        for entries in (1 << 14, 0)
    )
    assert cached < 0.8 * plain


def test_batches_are_full_while_games_wait() -> None:
    net, games = Net(RULES), Games(RULES, [replace(PLAIN, parallel_leaves=2)], games=64, seed=5)
    planes, rows = np.zeros((64, 5, 5, 17), np.uint8), []
    for _ in range(60):
        rows.append(games.leaves(planes))
        games.answer(*net(planes[: rows[-1]]))
    assert min(rows) >= 63


def test_refused_searches_and_evaluations() -> None:
    for what, call in {
        "readouts -1": lambda: Search(readouts=-1),
        "size 7": lambda: Rules(size=7),
        "komi nan": lambda: Rules(komi=float("nan")),
        "games 0, threads 1": lambda: Games(RULES, [PLAIN], games=0, seed=0),
    }.items():
        with pytest.raises(Problem, match=what):
            call()
    games = Games(RULES, [replace(PLAIN, parallel_leaves=4)], games=2, seed=0)
    with pytest.raises(Problem, match="a batch of 3"):
        games.leaves(np.zeros((3, 5, 5, 17), np.uint8))
    rows = games.leaves(np.zeros((8, 5, 5, 17), np.uint8))
    with pytest.raises(Problem, match="0 policies and 0 values"):
        games.answer(np.zeros((0, 26)), np.zeros(0))
    assert games.leaves(np.zeros((8, 5, 5, 17), np.uint8)) <= 8
    with pytest.raises(Problem, match="not finite"):
        games.answer(np.full((8, 26), np.nan), np.zeros(rows))


# -- the reference's games --------------------------------------------------------------------------------


class Drawn:
    # A network whose answer is drawn for each position, so that no two moves tie
    def __init__(self, rules: Rules, seed: int) -> None:
        self.rules, self.seed = rules, seed

    def __call__(self, planes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        policies, values = np.zeros((len(planes), self.rules.moves), np.float32), np.zeros(len(planes), np.float32)
        for row, each in enumerate(planes):
            generator = np.random.default_rng([self.seed, zlib.crc32(each.tobytes())])
            policies[row] = generator.dirichlet(np.full(self.rules.moves, 0.3))
            values[row] = generator.uniform(-1, 1)
        return policies, values


SELF_PLAY = Search(readouts=30, parallel_leaves=4, fastplay_frequency=0.6, fastplay_readouts=7, random_symmetry=False,
                   noise_mix=0.3, dirichlet_alpha=0.4, soft_pick_cutoff=6, move_limit=24)  # fmt: skip
# Three games each: moves, the first six of them, checksum of all moves and visits, evaluations. Recorded from the rules
# of v0.7's reference in plain Python, written from SelfplayGame (cc/concurrent_selfplay.cc), MctsTree (cc/mcts_tree.cc)
# and Evaluator (cc/eval.cc) of NVIDIA's submission with the engine's random numbers
# (tests/benchmarks/minigo_original.py at commit f22ea4a). No choice in them is so close that rounding decides it: the
# two best scores are at least 2e-6 apart
REFERENCE = {
    SELF_PLAY: [
        (24, [5, 7, 22, 10, 6, 0], 1245316821, 576),
        (24, [13, 4, 24, 16, 11, 23], 3515321101, 426),
        (24, [6, 5, 2, 9, 3, 11], 2288461081, 348),
    ],
    replace(SELF_PLAY, fastplay_frequency=0.0, parallel_leaves=1): [
        (24, [6, 5, 21, 3, 16, 17], 603815732, 707),
        (11, [9, 5, 14, 24, 23, 0], 1794468173, 302),
        (23, [6, 7, 3, 2, 15, 14], 4283501312, 682),
    ],
    replace(SELF_PLAY, restrict_pass_alive_play_threshold=0, readouts=12): [
        (24, [6, 5, 21, 20, 12, 0], 3918895261, 339),
        (22, [6, 5, 21, 14, 9, 20], 2809901384, 247),
        (24, [6, 5, 2, 9, 3, 11], 1557912769, 266),
    ],
}


def summary(game: Game) -> tuple[int, list[int], int]:
    checksum = zlib.crc32(game.moves.astype(np.int16).tobytes() + game.visits.astype(np.uint16).tobytes())
    return len(game.moves), game.moves[:6].tolist(), checksum


@pytest.mark.parametrize("search", REFERENCE, ids=["self-play of v0.7", "always a reused tree", "no move into life"])
def test_self_play_is_that_of_the_reference(search: Search) -> None:
    found = []
    for number in range(3):
        games = Games(RULES, [search], games=1, seed=4, first=number, count=1)
        (game,), evaluations = played(games, 8, Drawn(RULES, 4))
        found.append((*summary(game), evaluations))
    assert found == REFERENCE[search]


def test_a_match_is_that_of_the_reference() -> None:
    # As in cc/eval.cc of v0.7: no noise, the most visited move, never one into unconditional life
    config = config_of("cpu", "v0.7", "eval_readouts=14", "eval_soft_moves=0", "move_limit=40", "komi=0.5")
    rules, search, found = rules_of(config), replace(match_search(config), random_symmetry=False), []
    # In the first of these a side would play into life where only passes forbid it.
    for seed, number in ((4, 0), (0, 1)):
        games = Games(rules, [search] * 2, games=1, seed=seed, first=number, count=1)
        found.append(summary(played(games, 8, Drawn(rules, seed), Drawn(rules, seed + 1))[0][0]))
    assert found == [(34, [20, 17, 4, 10, 2, 24], 1155777335), (25, [21, 7, 11, 25, 24, 25], 1286263370)]


# -- speed and build -------------------------------------------------------------------------------------


def test_the_bench_measures_the_search_and_openspiels() -> None:
    found = bench.measure_all(size=5, readouts=16, seconds=0.01, repeats=1, threads=2)
    spiel = bench.importlib.util.find_spec("pyspiel") is not None
    assert set(found) == {"engine", "engine_2_threads"} | {
        f"{over}open_spiel{cut}" for over in ("", "engine_over_") for cut in ("", "_cut") if spiel
    }
    assert min(found.values()) > 0


def test_missing_or_failing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(build.FOLDER, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Problem, match="no C\\+\\+ compiler") as caught:
        build.library()
    assert "apt-get install g++" in caught.value.hint
    monkeypatch.setenv("CXX", shutil.which("false", path="/bin:/usr/bin") or "")
    with pytest.raises(Problem, match="does not compile"):
        build.library()
    assert not list((tmp_path / "encore" / "engine").glob("minigo-*"))
    # What an image has built is taken.
    (tmp_path / build.file_name("plain")).write_bytes(b"")
    monkeypatch.setenv(build.FOLDER, str(tmp_path))
    assert build.library() == tmp_path / build.file_name("plain")
