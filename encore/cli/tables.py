"""Tables for terminals: no frames, so that eight columns fit into eighty characters."""

from __future__ import annotations

from rich import box
from rich.table import Table


def plain_table(title: str, *columns: str) -> Table:
    """An empty table with these columns."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
