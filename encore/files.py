"""Atomic JSON files, their timestamps, TOML files, and bounded reading of archives."""

import bz2
import errno
import gzip
import hashlib
import json
import lzma
import os
import pwd
import re
import secrets
import shutil
import stat
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, TextIO, cast

from encore.errors import EncoreError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

UTC_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def utc_now() -> str:
    return datetime.now(timezone.utc).strftime(UTC_FORMAT)


def text_of(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except (OSError, ValueError) as error:
        raise EncoreError(f"{path} is not valid TOML: {error}", hint="fix the file") from error


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    digest = hashlib.new(algorithm)
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def lines_at_end(path: Path, size: int) -> list[str]:
    # Lines in the last ``size`` bytes, the first may be truncated; empty for unreadable files.
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def json_objects(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    # Objects in JSON lines; skips truncated, damaged and other lines.
    for line in lines:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def unix_time(text: object) -> float | None:
    # Inverse of ``utc_now``.
    with suppress(ValueError):
        return datetime.strptime(str(text), UTC_FORMAT).replace(tzinfo=timezone.utc).timestamp()
    return None


def existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def plain(value: object) -> Any:
    """Return a dataclass or model as a dictionary, or a path as text: the ``default`` of json.dumps.

    Fields of dataclasses with ``repr=False`` are left out.
    """
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in fields(value) if f.repr}
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` atomically: readers see the old or the new file."""
    with replaced(path) as file:
        file.write((json.dumps(content, indent=2, default=plain) + "\n").encode())


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that replaces ``path`` at the end of the block, or is removed after an exception.

    Symbolic links are not followed: ``path`` is replaced, and the temporary file is created (O_EXCL) under a random
    name.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.writing")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def user_name(number: int) -> str:
    """Return the user's name, or the user ID if unnamed."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EncoreError(f"{path} cannot be read: {error}", hint="restore it, or start a new run") from error
    if not isinstance(loaded, dict):
        raise EncoreError(f"{path} does not contain a JSON object", hint="restore it, or start a new run")
    return loaded


ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
_MAX_MEMBERS = 200_000
# Logs shrink by a factor of 10 to 50. A larger factor, or a small archive with much content, is an archive bomb.
_MAX_RATIO, _FREE_BYTES = 200, 64 * 1024**2
_MOST_UNPACKED = 16 * 1024**3  # Bytes of the files that are unpacked: the logs of the largest round have 4 GiB
_DAMAGED = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError, ValueError,
)  # fmt: skip


class TooLarge(OSError):
    """A compressed file with more content than any plausible log."""

    def __str__(self) -> str:
        return self.strerror or ""


def max_unpacked(path: Path) -> int:
    """Return the limit for a compressed file's content, in bytes."""
    return _FREE_BYTES + _MAX_RATIO * path.stat().st_size


def _too_large(limit: int) -> TooLarge:
    return TooLarge(errno.EFBIG, f"its content has more than {limit:,} bytes, the limit for a file of its size")


class Bounded:
    """A binary stream that raises TooLarge after ``limit`` bytes."""

    def __init__(self, stream: Any, limit: int) -> None:
        self._stream, self._limit, self._left = stream, limit, limit

    def read(self, size: int = -1) -> bytes:
        return self._count(self._stream.read(size if size >= 0 else self._left + 1))

    def read1(self, size: int) -> bytes:
        return self._count(self._stream.read1(size))

    def _count(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise _too_large(self._limit)
        return data


def is_archive(path: Path) -> bool:
    return path.is_file() and path.name.lower().endswith(ARCHIVES)


def plain_path(path: str) -> str | None:
    # Path without ``.`` and double ``/``; None for paths outside of the root.
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".")]
    if path.startswith(("/", "\\")) or ".." in parts or any(":" in part[:2] for part in parts[:1]) or "\0" in path:
        return None
    return "/".join(parts)


@contextmanager
def archive_errors(path: Path) -> Iterator[None]:
    if not path.exists():
        raise EncoreError(f"{path} does not exist", expected="a .zip or .tar file", hint="check the path")
    try:
        yield
    except _DAMAGED as error:
        raise EncoreError(
            f"{path} cannot be read: {error}",
            expected="a complete .zip or .tar file",
            hint="download it again, or unpack it and use the folder",
        ) from error


@contextmanager
def unpacked(archive: Path, pattern: re.Pattern[str], max_bytes: int = _MOST_UNPACKED) -> Iterator[Path]:
    """Unpack an archive's matching files to a temporary folder, which has the archive's name.

    Links, devices, paths that lead out of the archive and files of more than ``max_bytes`` bytes are skipped.
    """
    with tempfile.TemporaryDirectory() as scratch:
        name = archive.name.lower()
        folder = Path(scratch) / archive.name[: -len(next(end for end in sorted(ARCHIVES)[::-1] if name.endswith(end)))]
        folder.mkdir()
        room = _MOST_UNPACKED
        with archive_errors(archive):
            for member, size, file in _members(archive):
                plain = plain_path(member)
                if file is None or not plain or not pattern.search(plain) or size > max_bytes:
                    continue
                room -= size
                if room < 0:
                    raise ValueError(f"its files have more than {_MOST_UNPACKED // 1024**3} GiB")
                (folder / plain).parent.mkdir(parents=True, exist_ok=True)
                with (folder / plain).open("wb") as target:
                    shutil.copyfileobj(file, target)
        yield folder


def _members(archive: Path) -> Iterator[tuple[str, int, IO[bytes] | None]]:
    if not zipfile.is_zipfile(archive):
        yield from tar_members(archive)
        return
    room = limit = max_unpacked(archive)
    with zipfile.ZipFile(archive) as packed:
        for count, member in enumerate(packed.infolist()):
            room -= member.file_size
            _check_bounds(count, room, limit)
            if not member.is_dir() and not stat.S_ISLNK(member.external_attr >> 16):
                with packed.open(member) as file:
                    yield member.filename, member.file_size, file


def tar_members(archive: Path) -> Iterator[tuple[str, int, IO[bytes] | None]]:
    """Yield name, size in bytes and content per member; content is None unless it is a regular file.

    The archive is streamed and bounded: by the sizes in the headers before their content is read, and by the
    unpacked bytes.
    """
    room = limit = max_unpacked(archive)
    with archive.open("rb") as raw, _decompressed(raw) as stream:
        try:
            tar = tarfile.open(fileobj=cast(Any, Bounded(stream, limit)), mode="r|")  # noqa: SIM115
        except tarfile.ReadError as error:
            raise tarfile.ReadError("it is not an archive") from error
        with tar:
            for count, member in enumerate(tar):
                room -= member.size
                _check_bounds(count, room, limit)
                yield member.name, member.size, tar.extractfile(member) if member.isreg() else None


def _decompressed(raw: BufferedReader) -> Any:
    openers: dict[bytes, Callable[[Any], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
    return next((open_(raw) for magic, open_ in openers.items() if raw.peek(6).startswith(magic)), nullcontext(raw))


def _check_bounds(count: int, room: int, limit: int) -> None:
    if count >= _MAX_MEMBERS:
        raise TooLarge(errno.EFBIG, f"it has more than {_MAX_MEMBERS:,} members")
    if room < 0:
        raise _too_large(limit)


def discard(stream: TextIO) -> None:
    """Discard what is written to a stream whose reader has left, and its buffer, which Python flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
