"""A published folder or archive to read texts from: nothing is unpacked, no link is followed out of it."""

from __future__ import annotations

import itertools
import stat
import tarfile
import zipfile
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath

from encore.errors import EncoreError
from encore.files import archive_errors, plain_path

LONGEST_FILE = 1024 * 1024
"""Bytes of a text: the longest script of any submission has 40 kB."""
MOST_MEMBERS = 500_000
MOST_BYTES = 32 * 1024**3
"""Of an archive before the place of a member: more would take minutes to go through."""
MOST_HELD = 256 * 1024**2
"""Bytes of a .tar's folders that are kept to be read again: no folder of scripts has more than some."""


class Tree(ABC):
    """Files by their path below a root, ``/`` between the parts."""

    name: str
    """What the tree is in messages."""

    @abstractmethod
    def read(self, path: str) -> str | None:
        """Return a file's text; None where there is none that may be read. EncoreError if it is too long."""

    @abstractmethod
    def files(self, folder: str) -> list[str]:
        """Return the names of the files in a folder, in order."""

    @abstractmethod
    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder, in order."""


def _text(content: bytes, name: str) -> str:
    if len(content) > LONGEST_FILE:
        raise EncoreError(
            f"{name} is longer than {LONGEST_FILE:,} bytes", expected="a script, a Dockerfile or a description"
        )
    return content.decode("utf-8", errors="replace")


class FolderTree(Tree):
    """A folder on disk."""

    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self._root = root.resolve()

    def _inside(self, path: str) -> Path | None:
        plain = plain_path(path)
        if plain is None:
            return None
        found = (self._root / plain).resolve()
        return found if found.is_relative_to(self._root) else None

    def read(self, path: str) -> str | None:
        found = self._inside(path)
        try:
            # A named pipe or a device would be waited for.
            if found is None or not stat.S_ISREG(found.stat().st_mode):
                return None
            with found.open("rb") as file:
                return _text(file.read(LONGEST_FILE + 1), f"{self.name}/{path}")
        except (OSError, ValueError):
            return None

    def _names(self, folder: str, *, of_folders: bool) -> list[str]:
        found = self._inside(folder)
        try:
            entries = [] if found is None else sorted(found.iterdir())
            return [each.name for each in entries if (each.is_dir() if of_folders else each.is_file())]
        except OSError:
            return []

    def files(self, folder: str) -> list[str]:
        return self._names(folder, of_folders=False)

    def folders(self, folder: str) -> list[str]:
        return self._names(folder, of_folders=True)


class ArchiveTree(Tree):
    """A .zip or .tar file; its members are read where they are."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._folders_read: set[str] = set()
        self._contents: dict[str, bytes] = {}
        self._held = 0
        with archive_errors(self._path):
            members = self._zip_members() if zipfile.is_zipfile(path) else self._tar_members()
            self._members: dict[str, str] = {}
            for member in members:
                plain = plain_path(member)
                if plain:
                    self._members.setdefault(plain, member)
        self._folders: dict[str, set[str]] = {}
        self._files: dict[str, set[str]] = {}
        for plain in self._members:
            parents = PurePosixPath(plain).parents
            self._files.setdefault(_named(parents[0]), set()).add(plain.rpartition("/")[2])
            for inner, outer in itertools.pairwise(parents):
                self._folders.setdefault(_named(outer), set()).add(inner.name)

    def _zip_members(self) -> list[str]:
        with zipfile.ZipFile(self._path) as archive:
            found = archive.infolist()
            _limit(len(found))
            return [each.filename for each in found if not each.is_dir() and not stat.S_ISLNK(each.external_attr >> 16)]

    def _tar_members(self) -> list[str]:
        found: list[str] = []
        with tarfile.open(self._path) as archive:
            for member in archive:
                if member.offset_data + member.size > MOST_BYTES:
                    raise ValueError(f"it holds more than {MOST_BYTES // 1024**3} GiB")
                _limit(len(found))
                if member.isreg():
                    found.append(member.name)
        return found

    def read(self, path: str) -> str | None:
        plain = plain_path(path) or ""
        member = self._members.get(plain)
        if member is None:
            return None
        with archive_errors(self._path):
            if zipfile.is_zipfile(self._path):
                with zipfile.ZipFile(self._path) as packed, packed.open(member) as file:
                    return _text(file.read(LONGEST_FILE + 1), f"{self.name}/{path}")
            folder = plain.rpartition("/")[0]
            if folder not in self._folders_read:
                self._read_folder(folder)
            return _text(self._contents.get(member, b""), f"{self.name}/{path}")

    def _read_folder(self, folder: str) -> None:
        """Read the files of a folder in one pass: a packed .tar has no way to one member but through all before it."""
        self._folders_read.add(folder)
        wanted = {self._members[f"{folder}/{name}" if folder else name] for name in self._files.get(folder, ())}
        with tarfile.open(self._path) as archive:
            for member in archive:
                if not wanted:
                    break
                if member.name in wanted and member.isreg():
                    wanted.remove(member.name)
                    content = archive.extractfile(member)
                    self._contents[member.name] = content.read(LONGEST_FILE + 1) if content else b""
                    self._held += len(self._contents[member.name])
                    if self._held > MOST_HELD:
                        raise ValueError(f"the files of a folder have more than {MOST_HELD // 1024**2} MiB")

    def files(self, folder: str) -> list[str]:
        return sorted(self._files.get(plain_path(folder) or "", ()))

    def folders(self, folder: str) -> list[str]:
        return sorted(self._folders.get(plain_path(folder) or "", ()))


def _named(path: PurePosixPath) -> str:
    return "" if str(path) == "." else str(path)


def _limit(count: int) -> None:
    if count > MOST_MEMBERS:
        raise ValueError(f"it has more than {MOST_MEMBERS:,} members")
