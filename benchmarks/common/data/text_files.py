"""Text and JSON lines of raw data: UTF-8, optionally with a byte order mark, plain or packed by gzip, bzip2 or xz."""

import bz2
import gzip
import json
import lzma
import re
import tarfile
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO, Callable, Collection, Dict, Iterator, List, Mapping, Sequence, Set, Tuple

from benchmarks.common.data.problem import Problem
from benchmarks.common.data.source_checks import LISTED

OPENERS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
PACKED_SUFFIXES = (*OPENERS, ".zst")  # no pinned package reads Zstandard
# Magic numbers of compressed files (RFC 1952 and the format specifications), and commands to unpack them
MAGIC = {
    b"\x1f\x8b": ("gzip", ".gz", "gunzip"),
    b"BZh": ("bzip2", ".bz2", "bunzip2"),
    b"\xfd7zXZ": ("xz", ".xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", ".zst", "zstd -d"),
    b"PK\x03\x04": ("zip", ".zip", "unzip"),
    b"\x04\x22\x4d\x18": ("lz4", ".lz4", "unlz4"),
}
DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    EOFError,
    zlib.error,
    gzip.BadGzipFile,
    lzma.LZMAError,
    RuntimeError,  # zipfile, for encrypted members and unknown compression
)
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")  # little-endian UTF-32 starts with the first one
# Bytes of a line, or of a file that is parsed at once: 32 times MediaWiki's limit of a page, 2 MiB. Longer ones are not
# text, or were unpacked from a few bytes, and would fill the memory.
LONGEST_LINE = 1 << 26
HEAD_BYTES = 1 << 12  # bytes read to detect the encoding
SHARD = re.compile(r"(.*?)-?(\d+)-of-(\d+)(.*)")


def plain_name(path: Path) -> str:
    """Return the file name without its compression suffix."""
    return path.stem if path.suffix in PACKED_SUFFIXES else path.name


def open_binary(path: Path) -> BinaryIO:
    opener = OPENERS.get(path.suffix)
    file: BinaryIO = opener(path, "rb") if opener else path.open("rb")
    return file


def too_long(name: str, number: int) -> Problem:
    return Problem(
        f"{name}, line {number:,}: longer than {LONGEST_LINE:,} bytes",
        "lines of text",
        "check how the file was written",
    )


def raw_lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield lines with their ends; Problem if one is longer than LONGEST_LINE. ``name``: file name in messages."""
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
        if len(line) > LONGEST_LINE:
            raise too_long(name, number)
        yield line


def read_bytes(path: Path, longest: int = LONGEST_LINE) -> bytes:
    """Return the content of a file that is parsed at once; Problem if it has more than ``longest`` bytes."""
    with path.open("rb") as file:
        content = file.read(longest + 1)
    if len(content) > longest:
        raise Problem(f"{path} has more than {longest:,} bytes", "a smaller file", "check how the file was written")
    return content


@contextmanager
def undamaged(path: Path, expected: str = "a complete file", position: Callable[[], str] = str) -> Iterator[None]:
    """Raise a Problem that names the file if an archive or a compressed file is damaged; ``position`` is appended."""
    try:
        yield
    except (OSError, *DAMAGED) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Problem(
            f"{path} is damaged{position()}: {error or type(error).__name__}", expected, "copy or download it again"
        ) from None


def refuse_compressed(path: Path, expected: str, unpacks: Collection[str] = ()) -> None:
    """Reject a compressed file, except one with a suffix in ``unpacks``."""
    with path.open("rb") as file:
        head = file.read(max(map(len, MAGIC)))
    for magic, (kind, suffix, command) in MAGIC.items():
        if head.startswith(magic) and not (suffix in unpacks and path.suffix == suffix):
            target = path if path.suffix == suffix else path.with_name(f"{path.name}{suffix}")
            renaming = "" if target == path else f"mv {quote(str(path))} {quote(str(target))} && "
            raise Problem(f"{path} is compressed by {kind}", expected, f"{renaming}{command} {quote(str(target))}")


def refuse_utf16(head: bytes, name: str) -> None:
    """Reject a UTF-16 byte order mark and NUL, which occurs in every ASCII letter of UTF-16."""
    if head.startswith(UTF16_MARKS) or b"\0" in head:
        target = "UNPACKED" if name.endswith(PACKED_SUFFIXES) else quote(name)
        raise Problem(
            f"{name} is UTF-16 or binary: it starts with {head[:8]!r}",
            "UTF-8 text",
            f"convert it: iconv -f utf-16 -t utf-8 {target} > NEW",
        )


def check(path: Path, expected: str = "UTF-8 text", unpacks: Collection[str] = ()) -> None:
    """Reject a file that is UTF-16, or compressed without a suffix in ``unpacks``; reads only its head."""
    refuse_compressed(path, expected, unpacks)
    with undamaged(path), open_binary(path) as file:
        refuse_utf16(file.read(HEAD_BYTES), str(path))


def lines(path: Path, expected: str = "UTF-8 text") -> Iterator[Tuple[int, str]]:
    """Yield line number, from 1, and text.

    Raises:
        Problem: the file is damaged or not UTF-8.
    """
    refuse_compressed(path, expected, OPENERS)
    number = size = 0
    with undamaged(path, expected, lambda: f" after line {number:,} ({size:,} bytes)"), open_binary(path) as file:
        for number, line in enumerate(raw_lines(file, str(path)), 1):
            size += len(line)
            if number == 1:
                refuse_utf16(line[:HEAD_BYTES], str(path))
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise not_utf8((path, str(path))) from None


def json_lines(path: Path, expected: str) -> Iterator[Tuple[int, Dict[str, Any]]]:
    """Yield line number and object for all nonempty lines.

    Raises:
        Problem: the file is damaged or not UTF-8, or a line is not a JSON object.
    """
    for number, line in lines(path, expected):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise Problem(f"{path}, line {number:,}: not a JSON object", expected, "write one object per line")
        yield number, row


def load_json(data: bytes, name: str) -> Any:
    """Parse a JSON document; Problem if it is UTF-16.

    Raises:
        ValueError: it is not UTF-8 or not JSON.
    """
    refuse_utf16(data[:HEAD_BYTES], name)
    try:
        return json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def text_of(row: Mapping[str, Any], key: str, location: str) -> str:
    """Return a string from a JSON object.

    Raises:
        Problem: missing, not a string, or with an unpaired surrogate, which tokenizers and files reject.
    """
    value = row.get(key)
    if not isinstance(value, str):
        kind = f"is {type(value).__name__}" if key in row else "is missing"
        raise Problem(f"{location}: {key} {kind}", f'a string: {{"{key}": "..."}}', "fix it")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Problem(
            f"{location}: {key} has an unpaired surrogate, U+{ord(value[error.start]):X}, at character {error.start:,}",
            "valid Unicode",
            "write the pair, or replace it by U+FFFD",
        ) from None
    return value


def refuse_packed_copy(path: Path, expected: str) -> None:
    """Reject a missing file whose compressed form exists."""
    for suffix in PACKED_SUFFIXES:
        packed = path.with_name(f"{path.name}{suffix}")
        if not path.exists() and packed.is_file():
            check(packed, expected)


def check_shards(paths: Sequence[Path]) -> None:
    """Reject a file in two forms, and an incomplete set of files that are called ``...-00000-of-00002...``."""
    shards: Dict[Tuple[str, str, str], Set[int]] = {}
    plain: Dict[Path, Path] = {}
    for path in paths:
        other = plain.setdefault(path.with_name(plain_name(path)), path)
        if other != path:
            raise Problem(f"{other} and {path} have the same content", "one of them", "move the other one away")
        match = SHARD.fullmatch(path.name)
        if match:
            shards.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    for (prefix, total, suffix), numbers in shards.items():
        first = int(max(numbers) == int(total))  # Some tools number shards from 1
        missing = [number for number in range(first, int(total) + first) if number not in numbers]
        if missing and max(numbers) < int(total) + first:
            problem = f"{paths[0].parent} has {len(numbers):,} of {int(total):,} files {prefix}*-of-{total}{suffix}"
            raise Problem(
                f"{problem}, number {missing[0]:,} is missing",
                "all of them",
                "copy the missing files, or rename the files of a subset",
            )


def not_utf8(*files: Tuple[Path, str]) -> Problem:
    """Return the problem for text that is not UTF-8, with all affected lines; ``files``: path and displayed name."""
    problems: List[str] = []
    mixed, last = False, ""
    for path, name in files:
        listed: List[str] = []
        wrong = good = 0
        with open_binary(path) as file:
            for number, line in enumerate(raw_lines(file, name), 1):
                try:
                    good += not line.decode("utf-8").isascii()
                except UnicodeDecodeError as error:
                    wrong += 1
                    if wrong <= LISTED:
                        listed.append(f"line {number:,}: byte {line[error.start]:#04x} at {error.start + 1}")
        if wrong:
            rest = [f"and {wrong - LISTED:,} more"] if wrong > LISTED else []
            problems.append("\n    ".join([f"{name}: lines that are not UTF-8: {wrong:,}", *listed, *rest]))
            mixed, last = mixed or good > 0, name
    hint = f"convert the file from its encoding, such as iconv -f latin1 -t utf-8 {quote(last)} > NEW"
    if mixed:
        hint = "fix or remove these lines, in both files if aligned; do not convert the others, which are UTF-8"
    return Problem("\n  ".join(problems), "UTF-8 text", hint)
