"""Console output: tables without borders (eight columns fit into 80 characters), lines and JSON."""

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from encore.files import discard, plain
from encore.results.logs.parallel import OnRead
from encore.results.table import Table as ResultTable

MIN_WORD = 16  # Minimum length for a shortened word in a narrow terminal
MAX_NAME = 40  # Characters of a run folder's name: TIME-benchmark-framework-system
MIN_LINE = 24  # Minimum width for a cell that is not wrapped
SHORT_SECONDS = 1.0  # Show a progress bar only for longer work
# Width for pipes and files, unless COLUMNS is set: rows are not wrapped.
PIPE_WIDTH = 4096
NUMBER = re.compile(r"[-+]?\d[\d.,:%x]*")


class _Widths(NamedTuple):
    """Widths of a column: without wrapping, wrapped between words, the same with ``one_line`` cut, and at least."""

    lines: int
    words: int
    cut: int
    least: int


def show(
    screen: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numbers: Sequence[str] = (),
    least: Sequence[str] = (),
    one_line: str = "",
    name: str = "",
) -> None:
    """Print a table that fits the terminal. Numbers and headers are not shortened.

    In a narrow terminal, texts are wrapped between words, then the columns in ``least`` are dropped, then long words
    are shortened (``one_line``: cells are shortened instead of wrapped; ``name``: up to MAX_NAME characters are
    complete), then columns are dropped from the right. The last line lists the dropped columns. The columns in
    ``numbers`` are aligned to the right; None is an empty cell.
    """
    if title:
        say(screen, text(title, "bold"))
    cells = [[cell if isinstance(cell, Text) else text("" if cell is None else cell) for cell in row] for row in rows]
    limits = {
        column: _widths(column, [row[index].plain for row in cells], column == one_line, column == name)
        for index, column in enumerate(columns)
    }
    visible = list(columns)
    for column in least:
        if _total(limits[shown].words for shown in visible) > screen.width:
            visible = [shown for shown in visible if shown != column]
    while _total(limits[column].least for column in visible) > screen.width and len(visible) > 1:
        visible.pop()
    widths = {column: limits[column].lines for column in visible}
    for step in ("words", "cut", "least"):
        while _total(widths.values()) > screen.width:
            wider = [column for column in visible if widths[column] > getattr(limits[column], step)]
            if not wider:
                break
            widths[max(wider, key=lambda column: widths[column])] -= 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column, width in widths.items():
        is_cut = column == one_line
        table.add_column(
            column, width=width, no_wrap=is_cut, overflow="ellipsis" if is_cut else "fold",
            justify="right" if column in numbers else "left",
        )  # fmt: skip
    for row in cells:
        shown_cells = ((column, cell) for column, cell in zip(columns, row, strict=True) if column in visible)
        table.add_row(*(cell if column == one_line else _shorten(cell, widths[column]) for column, cell in shown_cells))
    # The numbers of the first column are wrapped if the terminal is even narrower.
    screen.print(table, soft_wrap=False, width=max(screen.width, _total(widths.values())), crop=False)
    if len(visible) < len(columns):
        dropped = ", ".join(column for column in columns if column not in visible)
        full_width = _total(limit.words for limit in limits.values())
        say(screen, f"[dim]a terminal of {full_width} columns also shows: {escape(dropped)}[/]")


def _widths(header: str, cells: Sequence[str], is_one_line: bool, is_name: bool) -> _Widths:
    lines = [line for cell in (header, *cells) for line in cell.splitlines()]
    words = " ".join(lines).split()
    longest_line, longest_word = max(map(len, lines), default=0), max(map(len, words), default=0)
    if is_one_line:
        shortest = min(MIN_LINE, longest_line)
        return _Widths(longest_line, longest_line, shortest, shortest)
    complete = [word for word in words if NUMBER.fullmatch(word)] + header.split()
    shortest = max([min(longest_word, MAX_NAME if is_name else MIN_WORD), *map(len, complete)])
    return _Widths(longest_line, longest_word, longest_word, shortest)


def _shorten(cell: Text, width: int) -> Text:
    # Keep a path's end, which identifies it, and the start of other words.
    for word in cell.plain.split():
        if len(word) > width > 1:
            short = f"…{word[1 - width :]}" if "/" in word else f"{word[: width - 1]}…"
            cell = Text(cell.plain.replace(word, short), style=cell.style)
    return cell


def _total(widths: Iterable[int]) -> int:
    return sum(width + 2 for width in widths)  # two between columns, one at either edge


def print_result(table: ResultTable, least: Sequence[str] = (), name: str = "") -> None:
    screen = console()
    columns = enumerate(table.columns)
    numbers = [name for index, name in columns if not any(isinstance(row[index], str) for row in table.rows)]
    show(screen, table.title, table.columns, map(table.texts, table.rows), numbers=numbers, least=least, name=name)
    if table.note:
        say(screen, text(table.note, "dim"))


def put(tables: Iterable[ResultTable], as_json: bool) -> None:
    if as_json:
        write_json("tables", list(tables))
    else:
        for table in tables:
            print_result(table)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # Handled in encore/cli/app.py; rich exits with 1


def console(stderr: bool = False, soft_wrap: bool = False) -> Console:
    # Without emoji: the path "a:b:" is not an icon
    screen = _Console(stderr=stderr, soft_wrap=soft_wrap, highlight=False, emoji=False)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen.width = PIPE_WIDTH
    return screen


class _DiscardingStream:
    """Text stream that discards output after the reader has closed the pipe."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, content: str) -> int:
        try:
            return self._stream.write(content)
        except OSError:
            discard(self._stream)
            return len(content)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def ignore_closed_output() -> Iterator[None]:
    """Discard output instead of failing after stdout or stderr was closed: ``| head``, a lost terminal."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_DiscardingStream, streams)
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        sys.stdout, sys.stderr = streams


@contextmanager
def limited_lines(screen: Console, max_lines: int | None) -> Iterator[None]:
    """Print only the first ``max_lines`` lines of the output, and the number of hidden lines."""
    with screen.capture() as capture:
        yield
    lines = capture.get().splitlines(keepends=True)
    visible = lines if max_lines is None or len(lines) <= max_lines else lines[: max_lines - 1]
    screen.file.write("".join(visible))
    if len(visible) < len(lines):
        say(screen, f"[dim]{len(lines) - len(visible)} more lines with --all[/]")


def say(screen: Console, *texts: object) -> None:
    # Print one line. Terminals wrap it; it stays on one line in a pipe.
    screen.print(*texts, soft_wrap=True)


def text(value: object, style: str = "") -> Text:
    """Return a text from a log without markup and control codes, which could repaint the terminal."""
    return Text("".join(char if char.isprintable() else "?" for char in str(value)), style=style)


def minutes_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def write_json(schema: str, content: object) -> None:
    """Print JSON with the schema ``schema`` (encore/cli/schemas.py), without rich, which would wrap and colour it."""
    sys.stdout.write(as_text(schema, content) + "\n")


def as_text(schema: str, content: object) -> str:
    # Tests replace this function to validate the text against the schema.
    return json.dumps(content, indent=2, default=plain)


@contextmanager
def reading() -> Iterator[OnRead | None]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # A bar with automatic refresh uses a thread, and reading would then be limited to one core.
    screen = console(stderr=True)
    options: dict[str, Any] = {"console": screen, "transient": True, "auto_refresh": False}
    with Progress(*columns, **options, disable=not screen.is_terminal) as bar:
        task, start = bar.add_task("reading", visible=False), time.monotonic()

        def update(done: int, total: int) -> None:
            is_long = time.monotonic() - start > SHORT_SECONDS
            bar.update(task, completed=done, total=total, visible=is_long, refresh=is_long)

        yield update if screen.is_terminal else None
