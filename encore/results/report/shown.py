"""Files of lines that a training leaves for people to look at: translations, detections, games."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

Line = TypeVar("Line", bound=BaseModel)


def files_of(folder: Path | None, name: str) -> list[Path]:
    """Return the file of each experiment of a run that has one, in order."""
    if folder is None or not folder.is_dir():
        return []
    numbered = {path.parent.name[11:]: path for path in folder.glob(f"experiment_*/{name}")}
    return [numbered[number] for number in sorted((n for n in numbered if n.isdecimal()), key=int)]


def first_read(folder: Path | None, name: str, kind: type[Line], most: int, longest: int) -> tuple[Path, list[Line]]:
    """Return the file of the first experiment that has something to show, and that; nothing where there is none."""
    every = ((path, list(read(path, kind, most, longest))) for path in files_of(folder, name))
    return next((each for each in every if each[1]), (Path(), []))


def read(path: Path, kind: type[Line], most: int, longest: int) -> Iterator[Line]:
    """Yield what is read of the first ``most`` lines; one that is damaged, of another kind or too long is skipped."""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in islice(iter(lambda: file.readline(longest), ""), most):
            with suppress(ValidationError, TypeError):
                yield kind.model_validate_json(line)
