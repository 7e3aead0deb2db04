"""Tables for terminals: no frames, so that eight columns fit into eighty characters."""

from __future__ import annotations

from typing import Literal

from rich import box
from rich.table import Table

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
    """An empty table with these columns, those in ``numbers`` set to the right."""
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
