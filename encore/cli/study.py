"""``encore study``: published studies measured again on this machine, one command each."""

from __future__ import annotations

import typer

from encore.cli import study_servers


def register(app: typer.Typer) -> None:
    """Add ``study`` with its kinds to the command line."""
    group = typer.Typer(help="Measure a study again, and hold it against its published figures.", no_args_is_help=True)
    group.command("list")(list_studies)
    study_servers.register(group)
    app.add_typer(group, name="study")


def list_studies() -> None:
    """List the studies that Encore knows."""
