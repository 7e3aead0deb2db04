"""Pictures of detections: read with care, drawn as SVG, shown by the command line and in the report."""

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.results.report.report import build_report, render, write_files
from encore.results.report.shown import DETECTIONS, drawing, images_of, shown_in_report
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


def test_a_picture_has_detections_on_the_left_and_objects_on_the_right(
    tmp_path: Path, recorded: Callable[[str, object], None]
) -> None:
    """Dashed: matches nothing; dotted: a crowd. Names are text, cut at the picture's end."""
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


def test_the_command_line_lists_and_draws(tmp_path: Path) -> None:
    run = write_set(tmp_path / "run", [resnet_v07(40.0)])
    write(run / "experiment_0", [line(1), line(2, "worst")])
    done = CliRunner().invoke(
        app, ["report", str(run), "--detections", "-o", str(tmp_path / "out")], env={"COLUMNS": "100"}
    )
    assert done.exit_code == 0, done.output
    assert "2 pictures in" in done.output and "2.jpg" in done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["best_1.svg", "worst_2.svg"]
    done = CliRunner().invoke(app, ["report", str(run), "--detections", "--json"])
    found = json.loads(done.output)
    assert [each["picture"] for each in found] == [None, None]
    assert found[0]["detections"] == [
        {"label": "cat", "box": [1, 2, 10, 20], "has_mask": True, "score": 0.875, "matched": False}
    ]
    (tmp_path / "file").write_text("", encoding="utf-8")
    done = CliRunner().invoke(app, ["report", str(run), "--detections", "-o", str(tmp_path / "file" / "out")])
    assert isinstance(done.exception, EncoreError) and "cannot be written" in str(done.exception)


def test_a_run_without_detections_is_refused(tmp_path: Path) -> None:
    run = write_set(tmp_path / "run", [resnet_v07(40.0)])
    done = CliRunner().invoke(app, ["report", str(run), "--detections"])
    assert isinstance(done.exception, EncoreError) and "has no detections" in str(done.exception)
    assert done.exception.exit_code == 2


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
