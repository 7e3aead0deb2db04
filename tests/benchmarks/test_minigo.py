"""Minigo: records, window, roles, a run that is killed in its games, its training and its evaluation, and bad input."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.minigo import events, examples, models, schedule
from benchmarks.minigo.engine import Game
from benchmarks.minigo.examples import GoGames
from benchmarks.minigo.flops import training_flops
from benchmarks.minigo.records import GameFile, generation_folder, read_generation
from encore import catalogue, configuration, data
from encore.errors import EncoreError
from encore.results.compliance.compliance import check
from encore.results.report.shown import game_of, generations_table, last_moves
from tests.conftest import Encore, logged, only_run, records
from tests.trainings import Started, exported, settings, wait_until

SMALL = {"epochs": "2", "games": "40", "concurrent_games": "8", "readouts": "16", "first_readouts": "8",
         "eval_games": "12", "eval_first_model": "false", "quality_target": "1.0"}  # fmt: skip
ROLES = {"train_ranks": "1", "selfplay_ranks": "1", "batch_size": "128"}


def config_of(system: str, round_: str, *changes: str) -> SimpleNamespace:
    choice = catalogue.choose("minigo")
    found = catalogue.find_system(choice, system, round_)
    resolved = configuration.resolve(choice, found, found.nodes, found.gpus_per_node, list(changes))
    return SimpleNamespace(
        **resolved.plain(), rates=configuration.config_class(choice.folder)(**resolved.plain()).rates
    )


# -- records and schedule ------------------------------------------------------------------------------


def game(number: int, plies: int = 6) -> Game:
    # A game on 5 x 5 in which every second move was searched
    generator = np.random.RandomState(number)
    moves = generator.permutation(25)[:plies].astype(np.int16)
    visits = generator.randint(0, 9, (plies, 26)).astype(np.uint16)
    visits[1::2] = 0
    values = generator.uniform(-1, 1, plies).astype(np.float16).astype(np.float32)
    return Game(number, moves, visits, values, 1.0 if number % 2 else -1.0, 3.5, number % 3 == 0, True)


def write_games(folder: Path, numbers: range) -> Path:
    path = folder / "worker_0000.games"
    file = GameFile(path)
    file.add(map(game, numbers))
    file.close()
    return path


def test_games_come_back_and_a_killed_worker_loses_the_game_under_way(tmp_path: Path) -> None:
    path = write_games(tmp_path, range(5))
    for number, read in enumerate(read_generation(tmp_path, 5)):
        written = game(number)
        for name in ("moves", "visits", "values"):
            assert np.array_equal(getattr(written, name), getattr(read, name)), name
        assert replace(read, moves=0, visits=0, values=0) == replace(written, moves=0, visits=0, values=0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    file = GameFile(path)
    assert file.numbers == {0, 1, 2, 3}
    file.add([game(1), game(4), game(4)])
    file.close()
    assert path.read_bytes() == whole
    (tmp_path / "worker_0001.games").write_bytes(whole)
    with pytest.raises(Problem, match="game 0 is there twice"):
        read_generation(tmp_path, 5)
    path.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    with pytest.raises(Problem, match="record at byte 0 differs from its checksum") as found:
        GameFile(path)
    assert "remove worker_0000.games" in found.value.hint


def test_every_game_of_a_generation_has_one_player_whatever_their_number() -> None:
    config = config_of("dgxa100_n2", "v0.7")
    for players in (1, 3, 16):
        shares = [schedule.game_numbers(config, 7, part, players) for part in range(players)]
        assert [number for each in shares for number in each] == list(range(7_000_000, 7_008_192))
    assert [schedule.window(config, generation) for generation in (1, 5, 7)] == [[1], [1, 2, 3, 4, 5], [3, 4, 5, 6, 7]]
    first = SimpleNamespace(first_readouts=8, readouts=16)
    assert [schedule.readouts(first, generation) for generation in (1, 2)] == [8, 16]


def test_rates_generations_and_roles_are_those_of_the_submissions() -> None:
    config = config_of("dgxa100", "v0.7")
    steps = (0, 128, 129, 10_000, 10_001, 20_000, 20_001)
    rates = [schedule.learning_rate(config, step) for step in steps]
    assert rates == [0.016, 0.016, 0.16, 0.16, 0.016, 0.016, 0.0016]
    # NVIDIA's logs of v0.7 have epochs 18 to 71 where iterations is 70: the checkpoint is of model 17.
    systems = {"dgxa100": 54, "dgxa100_n2": 49, "dgxa100_n32": 64, "dgxa100_n224": 79, "dgx2_n32": 79}
    assert {system: config_of(system, "v0.7").epochs for system in systems} == systems
    assert [config_of(system, "v0.6").epochs for system in ("dgx1", "dgx1_n3")] == [50, 30]
    for system, round_, ranks, training, selfplay in (
        ("dgx1", "v0.6", 8, range(8), range(8)),
        ("dgx1_n3", "v0.6", 24, range(8), range(8, 24)),
        ("dgx2", "v0.7", 16, range(4), range(4, 16)),
        ("dgxa100_n224", "v0.7", 1792, range(64), range(64, 1792)),
    ):
        assert schedule.Roles.of(config_of(system, round_), ranks) == schedule.Roles(training, selfplay)


def test_the_host_knows_the_roles(encore: Encore) -> None:
    found = encore("show", "minigo", "--system", "dgx1_n3")
    assert "8 x 1024 = global batch 8192" in found.stdout, found.stdout + found.stderr
    assert "train: ranks 0 to 7; play: ranks 8 to 23" in " ".join(found.stdout.split())


def test_positions_are_drawn_once_and_shared_out(tmp_path: Path) -> None:
    config = config_of("cpu", "v0.7", "window=2", "sample_share=0.5", "games=20")
    for generation in (1, 2, 3):
        write_games(generation_folder(tmp_path, generation), schedule.game_numbers(config, generation, 0, 1)[:20])
    path = next(generation_folder(tmp_path, 2).glob("*.games"))
    whole = path.read_bytes()
    for content, words in (
        (whole[:-3], "has 19 games"),
        (whole[:60] + bytes([whole[60] ^ 1]) + whole[61:], "differs from its checksum"),
    ):
        path.write_bytes(content)
        with pytest.raises(Problem, match=words) as caught:
            examples.read_window(tmp_path, config, 3)
        assert "begin a new run" in caught.value.hint
    path.write_bytes(whole)
    games = examples.read_window(tmp_path, config, 3)
    assert len(games) == 40, "of the last two generations"
    places = examples.sample(games, config, 3, 12)
    assert len(places) == 60, "half of the searched positions"
    assert len({tuple(place) for place in places}) == 60
    assert np.array_equal(places, examples.sample(games, config, 3, 12))
    parts = [examples.own_part(places, part, 2, 6) for part in range(2)]
    assert sorted(map(tuple, np.concatenate(parts))) == sorted(map(tuple, places))
    found = examples.build(games, places, config)
    assert found.value.tolist() == [games[number].outcome * (1 - ply % 2 * 2) for number, ply in places]
    for row, (number, ply) in enumerate(places):
        assert np.array_equal(found.policy[row], examples.searched_policy(games[number].visits[ply], ply, config))
        assert found.planes[row, :, :, :2].sum() <= ply


def test_a_turned_position_has_its_policy_turned_as_well() -> None:
    generator = np.random.RandomState(0)
    boards = generator.randint(0, 2, (64, 5, 5, 17)).astype(np.uint8)
    policy = np.concatenate([boards[..., 0].reshape(64, 25), np.full((64, 1), 7)], 1).astype(np.float32)
    found = examples.turned(examples.Examples(boards, policy, np.zeros(64, np.float32)), generator)
    assert np.array_equal(found.policy[:, :25], found.planes[..., 0].reshape(64, 25))
    assert (found.policy[:, 25] == 7).all()
    kinds = {(found.planes[n] == boards[n]).all() for n in range(64)}
    assert kinds == {True, False}


# -- the data set and the run ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy_data_set(tensorflow_python: Path, toy: Callable[[str], Path]) -> Path:
    return toy("minigo")


def test_the_small_set_has_games_and_a_target_that_knows_nothing(toy_data_set: Path) -> None:
    games = GoGames(toy_data_set, 5)
    assert (len(games), games.held_out) == (400, 20)
    assert len(games.places(held_out=True)) == sum(len(games[number].moves) for number in range(380, 400))
    _, arrays = models.load(toy_data_set / "target.npz", 5)
    assert not arrays["policy_dense.weight"].any()
    with pytest.raises(Problem, match="games on 5 x 5"):
        GoGames(toy_data_set, 9)


GAME = "(;GM[1]FF[4]SZ[9]KM[7.5]RE[B+R];B[ee];W[cc];B[gg])"


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("none.npz", "none.npz cannot be read as a model"),
        ("games/a.sgf", "a.sgf cannot be read as a model"),
        ("five.npz", "five.npz is a model for 5 x 5"),
    ],
)
def test_preparation_refuses_a_target_that_is_none(
    tmp_path: Path, tensorflow_python: Path, target: str, found: str
) -> None:
    (tmp_path / "games").mkdir()
    for name in ("a.sgf", "b.sgf"):
        (tmp_path / "games" / name).write_text(GAME, encoding="utf-8")
    shape = models.Shape(board_size=5, features="agz", conv_width=2, trunk_layers=1, fc_width=2)
    models.save(tmp_path / "five.npz", shape, models.initial_weights(shape, 0))
    options = ("--board-size", "9", "--target", str(tmp_path / target))
    wanted = data.Preparation(source=tmp_path / "games", options=options)
    with pytest.raises(EncoreError) as caught:
        data.prepare("minigo", tmp_path / "to", wanted, tensorflow_python)
    assert found in str(caught.value) and caught.value.hint and caught.value.exit_code == 2
    assert not (tmp_path / "to").exists()


def test_games_with_flaws_are_all_named_and_left_out(tmp_path: Path, tensorflow_python: Path) -> None:
    (tmp_path / "games").mkdir()
    games = [GAME.replace("gg", f"g{letter}") for letter in "abcdefghi"]
    flaws = {
        "illegal": (GAME.replace("W[cc]", "W[ee]"), "move 2, white E5: there is a stone"),
        "cut": (GAME[:-1], "the file ends before its game does"),
        "none": (GAME.replace("RE[B+R]", ""), "no result"),
        "void": (GAME.replace("RE[B+R]", "RE[Void]"), "no result, RE[Void]"),
    }
    # A drawn game is no flaw, it has no winner to learn from; the first game is there twenty times.
    texts = [*games, *[games[0]] * 19, *[text for text, _ in flaws.values()], GAME.replace("RE[B+R]", "RE[Draw]")]
    names = [*map(str, range(28)), *flaws, "drawn"]
    for name, text in zip(names, texts, strict=True):
        (tmp_path / "games" / f"{name}.sgf").write_text(text)
    notes: list[str] = []

    def prepare(*options: str) -> data.DataPassport:
        wanted = data.Preparation(
            source=tmp_path / "games", options=("--board-size", "9", "--held-out", "0.5", *options)
        )
        return data.prepare("minigo", tmp_path / "to", wanted, tensorflow_python, lambda news: notes.append(news.note))

    with pytest.raises(EncoreError) as caught:
        prepare()
    assert caught.value.found.startswith("4 games with flaws\n")
    for name, (_, why) in flaws.items():
        assert f"games/{name}.sgf: {why}" in caught.value.found
    assert "--skip-corrupt" in caught.value.hint and not (tmp_path / "to").exists()
    counts = prepare("--skip-corrupt").counts
    said = "\n".join(notes)
    assert "skipped 4 games with flaws" in said and "left out: 1 games, drawn" in said and "starting over" not in said
    found = GoGames(tmp_path / "to", 9)
    moves = [found[number].moves.tobytes() for number in range(len(found))]
    assert counts["test"] == 14 and not {*moves[:-14]} & {*moves[-14:]}


def killed_when(started: Started, holds: Callable[[Path], bool], what: str, rank: int | None) -> Path:
    # Kill a rank, or stop the whole run by SIGTERM, once something holds; returns the experiment's folder
    def there() -> bool:
        assert started.process.poll() is None, started.process.communicate()[0]
        found = list(started.results.glob("**/[!.]*/experiment_0"))
        return bool(found) and holds(found[0])

    wait_until(there, what)
    folder = only_run(started.results) / "experiment_0"
    if rank is None:
        started.process.send_signal(signal.SIGTERM)
    else:
        started.ranks(folder)[rank].kill()
    code, output = started.end()
    assert code != 3, f"came to its end before it was stopped\n{output}"
    return folder


@pytest.fixture(scope="module")
def broken(toy_data_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A run on two ranks, one of which trains and one plays, killed in each phase and resumed to its end
    results = tmp_path_factory.mktemp("broken")
    # Long enough for the signal that stops the run in the second of its two evaluations.
    changes = settings({**SMALL, **ROLES, "eval_readouts": "120"})
    started = Started.run(toy_data_set, results, *changes, name="minigo")

    def some_games(folder: Path) -> bool:
        return any(path.stat().st_size for path in generation_folder(folder, 1).glob("*.games"))

    killed_when(started, some_games, "games of generation 1", rank=1)
    run = only_run(results)
    killed_when(Started.again(run), lambda folder: generation_folder(folder, 2).exists(), "generation 2", rank=0)
    killed_when(Started.again(run), lambda folder: (folder / "evaluations.jsonl").exists(), "an evaluation", rank=None)
    with (run / "experiment_0" / "evaluations.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"generation": 2, "win_')  # as a run that is killed there leaves it
    code, output = Started.again(run).end()
    assert code == 3, output
    return run / "experiment_0"


def test_a_run_that_was_killed_is_one_that_was_not(broken: Path) -> None:
    for generation in (1, 2):
        numbers = [each.number for each in read_generation(generation_folder(broken, generation), 5)]
        assert numbers == [generation * 1_000_000 + number for number in range(40)]
    assert [path.name for path in sorted((broken / "models").iterdir())] == ["000001.npz", "000002.npz"]
    lines = [json.loads(line) for line in (broken / "evaluations.jsonl").read_text().splitlines()]
    assert [line["generation"] for line in lines] == [1, 2]
    keys = [(event["key"], event["metadata"].get("epoch_num")) for event in logged(broken / "result.txt")]
    phases, evaluation = ("epoch_start", events.GAMES, "epoch_stop"), ("eval_start", "eval_accuracy")
    assert [key for key in keys if key[0] in (*phases, *evaluation)] == [
        (key, generation) for kinds in (phases, evaluation) for generation in (1, 2) for key in kinds
    ]
    assert [key for key, _ in keys[-2:]] == ["eval_result", "run_stop"]
    assert records(broken / "metrics.jsonl", "end")[-1]["outcome"] == "not_reached"
    # What the checker finds is of the run's size.
    found = [finding.rule for finding in check(broken / "result.txt", "0.7.0").findings if finding.severity == "error"]
    sizes = ("selfplay_games_per_generation", "eval_accuracy", "target", "cache", "run_stop", "quality")
    assert [rule for rule in found if not any(size in rule for size in sizes)] == []


def test_the_report_finds_generations_and_a_game(broken: Path) -> None:
    table, game = generations_table(broken.parent), game_of(broken.parent)
    assert table is not None
    assert [(row[0], row[1]) for row in table.rows] == [(1, 40), (2, 40)]
    assert all(row[-1] is not None for row in table.rows), "the match against the target"
    assert game is not None
    assert (game.generation, game.game) == (2, 2_000_000)
    black, white = (sum(stone == colour for stone in game.stones) for colour in (1, 2))
    assert 0 < black + white <= len(game.moves)
    assert set(last_moves(game)) == {point for point, stone in enumerate(game.stones) if stone}


def test_exported_model_wins_the_games_that_the_run_evaluated(encore: Encore, broken: Path, tmp_path: Path) -> None:
    content = exported(encore, broken.parent, tmp_path / "exported", "saved-model", "--below-target")
    assert content["step"] == content["preprocessing"]["generation"] == 2 and not content["reached"]
    stored = np.load(tmp_path / "exported" / "example.npz")
    assert stored["planes"].shape[1:] == (5, 5, 17)
    assert stored["policy"].sum(axis=1) == pytest.approx(1)


def test_model_flops_are_those_of_the_weights() -> None:
    # Two for each weight and point of a convolution; the first layer has no gradient by its input
    config = SimpleNamespace(board_size=9, features="agz", conv_width=16, trunk_layers=3, fc_width=24)
    shapes = models.weight_shapes(models.Shape.of(config))
    forward = [2 * np.prod(shape) * (81 if len(shape) == 4 else 1) for shape in shapes.values() if len(shape) > 1]
    assert training_flops(config) == 3 * sum(forward) - forward[0]
