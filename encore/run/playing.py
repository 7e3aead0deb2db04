"""Let a person or a program play against what a run has trained, in the implementation's environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from encore import catalogue, environment, paths
from encore.catalogue import Choice
from encore.errors import EncoreError

PROGRAM = "gtp"
"""Module of a benchmark that can be played: it speaks the Go Text Protocol over standard input and output."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Whom to play against."""

    name: str
    model: str
    arguments: tuple[str, ...] = ()
    """Passed on to the program."""
    python: Path | None = None
    """The user's own; None: that of the framework's environment."""


def command(request: Request, on_step: Callable[[str], None]) -> list[str]:
    """Return the command of the player; builds the framework's environment where it is needed.

    Raises:
        EncoreError: no such benchmark, or one that is no game.
    """
    choice = catalogue.choose(request.name)
    package = choice.implementation.module.rpartition(".")[0]
    if not (choice.folder.parent / f"{PROGRAM}.py").exists():
        raise EncoreError(
            f"{choice.benchmark.name} is no game: there is nothing to play",
            expected="a benchmark that is: " + (", ".join(playable()) or "there is none here"),
        )
    if request.python is not None and not request.python.expanduser().is_file():
        raise EncoreError(f"--python {request.python}: no such file", expected="a Python that has the framework")
    python = request.python or environment.ensure_environment(choice.implementation.framework, on_step)
    model = ("--model", request.model, "--implementation", choice.implementation.module)
    return [str(python), "-m", f"{package}.{PROGRAM}", *model, *request.arguments]


def playable() -> list[str]:
    """Return the names of the benchmarks that can be played."""
    choices: list[Choice] = list(catalogue.choices().values())
    return sorted({each.benchmark.name for each in choices if (each.folder.parent / f"{PROGRAM}.py").exists()})


def play(argv: list[str]) -> int:
    """Run the player on this terminal or pipe until it ends; returns its exit code."""
    path = os.pathsep.join(filter(None, (str(paths.ROOT), os.environ.get("PYTHONPATH", ""))))
    return subprocess.run(argv, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
