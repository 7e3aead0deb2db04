"""What a report shows of a run that learns from games against itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from encore.results.report.figures import quality_curves
from encore.results.report.measurements import Curve, Measurement
from encore.results.report.report import build_report, render, write_files
from encore.results.report.shown import (
    board,
    game_of,
    generation_plots,
    generations_of,
    generations_table,
    last_moves,
)
from tests.results.result_logs import resnet_v07, write_set

# Black takes the white stone in the corner A5 by B5 and A4, and white plays into the hole again, which takes nothing.
MOVES = [1, 0, 5, 25, 12, 0]
STONES = [2, 1, *[0] * 3, 1, *[0] * 6, 1, *[0] * 12]
GAME = {
    "generation": 2, "game": 2_000_000, "size": 5, "moves": MOVES, "stones": STONES, "outcome": -1.0, "margin": -3.5,
    "resigned": False,
}  # fmt: skip


def line(generation: int, policy_loss: float) -> dict[str, Any]:
    return {
        "generation": generation, "games": 256.0, "moves": 21.5, "black_wins": 0.5, "resigned": 0.25,
        "loss": 9.0, "policy_loss": policy_loss, "value_loss": 0.5, "positions": 4096,
    }  # fmt: skip


def write(path: Path, *lines: object) -> None:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines) + '{"cut off', encoding="utf-8")


def played(folder: Path) -> Path:
    """A set of runs whose second one has generations, the second of which was written twice by a resumed run."""
    found = write_set(folder / "played", [resnet_v07(40.0), resnet_v07(41.0)])
    experiment = found / "experiment_1"
    experiment.mkdir()
    write(experiment / "generations.jsonl", line(1, 3.0), line(2, 9.0), line(2, 2.0), {"generation": 3}, [1])
    write(
        experiment / "evaluations.jsonl",
        {"generation": 1, "win_rate": 0.25},
        {"generation": 2, "win_rate": 0.9, "win_rate_first": 0.7},
        {"generation": 3, "win_rate": 7},
    )
    write(
        experiment / "shown_games.jsonl",
        {**GAME, "generation": 1},
        {**GAME, "margin": 0.5},
        GAME,
        {**GAME, "generation": 3, "stones": [3] * 25},
        {**GAME, "generation": 4, "moves": [26]},
        {**GAME, "generation": 5, "size": 200},
    )
    return found


def ticks_of_x(svg: str, label: str) -> list[str]:
    """Return what is written in the row of ticks above the label of x."""
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
