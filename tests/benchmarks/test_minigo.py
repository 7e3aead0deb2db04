"""Minigo: records, window, roles, the network against its equations, a run that is killed at each phase, bad input."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.minigo import events, examples, models, schedule
from benchmarks.minigo.data_set import GoGames
from benchmarks.minigo.engine import Game
from benchmarks.minigo.records import GameFile, generation_folder, read_generation
from encore import catalogue, configuration, data
from encore.errors import EncoreError
from encore.results.compliance.compliance import check
from encore.results.report.generations import game_of, generations_table, last_moves
from tests.conftest import Encore, logged, only_run, records
from tests.trainings import InFramework, Started, exported, result, settings, wait_until, write_small_config

SMALL = {"epochs": "2", "games": "40", "concurrent_games": "8", "readouts": "16", "first_readouts": "8"}
EVALUATION = {"eval_games": "12", "eval_readouts": "8", "eval_first_model": "false", "quality_target": "1.0"}
TINY_NETWORK = {"conv_width": "4", "trunk_layers": "1", "fc_width": "4", "batch_size": "64", "gating_win_rate": "0.01",
                "gating_games": "4", "warm_up_steps": "0"}  # fmt: skip
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
    """A game on 5 x 5 in which every second move was searched."""
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


def test_games_come_back_as_they_were_written(tmp_path: Path) -> None:
    write_games(tmp_path, range(5))
    found = read_generation(tmp_path, 5)
    for written, read in zip(map(game, range(5)), found, strict=True):
        for name in ("moves", "visits", "values"):
            assert np.array_equal(getattr(written, name), getattr(read, name)), name
        assert replace(read, moves=0, visits=0, values=0) == replace(written, moves=0, visits=0, values=0)


def test_a_killed_worker_loses_the_game_under_way_and_no_game_is_there_twice(tmp_path: Path) -> None:
    path = write_games(tmp_path, range(3))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    file = GameFile(path)
    assert file.numbers == {0, 1}
    file.add([game(1), game(2), game(2)])
    file.close()
    assert path.read_bytes() == whole
    (tmp_path / "worker_0001.games").write_bytes(whole)
    with pytest.raises(Problem, match="game 0 is there twice"):
        read_generation(tmp_path, 5)


def test_a_damaged_record_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = write_games(tmp_path, range(3))
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(Problem, match="record at byte 0 differs from its checksum") as found:
        GameFile(path)
    assert "remove worker_0000.games" in found.value.remedy


def test_every_game_of_a_generation_has_one_player_whatever_their_number() -> None:
    config = config_of("dgxa100_n2", "v0.7")
    for players in (1, 3, 16):
        shares = [schedule.game_numbers(config, 7, part, players) for part in range(players)]
        assert [number for each in shares for number in each] == list(range(7_000_000, 7_008_192))


def test_learning_rate_is_the_submitted_one() -> None:
    config = config_of("dgxa100", "v0.7")
    steps = (0, 128, 129, 10_000, 10_001, 20_000, 20_001)
    assert [schedule.learning_rate(config, step) for step in steps] == [
        0.016, 0.016, 0.16, 0.16, 0.016, 0.016, 0.0016,
    ]  # fmt: skip


def test_models_are_counted_from_the_checkpoint_on() -> None:
    """NVIDIA's logs of v0.7 have epochs 18 to 71 where iterations is 70: the checkpoint is of model 17."""
    systems = {"dgxa100": 54, "dgxa100_n2": 49, "dgxa100_n32": 64, "dgxa100_n224": 79, "dgx2_n32": 79}
    assert {system: config_of(system, "v0.7").epochs for system in systems} == systems
    assert [config_of(system, "v0.6").epochs for system in ("dgx1", "dgx1_n3")] == [50, 30]


def test_roles_are_those_of_the_submission() -> None:
    found = {
        system: schedule.Roles.of(config_of(system, round_), ranks)
        for system, round_, ranks in (
            ("dgx1", "v0.6", 8), ("dgx1_n3", "v0.6", 24), ("dgx2", "v0.7", 16), ("dgxa100_n224", "v0.7", 1792),
        )
    }  # fmt: skip
    assert found["dgx1"] == schedule.Roles(range(8), range(8))
    assert found["dgx1_n3"] == schedule.Roles(range(8), range(8, 24))
    assert found["dgx2"] == schedule.Roles(range(4), range(4, 16))
    assert found["dgxa100_n224"] == schedule.Roles(range(64), range(64, 1792))


def test_the_host_knows_the_roles(encore: Encore) -> None:
    found = encore("show", "minigo", "--system", "dgx1_n3")
    assert "8 x 1024 = global batch 8192" in found.stdout, found.stdout + found.stderr
    assert "train: ranks 0 to 7; play: ranks 8 to 23" in " ".join(found.stdout.split())


def test_positions_are_drawn_once_and_shared_out(tmp_path: Path) -> None:
    config = config_of("cpu", "v0.7", "window=2", "sample_share=0.5", "games=20")
    for generation in (1, 2, 3):
        write_games(generation_folder(tmp_path, generation), schedule.game_numbers(config, generation, 0, 1)[:20])
    games = examples.read_window(tmp_path, config, 3)
    assert len(games) == 40, "of the last two generations"
    places = examples.sample(games, config, 3, 12)
    assert len(places) == 60, "half of the searched positions"
    assert len({tuple(place) for place in places}) == 60
    assert np.array_equal(places, examples.sample(games, config, 3, 12))
    parts = [examples.own_part(places, part, 2, 6) for part in range(2)]
    assert sorted(map(tuple, np.concatenate(parts))) == sorted(map(tuple, places))
    found = examples.build(games, places, config)
    number, ply = places[0]
    assert found.policy.sum(axis=1) == pytest.approx(1)
    assert found.planes[0, :, :, :2].sum() <= ply
    assert found.value[0] == games[number].outcome * (1 if ply % 2 == 0 else -1)


def test_a_turned_position_has_its_policy_turned_as_well() -> None:
    generator = np.random.RandomState(0)
    boards = generator.randint(0, 2, (64, 5, 5, 17)).astype(np.uint8)
    policy = np.concatenate([boards[..., 0].reshape(64, 25), np.full((64, 1), 7)], 1).astype(np.float32)
    found = examples.turned(examples.Examples(boards, policy, np.zeros(64, np.float32)), generator)
    assert np.array_equal(found.policy[:, :25], found.planes[..., 0].reshape(64, 25))
    assert (found.policy[:, 25] == 7).all()
    kinds = {(found.planes[n] == boards[n]).all() for n in range(64)}
    assert kinds == {True, False}


# -- the network and its step ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network(in_tensorflow: InFramework, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/in_framework/minigo_network.py found."""
    folder = tmp_path_factory.mktemp("network")
    choice = catalogue.choose("minigo")
    system = catalogue.find_system(choice, "cpu", None)
    config = configuration.resolve(choice, system, 1, 1, ["trunk_layers=2", "batch_size=64"]).plain()
    (folder / "config.json").write_text(json.dumps({**config, "seed": 3}), encoding="utf-8")
    found: dict[str, Any] = result(in_tensorflow("minigo_network.py", str(folder / "config.json"), str(folder)))
    return found


def test_network_and_losses_are_the_equations(network: dict[str, Any]) -> None:
    assert max(network["inference"]) < 1e-5
    assert max(network["losses"]) < 1e-3
    assert max(network["first update"].values()) < 2e-3, "momentum's first step is the gradient"
    assert network["model file"] < 1e-6
    assert network["precisions"]["bf16"] == pytest.approx(network["precisions"]["fp32"], rel=0.05)


def test_models_that_cannot_be_used_are_named(network: dict[str, Any]) -> None:
    assert "model for 9 x 9" in network["nine"]
    assert "one for 5 x 5" in network["nine"]
    assert "cannot be read as a model" in network["broken"]
    assert "cannot be read as a model" in network["missing"]
    assert "do this" in network["missing"]


def test_frozen_graphs_of_both_rounds_play(network: dict[str, Any]) -> None:
    assert set(network["frozen"]) == {"target.pb", "target.minigo.tf"}
    for found in network["frozen"].values():
        assert max(found) < 1e-5
    wanted = (
        "bytes; version 1 is known",
        "neither a NumPy archive nor a graph",
        "no policy_output and no value_output",
        "for 5 x 5",
        "sees the planes of agz",
        "No such file",
    )
    for text, words in zip(network["frozen refused"], wanted, strict=True):
        assert words in text and "do this" in text


def test_a_run_begins_where_the_submissions_checkpoint_is(network: dict[str, Any]) -> None:
    """Step, momenta, the order of the heads' weights and whose outcome the value is; and from a model file."""
    assert {features: found["steps"] for features, found in network["start"].items()} == {"mlperf07": 5672, "agz": 9383}
    for found in network["start"].values():
        assert found["rate"] == 0.005, "behind the boundary of 4,000 steps"
        assert max(found["differences"]) < 1e-4
        steps, *differences = found["again"]
        assert (steps, differences) == (found["steps"], [0, 0])
    for text, words in zip(network["start refused"], ("has shape", "model.ckpt-1", "sees the planes"), strict=True):
        assert words in text and "do this" in text


def test_ranks_of_different_roles_train_and_evaluate_together(in_tensorflow: InFramework, tmp_path: Path) -> None:
    """Three real ranks: the gradients of two are averaged while all three vote, share the weights and play matches."""
    changes = [f"{key}={value}" for key, value in {**SMALL, **EVALUATION, **TINY_NETWORK}.items()]
    config = write_small_config(tmp_path / "config.json", "minigo", 1, changes)
    found = result(in_tensorflow("minigo_roles.py", str(config), str(tmp_path), ranks=3))
    trains, plays, wrong, largest, *wins = zip(*found["ranks"], strict=True)
    assert (trains, plays, wrong) == ((1, 1, 0), (0, 1, 1), (0, 0, 0))
    assert len(set(largest)) == 1 and largest[0] < 9, "the weights of rank 0, not of the rank that does not train"
    assert all(len(set(each)) == 1 for each in wins), "every rank has the same result of a match"
    assert found["graphs"] == [1, 1, 1], "the player, the network in training, and all saved models"


# -- the data set and the run ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_set(tensorflow_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small data set."""
    folder = tmp_path_factory.mktemp("go") / "minigo"
    data.prepare("minigo", folder, data.Preparation(), tensorflow_python)
    return folder


def test_the_small_set_has_games_and_a_target_that_knows_nothing(small_set: Path) -> None:
    games = GoGames(small_set, 5)
    assert (len(games), games.held_out) == (400, 20)
    assert len(games.places(held_out=True)) == sum(len(games[number].moves) for number in range(380, 400))
    _, arrays = models.load(small_set / "target.npz", 5)
    assert not arrays["policy_dense.weight"].any()
    with pytest.raises(Problem, match="games on 5 x 5"):
        GoGames(small_set, 9)


GAME = "(;GM[1]FF[4]SZ[9]KM[7.5]RE[B+R];B[ee];W[cc];B[gg])"


@pytest.mark.parametrize(
    ("files", "options", "found"),
    [
        ({"a.sgf": GAME, "b.sgf": GAME}, ("--target", "{}/none.npz"), "none.npz cannot be read as a model"),
        ({"a.sgf": GAME, "b.sgf": GAME}, ("--target", "{}/games/a.sgf"), "a.sgf cannot be read as a model"),
        ({"a.sgf": GAME, "b.sgf": GAME}, ("--target", "{}/five.npz"), "five.npz is a model for 5 x 5"),
    ],
    ids=["no target", "no model", "other board"],
)
def test_preparation_refuses_what_cannot_be_read(
    tmp_path: Path, tensorflow_python: Path, files: dict[str, str], options: tuple[str, ...], found: str
) -> None:
    source = tmp_path / "games"
    source.mkdir()
    for name, text in files.items():
        (source / name).write_text(text, encoding="utf-8")
    shape = models.Shape(board_size=5, features="agz", conv_width=2, trunk_layers=1, fc_width=2)
    models.save(tmp_path / "five.npz", shape, models.initial_weights(shape, 0))
    options = tuple(word.format(tmp_path) for word in ("--board-size", "9", *options))
    with pytest.raises(EncoreError) as caught:
        data.prepare("minigo", tmp_path / "to", data.Preparation(source=source, options=options), tensorflow_python)
    assert found in str(caught.value) and caught.value.remedy and caught.value.exit_code == 2
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
    assert "--skip-corrupt" in caught.value.remedy and not (tmp_path / "to").exists()
    counts = prepare("--skip-corrupt").counts
    said = "\n".join(notes)
    assert "skipped 4 games with flaws" in said and "left out: 1 games, drawn" in said and "starting over" not in said
    found = GoGames(tmp_path / "to", 9)
    moves = [found[number].moves.tobytes() for number in range(len(found))]
    assert counts["test"] == 14 and not {*moves[:-14]} & {*moves[-14:]}


def games_of(folder: Path, generation: int) -> list[int]:
    return [each.number for each in read_generation(generation_folder(folder, generation), 5)]


def killed_when(started: Started, holds: Callable[[Path], bool], what: str, rank: int | None) -> Path:
    """Kill a rank, or stop the whole run by SIGTERM, once something holds; returns the experiment's folder."""

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
def broken(small_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks, one of which trains and one plays, killed in each phase and resumed to its end."""
    results = tmp_path_factory.mktemp("broken")
    # Long enough for the signal that stops the run in the second of its two evaluations.
    changes = settings({**SMALL, **EVALUATION, **ROLES, "eval_readouts": "120"})
    started = Started.run(small_set, results, *changes, name="minigo")

    def some_games(folder: Path) -> bool:
        return any(path.stat().st_size for path in generation_folder(folder, 1).glob("*.games"))

    killed_when(started, some_games, "games of generation 1", rank=1)
    run = only_run(results)
    killed_when(Started.again(run), lambda folder: generation_folder(folder, 2).exists(), "generation 2", rank=0)
    killed_when(Started.again(run), lambda folder: (folder / "evaluations.jsonl").exists(), "an evaluation", rank=None)
    code, output = Started.again(run).end()
    assert code == 3, output
    return run / "experiment_0"


def test_a_run_that_was_killed_in_each_phase_has_every_game_once(broken: Path) -> None:
    for generation in (1, 2):
        assert games_of(broken, generation) == [generation * 1_000_000 + number for number in range(40)]
    assert [path.name for path in sorted((broken / "models").iterdir())] == ["000001.npz", "000002.npz"]
    assert [json.loads(line)["generation"] for line in (broken / "evaluations.jsonl").read_text().splitlines()] == [
        1,
        2,
    ]


def test_a_run_that_was_killed_logs_as_one_that_was_not(broken: Path) -> None:
    keys = [(event["key"], event["metadata"].get("epoch_num")) for event in logged(broken / "result.txt")]
    loop = [key for key in keys if key[0] in ("epoch_start", events.GAMES, "epoch_stop", "eval_start", "eval_accuracy")]
    phases = ("epoch_start", events.GAMES, "epoch_stop")
    assert loop[:6] == [(phase, generation) for generation in (1, 2) for phase in phases]
    assert loop[6:] == [(key, generation) for generation in (1, 2) for key in ("eval_start", "eval_accuracy")]
    assert [key for key, _ in keys[-2:]] == ["eval_result", "run_stop"]
    assert records(broken / "metrics.jsonl", "end")[-1]["outcome"] == "not_reached"


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


def test_findings_about_a_small_run_are_those_of_its_size(broken: Path) -> None:
    found = [finding.rule for finding in check(broken / "result.txt", "0.7.0").findings if finding.severity == "error"]
    sizes = ("selfplay_games_per_generation", "eval_accuracy", "target", "cache", "run_stop", "quality")
    assert [rule for rule in found if not any(size in rule for size in sizes)] == []


@pytest.fixture(scope="module")
def phases(
    network: dict[str, Any],
    tensorflow_python: Path,
    in_tensorflow: InFramework,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], Path]:
    """A run against a frozen graph that is killed in each phase; how its processes ended, and its folder."""
    folder = tmp_path_factory.mktemp("phases")
    options = ("--target", f"{network['folder']}/target.pb")
    data.prepare("minigo", folder / "data", data.Preparation(options=options), tensorflow_python)
    changes = [f"{key}={value}" for key, value in {**SMALL, **EVALUATION, **TINY_NETWORK}.items()]
    config = write_small_config(folder / "config.json", "minigo", 1, changes)
    (folder / "out").mkdir()
    found = result(in_tensorflow("minigo_phases.py", str(config), str(folder / "data"), str(folder / "out")))
    return found, folder


def test_every_phase_can_be_killed_and_no_game_is_lost_or_there_twice(phases: tuple[dict[str, Any], Path]) -> None:
    found, folder = phases
    assert set(found["killed"].values()) == {-signal.SIGKILL}, found
    assert found["last"] == 0
    for generation in (1, 2):
        assert games_of(folder / "out", generation) == [generation * 1_000_000 + number for number in range(40)]
    assert sorted(path.name for path in (folder / "out" / "models").iterdir()) == ["000001.npz", "000002.npz"]
    lines = (folder / "out" / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["generation"] for line in lines] == [1, 2]


def test_the_passport_has_the_checksum_of_a_frozen_target(network: dict[str, Any], phases: tuple[Any, Path]) -> None:
    passport = json.loads((phases[1] / "data" / "dataset.json").read_text(encoding="utf-8"))
    given = Path(network["folder"]) / "target.pb"
    assert passport["how"]["target"] == hashlib.sha256(given.read_bytes()).hexdigest()


def test_games_that_are_missing_or_damaged_in_a_run_are_named(phases: tuple[Any, Path]) -> None:
    config, output = config_of("cpu", "v0.7", "games=40"), phases[1] / "out"
    path = next(generation_folder(output, 1).glob("*.games"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(Problem, match="has 39 games") as missing:
        examples.read_window(output, config, 2)
    path.write_bytes(whole[:60] + bytes([whole[60] ^ 1]) + whole[61:])
    with pytest.raises(Problem, match="differs from its checksum") as damaged:
        examples.read_window(output, config, 2)
    path.write_bytes(whole)
    assert "begin a new run" in missing.value.remedy
    assert "begin a new run" in damaged.value.remedy
    assert len(examples.read_window(output, config, 2)) == 80
