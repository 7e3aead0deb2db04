"""Minigo: records, schedule, positions, preparation of games, and a run that is killed in every phase."""

import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.minigo import examples, mlperf, models, schedule
from benchmarks.minigo.engine import Game
from benchmarks.minigo.examples import GoGames
from benchmarks.minigo.flops import training_flops
from benchmarks.minigo.records import GameFile, generation_folder, read_generation
from encore import data
from encore.errors import EncoreError
from tests.conftest import Encore, logged, only_run, records
from tests.preparing import write_files
from tests.trainings import Started, checked_config, settings, wait_until

config_of = partial(checked_config, "minigo", ranks=0, nodes=0)


# -- records ----------------------------------------------------------------------------------------------


def game(number: int, plies: int = 6) -> Game:
    # A game on 5 x 5 in which every second move was searched
    generator = np.random.RandomState(number)
    moves = generator.permutation(25)[:plies].astype(np.int16)
    visits = generator.randint(0, 9, (plies, 26)).astype(np.uint16)
    visits[1::2] = 0
    values = generator.uniform(-1, 1, plies).astype(np.float16).astype(np.float32)
    return Game(number, moves, visits, values, 1.0 if number % 2 else -1.0, 3.5, number % 3 == 0, True)


def write_games(folder: Path, numbers: range) -> Path:
    file = GameFile(folder / "worker_0000.games")
    file.add(map(game, numbers))
    file.close()
    return folder / "worker_0000.games"


def test_games_round_trip(tmp_path: Path) -> None:
    write_games(tmp_path, range(5))
    stored, expected = (
        [[np.asarray(value).tolist() for value in astuple(entry)] for entry in games]
        for games in (read_generation(tmp_path, 5), map(game, range(5)))
    )
    assert stored == expected


def test_killed_worker_loses_only_the_unfinished_game(tmp_path: Path) -> None:
    path = write_games(tmp_path, range(5))
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    file = GameFile(path)
    assert file.numbers == {0, 1, 2, 3}
    file.add([game(1), game(4), game(4)])
    file.close()
    assert path.read_bytes() == content
    shutil.copy(path, tmp_path / "worker_0001.games")
    with pytest.raises(Problem, match="game 0 occurs twice"):
        read_generation(tmp_path, 5)
    path.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    with pytest.raises(Problem, match=r"(?s)record at byte 0 differs from its checksum.*remove worker_0000\.games"):
        GameFile(path)


# -- schedule ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("players", [1, 3, 16])
def test_every_game_of_a_generation_has_one_player(players: int) -> None:
    config = config_of("dgxa100_n2", "v0.7")
    numbers = [number for part in range(players) for number in schedule.game_numbers(config, 7, part, players)]
    assert numbers == list(range(7_000_000, 7_008_192))


def test_rates_and_generations_are_the_submitted_ones() -> None:
    config, small = config_of("dgxa100", "v0.7"), SimpleNamespace(first_readouts=8, readouts=16)
    rates = [schedule.learning_rate(config, step) for step in (0, 128, 129, 10_000, 10_001, 20_000, 20_001)]
    assert rates == [0.016, 0.016, 0.16, 0.16, 0.016, 0.016, 0.0016]
    assert [schedule.window(config, generation) for generation in (1, 5, 7)] == [[1], [1, 2, 3, 4, 5], [3, 4, 5, 6, 7]]
    assert [schedule.readouts(small, generation) for generation in (1, 2)] == [8, 16]
    # NVIDIA's logs of v0.7 have epochs 18 to 71 for iterations = 70: the checkpoint is model 17.
    epochs = {"dgxa100": 54, "dgxa100_n2": 49, "dgxa100_n32": 64, "dgxa100_n224": 79, "dgx2_n32": 79}
    assert {system: config_of(system, "v0.7").epochs for system in epochs} == epochs
    assert [config_of(system, "v0.6").epochs for system in ("dgx1", "dgx1_n3")] == [50, 30]


@pytest.mark.parametrize(
    ("system", "round_name", "ranks", "training", "selfplay"),
    [
        ("dgx1", "v0.6", 8, range(8), range(8)),
        ("dgx1_n3", "v0.6", 24, range(8), range(8, 24)),
        ("dgx2", "v0.7", 16, range(4), range(4, 16)),
        ("dgxa100_n224", "v0.7", 1792, range(64), range(64, 1792)),
    ],
)
def test_roles_are_the_submitted_ones(
    system: str, round_name: str, ranks: int, training: range, selfplay: range
) -> None:
    assert schedule.Roles.of(config_of(system, round_name), ranks) == schedule.Roles(training, selfplay)


def test_host_shows_the_roles(encore: Encore) -> None:
    output = " ".join(encore("show", "minigo", "--system", "dgx1_n3", code=0).stdout.split())
    assert "8 x 1024 = global batch 8192" in output and "train: ranks 0 to 7; play: ranks 8 to 23" in output


# -- positions --------------------------------------------------------------------------------------------


@pytest.fixture
def three_generations(tmp_path: Path) -> tuple[Path, SimpleNamespace]:
    config = config_of("cpu", "v0.7", "window=2", "sample_share=0.5", "games=20")
    for generation in (1, 2, 3):
        write_games(generation_folder(tmp_path, generation), schedule.game_numbers(config, generation, 0, 1)[:20])
    return tmp_path, config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-3], "has 19 games"),
        (lambda content: content[:60] + bytes([content[60] ^ 1]) + content[61:], "differs from its checksum"),
    ],
    ids=["cut", "changed"],
)
def test_damaged_generation_is_rejected(
    change: Any, message: str, three_generations: tuple[Path, SimpleNamespace]
) -> None:
    folder, config = three_generations
    write_files(generation_folder(folder, 2), {"worker_0000.games": change})
    with pytest.raises(Problem, match=f"(?s){message}.*begin a new run"):
        examples.read_window(folder, config, 3)


def test_positions_are_drawn_once_and_divided(three_generations: tuple[Path, SimpleNamespace]) -> None:
    folder, config = three_generations
    games = examples.read_window(folder, config, 3)
    assert len(games) == 40, "of the last two generations"
    positions = examples.sample(games, config, 3, 12)
    assert len(positions) == len(set(map(tuple, positions))) == 60, "half of the searched positions"
    assert np.array_equal(positions, examples.sample(games, config, 3, 12))
    parts = [examples.rank_part(positions, part, 2, 6) for part in range(2)]
    assert sorted(map(tuple, np.concatenate(parts))) == sorted(map(tuple, positions))
    built = examples.build(games, positions, config)
    assert built.value.tolist() == [games[number].outcome * (1 - ply % 2 * 2) for number, ply in positions]
    policies = [examples.searched_policy(games[number].visits[ply], ply, config) for number, ply in positions]
    assert np.array_equal(built.policy, policies)
    assert (built.planes[..., :2].sum(axis=(1, 2, 3)) <= positions[:, 1]).all()


def test_policy_turns_with_its_position() -> None:
    generator = np.random.RandomState(0)
    boards = generator.randint(0, 2, (64, 5, 5, 17)).astype(np.uint8)
    policy = np.concatenate([boards[..., 0].reshape(64, 25), np.full((64, 1), 7)], 1).astype(np.float32)
    turned = examples.turned(examples.Examples(boards, policy, np.zeros(64, np.float32)), generator)
    first_planes = turned.planes[..., 0].reshape(64, 25)
    assert np.array_equal(turned.policy, np.concatenate([first_planes, np.full((64, 1), 7)], 1))
    assert {bool((turned.planes[row] == boards[row]).all()) for row in range(64)} == {True, False}


def test_model_flops_are_those_of_the_weights() -> None:
    # 2 x 81 points per weight of a convolution, 2 per weight of a dense layer, three times that for training; the
    # first layer, 9 * 17 * 16 weights, gets no gradient for the input
    config = SimpleNamespace(board_size=9, features="agz", conv_width=16, trunk_layers=3, fc_width=24)
    assert training_flops(config) == 7_626_456
    shapes = models.weight_shapes(models.Shape.of(config))
    assert len(shapes) == 47 and (shapes["stem.weight"], shapes["policy_dense.weight"]) == ((3, 3, 17, 16), (162, 82))


# -- data set ---------------------------------------------------------------------------------------------


@pytest.mark.training
def test_toy_data_set_has_games_and_an_untrained_target(toy: Callable[[str], Path]) -> None:
    games, (_, arrays) = GoGames(toy("minigo"), 5), models.load(toy("minigo") / "target.npz", 5)
    held_out = sum(len(games[number].moves) for number in range(380, 400))
    assert (len(games), games.held_out, len(games.positions(held_out=True))) == (400, 20, held_out)
    assert not arrays["policy_dense.weight"].any()
    with pytest.raises(Problem, match="games on 5 x 5"):
        GoGames(toy("minigo"), 9)


GAME = "(;GM[1]FF[4]SZ[9]KM[7.5]RE[B+R];B[ee];W[cc];B[gg])"


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("missing.npz", "missing.npz cannot be read as a model"),
        ("games/a.sgf", "a.sgf cannot be read as a model"),
        ("five.npz", "five.npz is a model for 5 x 5"),
    ],
)
def test_file_that_is_not_a_target_model_is_rejected(
    tmp_path: Path, tensorflow_python: Path, target: str, message: str
) -> None:
    sources = write_files(tmp_path / "games", {"a.sgf": GAME, "b.sgf": GAME})
    shape = models.Shape(board_size=5, features="agz", conv_width=2, trunk_layers=1, fc_width=2)
    models.save(tmp_path / "five.npz", shape, models.initial_weights(shape, 0))
    options = ("--board-size", "9", "--target", str(tmp_path / target))
    with pytest.raises(EncoreError, match=re.escape(message)) as caught:
        data.prepare("minigo", tmp_path / "to", data.Preparation(source=sources, options=options), tensorflow_python)
    assert caught.value.hint and (caught.value.exit_code, (tmp_path / "to").exists()) == (2, False)


@pytest.mark.long
def test_games_with_flaws_are_reported_and_left_out(tmp_path: Path, tensorflow_python: Path) -> None:
    games = [GAME.replace("gg", f"g{letter}") for letter in "abcdefghi"]
    flaws = {
        "illegal": (GAME.replace("W[cc]", "W[ee]"), "move 2, white E5: there is a stone"),
        "cut": (GAME[:-1], "the file ends within a game"),
        "none": (GAME.replace("RE[B+R]", ""), "no result"),
        "void": (GAME.replace("RE[B+R]", "RE[Void]"), "no result, RE[Void]"),
    }
    # The first game occurs twenty times. A draw is correct, but without a winner to learn from
    files = {f"{number}.sgf": text for number, text in enumerate([*games, *[games[0]] * 19])}
    files |= {f"{name}.sgf": text for name, (text, _) in flaws.items()}
    sources = write_files(tmp_path / "games", {**files, "drawn.sgf": GAME.replace("RE[B+R]", "RE[Draw]")})
    notes: list[str] = []

    def prepare(*options: str) -> data.DataPassport:
        preparation = data.Preparation(source=sources, options=("--board-size", "9", "--held-out", "0.5", *options))
        return data.prepare(
            "minigo", tmp_path / "to", preparation, tensorflow_python, lambda update: notes.append(update.note)
        )

    with pytest.raises(EncoreError, match=r"^4 games with flaws\n(?s:.*)--skip-corrupt") as caught:
        prepare()
    reasons = [f"games/{name}.sgf: {reason}" for name, (_, reason) in flaws.items()]
    assert [reason for reason in reasons if reason not in caught.value.found] == [] and not (tmp_path / "to").exists()
    counts, output = prepare("--skip-corrupt").counts, "\n".join(notes)
    assert "skipped 4 games with flaws" in output and "left out: 1 games, drawn" in output
    assert "starting over" not in output
    stored = GoGames(tmp_path / "to", 9)
    moves = [stored[number].moves.tobytes() for number in range(len(stored))]
    assert counts["test"] == 14 and not {*moves[:-14]} & {*moves[-14:]}


# -- a killed run -----------------------------------------------------------------------------------------

# Rank 0 trains, rank 1 plays. The evaluation is long enough for the signal that stops the run during the second one.
SMALL = {"epochs": "2", "games": "40", "concurrent_games": "8", "readouts": "16", "first_readouts": "8",
         "eval_games": "12", "eval_first_model": "false", "eval_readouts": "120", "quality_target": "1.0",
         "train_ranks": "1", "selfplay_ranks": "1", "batch_size": "128"}  # fmt: skip


def stop_when(started: Started, pattern: str, rank: int | None) -> Path:
    """Kill a rank, or stop the run by SIGTERM without one, once a file of the experiment has content; return it."""

    def has_content() -> bool:
        assert started.process.poll() is None, started.process.communicate()[0]
        return any(path.stat().st_size for path in started.results.glob(f"**/[!.]*/experiment_0/{pattern}"))

    wait_until(has_content, pattern)
    experiment = only_run(started.results) / "experiment_0"
    if rank is None:
        started.process.send_signal(signal.SIGTERM)
    else:
        started.ranks(experiment)[rank].kill()
    code, output = started.end()
    assert code != 3, f"came to its end before it was stopped\n{output}"
    return experiment


@pytest.mark.long
@pytest.mark.training
def test_killed_and_resumed_run_is_complete(toy: Callable[[str], Path], tmp_path: Path) -> None:
    games = [generation_folder(Path(), generation) for generation in (1, 2)]
    started = Started.run(toy("minigo"), tmp_path, *settings(SMALL), name="minigo")
    experiment = stop_when(started, f"{games[0]}/*.games", rank=1)
    stop_when(Started.again(experiment.parent), f"{games[1]}", rank=0)
    stop_when(Started.again(experiment.parent), "evaluations.jsonl", rank=None)
    with (experiment / "evaluations.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"generation": 2, "win_')  # A line that was not finished
    Started.again(experiment.parent).ended(3)
    numbers = [[stored.number for stored in read_generation(experiment / folder, 5)] for folder in games]
    assert numbers == [[generation * 1_000_000 + number for number in range(40)] for generation in (1, 2)]
    keys = [(event["key"], event["metadata"].get("epoch_num")) for event in logged(experiment / "result.txt")]
    phases, evaluation = ("epoch_start", mlperf.GAMES, "epoch_stop"), ("eval_start", "eval_accuracy")
    assert [key for key in keys if key[0] in (*phases, *evaluation)] == [
        (key, generation) for kinds in (phases, evaluation) for generation in (1, 2) for key in kinds
    ]
    assert [key for key, _ in keys[-2:]] == ["eval_result", "run_stop"]
    assert records(experiment / "metrics.jsonl", "end")[-1]["outcome"] == "not_reached"
