"""Tools that measure Encore or generate its data."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from encore.errors import EncoreError

Folder = Annotated[Path, typer.Argument(exists=True, file_okay=False)]
Folders = Annotated[list[Path], typer.Argument(exists=True, file_okay=False)]


def run(main: Callable[..., None], manual: str | None) -> None:
    """Run a tool with the parameters of ``main`` as command line; --help prints ``manual`` verbatim."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help="\b\n" + (manual or "").replace("\n\n", "\n\n\b\n"))(main)
    try:
        app()
    except EncoreError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
