"""What measures the kit, or makes its data, and is no test of it."""

import sys
from pathlib import Path


def folders_given(usage: str | None, most: int | None = None) -> list[Path]:
    """Return the folders of the command line, its first ``most``; print how the tool is used where one is none."""
    folders = [Path(name) for name in sys.argv[1:][:most]]
    if not folders or not all(folder.is_dir() for folder in folders):
        sys.exit(usage)
    return folders
