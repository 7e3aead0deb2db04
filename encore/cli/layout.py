"""Console output: tables without borders (eight columns fit into 80 characters), lines and JSON."""

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import TypedDict

from encore.files import discard, plain
from encore.results.logs.parallel import OnRead
from encore.results.table import Cell
from encore.results.table import Table as ResultTable

MIN_WORD = 16  # Minimum length for a shortened word in a narrow terminal
MAX_NAME = 40  # Characters of a run folder's name: TIME-benchmark-framework-system
MIN_LINE = 24  # Minimum width for a cell that is not wrapped
SHORT_SECONDS = 1.0  # Show a progress bar only for longer work
# Width for pipes and files, unless COLUMNS is set: rows are not wrapped.
PIPE_WIDTH = 4096
NUMBER = re.compile(r"[-+]?\d[\d.,:%x]*")


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
    table = _frame(*(Column(name, overflow="fold", justify="right" if name in numbers else "left") for name in columns))
    for row in rows:
        table.add_row(*("" if cell is None else cell if isinstance(cell, Text) else text(cell) for cell in row))
    for column in table.columns:
        if column.header == one_line:
            column.no_wrap, column.overflow = True, "ellipsis"
        if column.header == name:
            column.min_width = min(MAX_NAME, max(map(len, " ".join(_lines(column)).split()), default=0))
    visible = _fitting_columns(table.columns, screen.width, least)
    dropped = [str(column.header) for column in table.columns if column not in visible]
    fitted, cells = _frame(*(column.copy() for column in visible)), []
    for column, width in zip(fitted.columns, _widths(visible, screen.width), strict=True):
        column.width = width
    for column, source in zip(fitted.columns, visible, strict=True):
        cells.append([cell if column.no_wrap else _shorten_words(cell, column.width or 0) for cell in source.cells])
    for row_cells in zip(*cells, strict=True):
        fitted.add_row(*row_cells)
    # The numbers of the first column are wrapped if the terminal is even narrower.
    screen.print(fitted, soft_wrap=False, width=max(screen.width, _total(_min_widths(visible))), crop=False)
    if dropped:
        full_width = _total(_word_widths(table.columns))
        say(screen, f"[dim]a terminal of {full_width} columns also shows: {escape(', '.join(dropped))}[/]")


def _frame(*columns: Column) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def _fitting_columns(columns: Sequence[Column], width: int, least: Sequence[str]) -> list[Column]:
    fitting = list(columns)
    for header in least:
        if _total(_word_widths(fitting)) > width:
            fitting = [column for column in fitting if column.header != header]
    while _total(_min_widths(fitting)) > width and len(fitting) > 1:
        fitting.pop()
    return fitting


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    # Widths of the longest lines, reduced from the widest column on until the table fits.
    widths = [max(map(len, _lines(column)), default=0) for column in columns]
    word_widths, minimum = _word_widths(columns), _min_widths(columns)
    one_line = [minimum[i] if column.no_wrap else word_widths[i] for i, column in enumerate(columns)]
    for limits in (word_widths, one_line, minimum):
        while _total(widths) > width:
            wider = [index for index, limit in enumerate(limits) if widths[index] > limit]
            if not wider:
                break
            widths[max(wider, key=lambda index: widths[index])] -= 1
    return widths


def _shorten_words(cell: RenderableType, width: int) -> RenderableType:
    # Keep a path's end, which identifies it, and the start of other words.
    plain_text = cell.plain if isinstance(cell, Text) else str(cell)
    for word in plain_text.split():
        if len(word) > width > 1:
            short = f"…{word[1 - width :]}" if "/" in word else f"{word[: width - 1]}…"
            plain_text = plain_text.replace(word, short)
            cell = Text(plain_text, style=cell.style if isinstance(cell, Text) else "")
    return cell


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * len(widths)  # two between columns, one at either edge


def _word_widths(columns: Sequence[Column]) -> list[int]:
    # Widths without shortening.
    return [
        max(map(len, _lines(column) if column.no_wrap else " ".join(_lines(column)).split()), default=0)
        for column in columns
    ]


def _min_widths(columns: Sequence[Column]) -> list[int]:
    return [_min_width(column) for column in columns]


def _min_width(column: Column) -> int:
    # Width at which no number and no header is shortened.
    if column.no_wrap:
        return min(MIN_LINE, max(map(len, _lines(column)), default=0))
    words_of_column = " ".join(_lines(column)).split()
    complete = [word for word in words_of_column if NUMBER.fullmatch(word)] + str(column.header).split()
    return max(
        [column.min_width or 0, *map(len, complete), *(min(len(word), MIN_WORD) for word in words_of_column)], default=0
    )


def _lines(column: Column) -> list[str]:
    # Column header and cells as plain lines.
    cells = (cell if isinstance(cell, Text) else Text.from_markup(str(cell)) for cell in column.cells)
    return [line for cell in (Text(str(column.header)), *cells) for line in cell.plain.splitlines()]


def print_result(table: ResultTable, least: Sequence[str] = (), name: str = "") -> None:
    screen = console()
    columns = enumerate(table.columns)
    numbers = [name for index, name in columns if not any(isinstance(row[index], str) for row in table.rows)]
    show(screen, table.title, table.columns, map(table.texts, table.rows), numbers=numbers, least=least, name=name)
    if table.note:
        say(screen, text(table.note, "dim"))


class TableJson(TypedDict):
    """A table; cells are in column order."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str


def tables_as_json(tables: Iterable[ResultTable]) -> list[TableJson]:
    return [{"title": t.title, "columns": t.columns, "rows": t.rows, "note": t.note} for t in tables]


def put(tables: Iterable[ResultTable], as_json: bool) -> None:
    if as_json:
        write_json("tables", tables_as_json(tables))
        return
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
    plain = "".join(char if char.isprintable() else "?" for char in str(value))
    return Text(plain.encode("utf-8", "replace").decode("utf-8"), style=style)


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
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # A bar with automatic refresh uses a thread, and reading would then be limited to one core.
    with Progress(*columns, console=screen, transient=True, auto_refresh=False) as bar:
        task, start = bar.add_task("reading", visible=False), time.monotonic()

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if time.monotonic() - start > SHORT_SECONDS:
                bar.update(task, visible=True, refresh=True)

        yield update
