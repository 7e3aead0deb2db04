"""A published folder or archive to read texts from: no link is followed out of it, and nothing of it is run."""

import re
import stat
from contextlib import ExitStack
from pathlib import Path

from encore.errors import EncoreError
from encore.files import plain_path, unpacked

LONGEST_FILE = 1024 * 1024  # Bytes of a text: the longest script of any submission has 40 kB
# Files of an archive that scripts and their configurations are in: no logs, no programs
_TEXTS = re.compile(
    r"^(?!.*/results/)(?:.*/)?(?:[^/.]+|[^/]*Dockerfile[^/]*|[^/]+\.(?:sh|sub|json|flags|conf|cfg|ya?ml|txt))$"
)


class Tree:
    """Files by their path below a root, ``/`` between the parts."""

    def __init__(self, path: Path, *, is_archive: bool = False) -> None:
        self.name = str(path)  # What the tree is in messages
        self.is_archive = is_archive
        # Of an archive the texts are in a folder that ends with this object.
        self._unpacked = ExitStack()
        self._root = (
            self._unpacked.enter_context(unpacked(path, _TEXTS, LONGEST_FILE)) if is_archive else path.resolve()
        )

    def _inside(self, path: str) -> Path | None:
        plain = plain_path(path)
        if plain is None:
            return None
        found = (self._root / plain).resolve()
        return found if found.is_relative_to(self._root) else None

    def read(self, path: str) -> str | None:
        """Return a file's text; None where there is none that may be read. EncoreError if it is too long."""
        found = self._inside(path)
        try:
            # A named pipe or a device would be waited for.
            if found is None or not stat.S_ISREG(found.stat().st_mode):
                return None
            with found.open("rb") as file:
                content = file.read(LONGEST_FILE + 1)
        except (OSError, ValueError):
            return None
        if len(content) > LONGEST_FILE:
            raise EncoreError(
                f"{self.name}/{path} is longer than {LONGEST_FILE:,} bytes",
                expected="a script, a Dockerfile or a description",
            )
        return content.decode("utf-8", errors="replace")

    def _names(self, folder: str, *, of_folders: bool) -> list[str]:
        found = self._inside(folder)
        try:
            entries = [] if found is None else sorted(found.iterdir())
            return [each.name for each in entries if (each.is_dir() if of_folders else each.is_file())]
        except OSError:
            return []

    def files(self, folder: str) -> list[str]:
        """Return the names of the files in a folder, in order."""
        return self._names(folder, of_folders=False)

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder, in order."""
        return self._names(folder, of_folders=True)
