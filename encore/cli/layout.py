"""Output: tables without frames, so that eight columns fit into eighty characters, lines, and JSON."""

from __future__ import annotations

import json
import sys
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WHOLE = (
    "name",
    "framework",
    "data set",
    "target per round",
    "samples/s",
    "speed-up",
    "efficiency",
    "reached",
)
"""Columns that are never broken: a name is there to be copied."""


def plain_table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return an empty table with these columns, those in ``numbers`` set to the right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in numbers else "left"
        table.add_column(column, overflow="fold", justify=justify, no_wrap=column in WHOLE)
    return table


def console(stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Return the terminal; figures in a line keep its colour."""
    return Console(stderr=stderr, soft_wrap=soft_wrap, highlight=False)


def say(screen: Console, *texts: object) -> None:
    """Print one line, however long: a terminal wraps it by itself, and a pipe keeps it whole."""
    screen.print(*texts, soft_wrap=True)


def text(value: object, style: str = "") -> Text:
    """Return a text from a log without markup and control codes, which could repaint the terminal."""
    plain = "".join(each if each.isprintable() else "?" for each in str(value))
    return Text(plain.encode("utf-8", "replace").decode("utf-8"), style=style)


def write_json(content: object) -> None:
    """Write ``content`` to the standard output."""
    # Not through rich: it would wrap and colour what other programs read.
    sys.stdout.write(json.dumps(content, indent=2) + "\n")
