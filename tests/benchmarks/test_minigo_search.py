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
from benchmarks.minigo.selfplay import Groups, match_turn
from tests.benchmarks.test_minigo import config_of

# -- search -----------------------------------------------------------------------------------------------


class Network:
    """Draws the answer to each position, so that no two moves tie; the batch does not matter."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.evaluations = seed, 0

    def __call__(self, planes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        policies, values = np.zeros((len(planes), RULES.moves), np.float32), np.zeros(len(planes), np.float32)
        for row, position in enumerate(planes):
            generator = np.random.default_rng([self.seed, zlib.crc32(position.tobytes())])
            policies[row] = generator.dirichlet(np.full(RULES.moves, 0.3))
            values[row] = generator.uniform(-1, 1)
        self.evaluations += len(planes)
        return policies, values


def planes_of(batch: int) -> np.ndarray:
    return np.zeros((batch, 5, 5, 17), np.uint8)


def played(games: Games, batch: int, *networks: Network, groups: int = 1) -> list[Game]:
    # All games, by number
    finished: list[Game] = []
    together = Groups(games, networks[0], [planes_of(batch) for _ in range(groups)])
    while games.running:
        finished += together.turn() if groups > 1 else match_turn(games, networks, planes_of(batch))
    together.close()
    return sorted(finished, key=lambda game: game.number)


def twelve(search: Search, at_once: int, batch: int, threads: int = 1, groups: int = 1, seed: int = 0) -> list[Game]:
    games = Games(RULES, [search], games=at_once, seed=5, threads=threads, count=12, groups=groups)
    return played(games, batch, Network(seed), groups=groups)


def content(games: list[Game]) -> list[tuple[object, ...]]:
    return [(game.number, *(values.tobytes() for values in (game.moves, game.visits, game.values))) for game in games]


RULES = Rules(size=5, komi=0.5)
PLAIN = Search(readouts=24, parallel_leaves=1, move_limit=30)
VARIED = replace(PLAIN, parallel_leaves=4, cache_entries=5000, fastplay_frequency=0.3, fastplay_readouts=8,
                 disable_resign_pct=0.2, min_resign_threshold=-0.5, max_resign_threshold=-0.3)  # fmt: skip


@pytest.fixture(scope="module")
def one_by_one() -> list[Game]:
    # Games played alone, one leaf at a time
    return twelve(PLAIN, at_once=1, batch=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at_once", "batch", "threads", "groups"),
    [(12, 12, 1, 1), (5, 64, 1, 1), (12, 3, 1, 1), (12, 12, 2, 1), (12, 6, 1, 2), (5, 64, 1, 2), (12, 3, 2, 3)],
)
def test_games_do_not_depend_on_batches_and_groups(
    at_once: int, batch: int, threads: int, groups: int, one_by_one: list[Game]
) -> None:
    assert content(twelve(PLAIN, at_once, batch, threads, groups)) == content(one_by_one)


@pytest.mark.slow
def test_games_depend_on_the_network(one_by_one: list[Game]) -> None:
    alone = content(one_by_one)
    assert [game[0] for game in alone] == list(range(12)) and len({game[1:] for game in alone}) == 12
    assert content(twelve(PLAIN, 12, 12, seed=1)) != alone
    for groups in (1, 2):
        first, second = (content(twelve(VARIED, 12, 48, groups=groups)) for _ in range(2))
        assert first == second, "with a cache, by one thread"


def test_a_group_is_searched_while_another_one_is_evaluated() -> None:
    # An evaluation that waits for the next group's leaves: it would never end if they were asked for after it.
    games, searched = Games(RULES, [PLAIN], games=4, seed=5, groups=2), threading.Event()
    leaves = games.leaves

    def search(planes: np.ndarray, player: int = 0, group: int = 0) -> int:
        found = leaves(planes, player, group)
        if group == 1:
            searched.set()
        return found

    def evaluate(planes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert searched.wait(60)
        return Network()(planes)

    games.leaves = search  # type: ignore[method-assign]
    together = Groups(games, evaluate, [planes_of(4) for _ in range(2)])
    for _ in range(3):
        list(together.turn())
    together.close()


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
    search = replace(PLAIN, disable_resign_pct=0.5, min_resign_threshold=-0.2, max_resign_threshold=-0.1)
    resigning = played(Games(RULES, [search], games=60, seed=5, count=60), 256, Network())
    assert 15 < sum(game.resignation_allowed for game in resigning) < 45
    resigned = [game for game in resigning if game.resigned]
    assert resigned and all(game.resignation_allowed and game.outcome != 0 for game in resigned)
    fast = twelve(replace(PLAIN, fastplay_frequency=0.75, fastplay_readouts=6), 12, 64)
    assert 0.1 < np.concatenate([game.visits.any(axis=1) for game in fast]).mean() < 0.45
    # The same game twice
    same, cached, plain = replace(PLAIN, noise_mix=0.0, soft_pick_cutoff=0, random_symmetry=False), Network(), Network()
    for entries, network in ((1 << 14, cached), (0, plain)):
        played(Games(RULES, [replace(same, cache_entries=entries)], games=1, seed=1, count=2), 64, network)
    assert 0 < 2 * cached.evaluations <= plain.evaluations


def test_batches_are_full_while_games_wait() -> None:
    games, planes, rows = Games(RULES, [replace(PLAIN, parallel_leaves=2)], games=64, seed=5), planes_of(64), []
    for _ in range(60):
        rows.append(games.leaves(planes))
        games.answer(*Network()(planes[: rows[-1]]))
    assert min(rows) >= 63


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Search(readouts=-1), "readouts -1"),
        (lambda: Rules(size=7), "size 7"),
        (lambda: Rules(komi=float("nan")), "komi nan"),
        (lambda: Games(RULES, [PLAIN], games=0, seed=0), "games 0, threads 1"),
        (lambda: Games(RULES, [PLAIN], games=1, seed=0, groups=2), "games 1, threads 1"),
    ],
)
def test_refused_searches(call: Callable[[], object], message: str) -> None:
    with pytest.raises(Problem, match=message):
        call()


def test_refused_evaluations() -> None:
    games = Games(RULES, [replace(PLAIN, parallel_leaves=4)], games=2, seed=0)
    with pytest.raises(Problem, match="a batch of 3"):
        games.leaves(planes_of(3))
    rows = games.leaves(planes_of(8))
    with pytest.raises(Problem, match="0 policies and 0 values"):
        games.answer(np.zeros((0, 26)), np.zeros(0))
    assert games.leaves(planes_of(8)) <= 8
    with pytest.raises(Problem, match="not finite"):
        games.answer(np.full((8, 26), np.nan), np.zeros(rows))


# -- the reference's games --------------------------------------------------------------------------------


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
    networks = [Network(4) for _ in range(3)]
    games = [
        played(Games(RULES, [search], games=1, seed=4, first=number, count=1), 8, network)[0]
        for number, network in enumerate(networks)
    ]
    found = [(*summary(game), network.evaluations) for game, network in zip(games, networks, strict=True)]
    assert found == REFERENCE[search]


def test_a_match_is_that_of_the_reference() -> None:
    # As in cc/eval.cc of v0.7: no noise, the most visited move, never one into unconditional life
    config = config_of("cpu", "v0.7", "eval_readouts=14", "eval_soft_moves=0", "move_limit=40", "komi=0.5")
    rules, search, found = rules_of(config), replace(match_search(config), random_symmetry=False), []
    # In the first of these a side would play into life where only passes forbid it.
    for seed, number in ((4, 0), (0, 1)):
        games = Games(rules, [search] * 2, games=1, seed=seed, first=number, count=1)
        found.append(summary(played(games, 8, Network(seed), Network(seed + 1))[0]))
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
