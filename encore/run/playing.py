"""Let a person or a program play against what a run has trained, in the implementation's environment."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from encore import catalogue, paths
from encore.errors import EncoreError
from encore.machine import pythons

# Module of a benchmark that can be played: it speaks the Go Text Protocol over standard input and output.
PROGRAM = "gtp"


@dataclass(frozen=True, kw_only=True)
class Request:
    name: str
    model: str
    arguments: tuple[str, ...] = ()  # Passed on to the program
    python: Path | None = None  # The user's own; None: that of the framework's environment


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
    python = pythons.named_or_made(request.python, choice.implementation.framework, on_step)
    model = ("--model", request.model, "--implementation", choice.implementation.module)
    return [str(python), "-m", f"{package}.{PROGRAM}", *model, *request.arguments]


def playable() -> list[str]:
    choices = catalogue.choices().values()
    return sorted({each.benchmark.name for each in choices if (each.folder.parent / f"{PROGRAM}.py").exists()})


def play(argv: list[str]) -> int:
    path = os.pathsep.join(filter(None, (str(paths.ROOT), os.environ.get("PYTHONPATH", ""))))
    return subprocess.run(argv, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
