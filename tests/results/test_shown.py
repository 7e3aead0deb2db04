"""Pictures of detections: read with care, drawn as SVG, shown by the command line and in the report."""

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image
from typer.testing import CliRunner

from encore.cli.app import app
from encore.results.report.figures import quality_curves
from encore.results.report.measurements import Curve, Measurement
from encore.results.report.report import build_report, render, write_files
from encore.results.report.shown import (
    DETECTIONS,
    board,
    drawing,
    game_of,
    generation_plots,
    generations_of,
    generations_table,
    images_of,
    last_moves,
    shown_in_report,
)
from tests.results.result_logs import resnet_v07, write_set

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '"><script>document.title="taken"</script>\x1b[2J'


def jpeg(width: int = 40, height: int = 30) -> str:
    written = io.BytesIO()
    Image.new("RGB", (width, height), "gray").save(written, "JPEG")
    return base64.b64encode(written.getvalue()).decode("ascii")


def line(number: int, which: str = "best", **other: Any) -> dict[str, Any]:
    found = {
        "label": "cat",
        "box": [1, 2, 10, 20],
        "score": 0.875,
        "matched": number % 2 == 0,
        "runs": [1, 2, 3, 1, 3, 2],
    }
    truth = {"label": "dog", "box": [3, 4, 10, 20], "crowd": True}
    return {
        "which": which, "image": number, "file": f"{number}.jpg", "epoch": 3, "precision": 0.5, "width": 40,
        "height": 30, "jpeg": jpeg(), "found": [found], "truth": [truth], **other,
    }  # fmt: skip


def write(experiment: Path, lines: list[Any]) -> None:
    experiment.mkdir(parents=True)
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    (experiment / DETECTIONS).write_text("\n".join(texts) + "\n", encoding="utf-8")


# Dashed: matches nothing; dotted: a crowd. Names are text, cut at the picture's end.
def test_a_picture_has_detections_on_the_left_and_objects_on_the_right(
    tmp_path: Path, recorded: Callable[[str, object], None]
) -> None:
    shapes = [
        {"label": "cat", "box": [1, 2, 10, 20], "score": 0.5},
        {"label": HOSTILE, "box": [30, 18, 9, 9], "score": 1},
    ]
    write(tmp_path / "experiment_0", [line(1), line(2, file=HOSTILE, found=shapes)])
    found = images_of(tmp_path)
    assert all("\x1b" not in image.title + image.found[-1].label for image in found)
    drawn = [f"{drawing(image)}<!-- {image.shown_size} {image.name} -->" for image in found]
    recorded("detections.svg", "\n".join(drawn).replace(jpeg(), "JPEG"))


def test_the_first_experiment_that_has_some_is_read(tmp_path: Path) -> None:
    write(tmp_path / "experiment_10", [line(10)])
    write(tmp_path / "experiment_2", [line(n) for n in range(3)] + [line(n, "worst") for n in range(5, 8)])
    images = images_of(tmp_path)
    assert [each.image for each in images] == [0, 1, 2, 5, 6, 7]
    assert [(each.which, each.image) for each in shown_in_report(images)] == [
        *(("best", 0), ("best", 1), ("worst", 5), ("worst", 6))
    ]
    assert images_of(None) == images_of(tmp_path / "nothing") == []


DAMAGES: list[Any] = [
    "cut o",
    "null",
    "[1]",
    "[" * 50_000,
    {"jpeg": "!"},
    {"jpeg": base64.b64encode(b"<svg>").decode()},
    {"width": 0},
    {"height": 10**9},
    {"precision": float("nan")},
    {"found": None},
    {"found": [{"label": "x", "box": [1, 2, 3]}]},
    {"found": [{"label": "x", "box": [1, 2, 3, 1e999]}]},
    {"truth": [3]},
    {"truth": [{"label": "x", "box": "abcd"}]},
    {"truth": [{"label": "x", "box": [1, 2, 3, 4], "runs": 3}]},
]


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
def test_what_is_damaged_is_passed_over(tmp_path: Path, damage: Any) -> None:
    write(tmp_path / "experiment_0", [damage if isinstance(damage, str) else line(1, **damage), line(2)])
    assert [each.image for each in images_of(tmp_path)] == [2]


@pytest.mark.parametrize("options", ["-o out", "--json", "--json -o out"])
def test_the_command_line_lists_and_draws(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Callable[[str, object], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(write_set(tmp_path / "run", [resnet_v07(40.0)]) / "experiment_0", [line(1), line(2, "worst")])
    done = CliRunner().invoke(app, ["report", "run", "--detections", *options.split()], env={"COLUMNS": "100"})
    pictures = sorted(path.name for path in tmp_path.glob("out/*"))
    recorded(f"detections/{options.replace(' ', '')}.txt", "\n".join([done.stdout, *pictures]))


def test_the_report_has_a_few(tmp_path: Path) -> None:
    run = write_set(tmp_path / "run", [resnet_v07(40.0)])
    write(run / "experiment_0", [line(n) for n in range(4)] + [line(n, "worst") for n in range(5, 9)])
    report = build_report([run])
    page = render(report, "report.html.j2")
    assert page.count('src="data:image/svg+xml;base64,') == 4
    assert "Detections (4)" in page
    files = {file.name for file in write_files(report, tmp_path / "report")}
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    pictures = re.findall(r"^!\[\w+\]\((\S+)\)$", text, re.MULTILINE)
    assert len(pictures) == 4 and set(pictures) <= files
    assert (tmp_path / "report" / pictures[0]).read_text(encoding="utf-8") == drawing(images_of(run)[0])


# Black takes the white stone in the corner A5 by B5 and A4, and white plays into the hole again, which takes nothing.
MOVES = [1, 0, 5, 25, 12, 0]
STONES = [2, 1, *[0] * 3, 1, *[0] * 6, 1, *[0] * 12]
GAME = {
    "generation": 2, "game": 2_000_000, "size": 5, "moves": MOVES, "stones": STONES, "outcome": -1.0, "margin": -3.5,
    "resigned": False,
}  # fmt: skip


def generation_line(generation: int, policy_loss: float) -> dict[str, Any]:
    return {
        "generation": generation, "games": 256.0, "moves": 21.5, "black_wins": 0.5, "resigned": 0.25,
        "loss": 9.0, "policy_loss": policy_loss, "value_loss": 0.5, "positions": 4096,
    }  # fmt: skip


def write_generations(path: Path, *lines: object) -> None:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines) + '{"cut off', encoding="utf-8")


# A set of runs whose second one has generations, the second of which was written twice by a resumed run.
def played(folder: Path) -> Path:
    found = write_set(folder / "played", [resnet_v07(40.0), resnet_v07(41.0)])
    experiment = found / "experiment_1"
    experiment.mkdir()
    write_generations(
        experiment / "generations.jsonl",
        generation_line(1, 3.0),
        generation_line(2, 9.0),
        generation_line(2, 2.0),
        {"generation": 3},
        [1],
    )
    write_generations(
        experiment / "evaluations.jsonl",
        {"generation": 1, "win_rate": 0.25},
        {"generation": 2, "win_rate": 0.9, "win_rate_first": 0.7},
        {"generation": 3, "win_rate": 7},
    )
    write_generations(
        experiment / "shown_games.jsonl",
        {**GAME, "generation": 1},
        {**GAME, "margin": 0.5},
        GAME,
        {**GAME, "generation": 3, "stones": [3] * 25},
        {**GAME, "generation": 4, "moves": [26]},
        {**GAME, "generation": 5, "size": 200},
    )
    return found


# What is written in the row of ticks above the label of x.
def ticks_of_x(svg: str, label: str) -> list[str]:
    texts = [each for each in ElementTree.fromstring(svg).iter() if each.tag.endswith("text")]
    low = next(float(each.attrib["y"]) for each in texts if each.text == label) - 16
    return [str(each.text) for each in texts if float(each.attrib["y"]) == low]


def test_whole_epochs_have_whole_ticks_and_parts_of_one_have_not() -> None:
    def ticks_over(*epochs: float) -> list[str]:
        curve = Curve("value", tuple((each, 0.5 + each / 100) for each in epochs), None)
        one = Measurement(label="one", benchmark="resnet", system="one", curves=(curve,))
        return ticks_of_x(quality_curves([one], "resnet")[0].svg, "epochs")

    assert ticks_over(1, 2, 3) == ["1", "2", "3"]
    assert "0.5" in ticks_over(0.5, 1.0, 1.5)


def test_generations_and_a_game_as_they_were_written_last(
    tmp_path: Path, recorded: Callable[[str, object], None]
) -> None:
    folder = played(tmp_path)
    game, table, plots = game_of(folder), generations_table(folder), generation_plots(folder)
    svg = "\n".join([board(game), *(plot.svg for plot in plots)])
    recorded("generations.svg", svg)
    recorded("generations.json", [[game.title, game.unseen, last_moves(game)], table.note, table.columns, *table.rows])
    assert ticks_of_x(plots[0].svg, "generation") == ["1", "2"]
    assert (generations_of(None), generations_table(tmp_path), generation_plots(tmp_path)) == (({}, {}), None, [])
    report = build_report([folder])
    page, text = render(report, "report.html.j2"), render(report, "report.md.j2")
    assert page.count("Generations (2)") == 1
    assert game.title in page
    assert "![the board at the end](game_1.svg)" in text
    assert (tmp_path / "out" / "game_1.svg") in write_files(report, tmp_path / "out")
