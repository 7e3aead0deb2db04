"""Files of lines that a training leaves for people to look at: translations, detections, games."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path


def files_of(folder: Path | None, name: str) -> list[Path]:
    """Return the file of each experiment of a run that has one, in order."""
    if folder is None or not folder.is_dir():
        return []
    numbered = {path.parent.name[11:]: path for path in folder.glob(f"experiment_*/{name}")}
    return [numbered[number] for number in sorted((n for n in numbered if n.isdecimal()), key=int)]


def lines_of(path: Path, most: int, longest: int) -> Iterator[str]:
    """Yield up to ``most`` lines; one over ``longest`` characters comes in parts. Ends where it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from islice(iter(lambda: file.readline(longest), ""), most)
    except OSError:
        return
