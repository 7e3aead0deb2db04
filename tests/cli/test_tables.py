"""Tables on narrow terminals: numbers and headers are not cut, omitted columns are named."""

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.table import Column
from typer.testing import CliRunner

from encore.cli import layout
from encore.cli.app import app
from encore.run import status
from tests.results.result_logs import resnet_v07, write_set

NAME = "20261120T101500Z-resnet-tensorflow-dgxa100_n2-job1234"
A100 = {"submission_platform": "1xNVIDIA DGX A100", "global_batch_size": 3264}

COMMANDS = {
    "published": "published --benchmark resnet",
    "list": "list",
    "systems": "list resnet",
    "show": "show resnet --system dgxa100",
    "images": "images list",
    "report": "report --study microway-dgx1-scaling",
    "score": "score LOGS",
    "compare": "compare LOGS --all",
    "status": "status --results LOGS",
}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Column]]:
    # The columns of all printed tables
    printed: list[Sequence[Column]] = []
    widths = layout._widths
    monkeypatch.setattr(layout, "_widths", lambda columns, width: printed.append(columns) or widths(columns, width))
    rows = [
        status.Row(state="running", when=3.0, job="1234_12", run=Path("/r", NAME), nodes=1024, seconds=400_000.0,
            experiment=1, experiments=5, reached=1, epoch=10, epochs=64, qualities={"accuracy": 0.759012},
            targets={"accuracy": 0.759}),
        status.Row(state="failed", when=2.0, job="7", run=Path("/r", NAME),
                   reason="rank 1048575 was killed by SIGKILL"),
    ]  # fmt: skip
    monkeypatch.setattr(status, "overview", lambda *arguments: rows)
    return printed


def output_of(command: str, width: int, folder: Path) -> str:
    logs = write_set(folder, [resnet_v07(12345.678 + number, **A100) for number in range(5)])
    words = [word.replace("LOGS", str(logs)) for word in command.split()]
    result = CliRunner().invoke(app, words, env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("command", COMMANDS)
def test_numbers_and_headers_are_not_cut(
    command: str, width: int, tables: list[Sequence[Column]], tmp_path: Path
) -> None:
    output = output_of(COMMANDS[command], width, tmp_path / "logs")
    columns = [column for table in tables for column in table if not column.no_wrap]
    cells = {word for column in columns for word in " ".join(layout._lines(column)).split()}
    headers = {word for column in columns for word in str(column.header).split()}
    numbers = {word for word in cells if layout.NUMBER.fullmatch(word)}
    assert (numbers | headers & cells) - set(output.split()) == set()
    rules = [line for line in output.splitlines() if "─" in line]
    assert len(rules) == len(tables) > 0 and max(map(len, rules)) <= width
    if command == "status":
        rows = [line for line in output.split(rules[0])[1].splitlines() if line.strip()]
        assert len(rows) == 2 + ("also shows" in output)


@pytest.mark.slow
def test_omitted_columns_are_named(tables: list[Sequence[Column]], tmp_path: Path) -> None:
    narrow, wide = (output_of(COMMANDS["published"], width, tmp_path) for width in (60, 200))
    assert "columns also shows: runs, accelerators" in narrow and [len(table) for table in tables] == [5, 7]
    assert "also shows" not in wide
    screen = layout.Console(width=20, record=True, file=io.StringIO())
    layout.show(screen, "", ("name", "figure"), [("x" * 40, "1234567890.12")], numbers=("figure",))
    assert "also shows: figure" in screen.export_text()
