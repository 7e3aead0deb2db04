"""A table of figures, to be written in any form: text, CSV, Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar

from pydantic import Field

Cell = str | float | int | None
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; cells are in column order, and None is an empty cell."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    # Number formats by column, such as ".3f"; default as in ``cell_text``. Not in JSON.
    formats: Annotated[Mapping[str, str], Field(exclude=True)] = field(default_factory=dict, repr=False)

    def texts(self, row: tuple[Cell, ...]) -> list[str]:
        return [
            format(cell + 0.0, self.formats[column])
            if column in self.formats and isinstance(cell, int | float)
            else cell_text(cell)
            for column, cell in zip(self.columns, row, strict=True)
        ]

    def is_number(self, column: int) -> bool:
        """Return whether a column only contains numbers and is right-aligned."""
        cells = [row[column] for row in self.rows if row[column] is not None]
        return bool(cells) and not any(isinstance(cell, str) for cell in cells)

    def filled(self) -> Table:
        """Return the table without columns that are empty in every row."""
        indices = [
            index for index in range(len(self.columns)) if any(row[index] not in (None, "") for row in self.rows)
        ]
        rows = tuple(tuple(row[index] for index in indices) for row in self.rows)
        return replace(self, columns=tuple(self.columns[index] for index in indices), rows=rows)

    def as_csv(self) -> str:
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_escape_csv(cell) for cell in row] for row in self.rows)
        return file.getvalue()

    # Cells are escaped: they cannot contain separators, HTML, links or images.
    def as_markdown(self) -> str:
        right = [self.is_number(column) for column in range(len(self.columns))]
        lines = [f"| {' | '.join(self.columns)} |", f"|{'|'.join('---:' if r else '---' for r in right)}|"]
        escapes = str.maketrans({"|": "/", "<": "&lt;", "[": "\\["})
        rows = ([" ".join(text.translate(escapes).split()) for text in self.texts(row)] for row in self.rows)
        return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _escape_csv(cell: Cell) -> Cell:
    # Spreadsheets evaluate text that starts like a formula; logs and system names come from anybody
    if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        try:
            float(cell)
        except ValueError:
            return f"'{cell}"
    return "" if cell is None else cell


def cell_text(cell: Cell) -> str:
    """Return a cell as text: five significant digits, and numbers from 1000 on without a fraction."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        if abs(cell) >= 1000:
            return f"{cell:,.0f}"
        if 0 < abs(cell) < 0.01:
            return f"{cell:.3g}"
        return f"{cell:.4f}".rstrip("0").rstrip(".") if abs(cell) < 10 else f"{cell:.5g}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def compact(number: float | None) -> Cell:
    """Convert to int if the fraction is zero."""
    return int(number) if number is not None and number == int(number) else number


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
