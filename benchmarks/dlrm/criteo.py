"""Criteo's click logs: list of files, split, and text parsing without a Python loop over rows.

A row has a label, 13 integers and 26 hexadecimal values, separated by tabs; all except the label may be empty. The
format is the same in the Terabyte logs (day_0 to day_23) and in Kaggle's train.txt.
"""

import re
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from benchmarks.common.data import text_files
from benchmarks.common.data.problem import Problem
from benchmarks.dlrm.blocks import COLUMNS, FIRST_TABLE, NUMBERS, WORD

DAYS = 24
TERABYTE = "criteo-1tb"
HELD_OUT = 1 / 7  # fraction of a single file that is held out: Kaggle's train.txt has seven days in order
SUFFIXES = (".txt", ".csv", ".tsv")
CHUNK = 8 << 20  # bytes per read
TAIL = 1 << 16  # bytes before the end of file that are searched for the last row: much longer than a row
UNPACKED = "text that can be read from any place"

TAB, NEWLINE, RETURN, MINUS = 9, 10, 13, 45
NUMBER_DIGITS = 10  # maximum digits in a number, without sign: counts in the logs fit in 32 bits
HEX_DIGITS = 8
MAX_INT = 2**31 - 1
DIGITS = np.full(256, 255, np.uint8)  # digit value by character
DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
DIGITS[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)

Report = Callable[[int], None]


# -- files ---------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """Byte range of a file, with complete lines; the last line in a file may lack a newline."""

    path: str
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class Source(NamedTuple):
    name: str
    train: Tuple[Range, ...]
    val: Tuple[Range, ...]
    description: str  # how the splits were cut, for the manifest


def list_source(
    origin: Path, validation_fraction: Optional[float], report: Report, note: Callable[[str], None]
) -> Source:
    """List Criteo's files in a folder, or a single file; ``report`` receives the number of scanned bytes.

    ``note`` receives messages about unused files.
    """
    if origin.is_file():
        return _single(origin, validation_fraction, report)
    days = {int(path.name[4:]): path for path in origin.iterdir() if re.fullmatch(r"day_\d+", path.name)}
    if days:
        return _days(days, report)
    for suffix in SUFFIXES:
        train, test = origin / f"train{suffix}", origin / f"test{suffix}"
        if not train.exists():
            continue
        if test.exists():
            text_files.check(test, UNPACKED)
            with test.open("rb") as file:
                columns = next(text_files.raw_lines(file, str(test)), b"").count(b"\t") + 1
            if columns == COLUMNS:
                return Source(
                    origin.name, (_file_range(train),), (_file_range(test),), f"{train.name}; {test.name} held out"
                )
            # Kaggle's test.txt lacks labels.
            note(f"{test} is not used: its first row has {columns} fields, and a label makes it {COLUMNS}")
        return _single(train, validation_fraction, report)
    for path in sorted(filter(Path.is_file, origin.iterdir())):
        text_files.check(path, UNPACKED)
    raise Problem(
        f"{origin} has no day_0 and no train.txt, train.csv or train.tsv",
        "Criteo's day_0 to day_23, or train.txt",
        "pass their folder",
    )


def _days(days: Dict[int, Path], report: Report) -> Source:
    last = max(days)
    missing = [f"day_{number}" for number in range(last + 1) if number not in days]
    if missing or last == 0:
        raise Problem(
            f"{', '.join(missing)} missing below day_{last}" if missing else "day_0 alone",
            "day_0 to day_23, or the first few of them: the last one is held out",
            "put the missing files into the folder",
        )
    train = tuple(_file_range(days[number]) for number in range(last))
    val_range = _file_range(days[last])
    # With the odd line: 89,137,319 lines of the Terabyte logs' day 23.
    lines = (_count_lines(val_range, report) + 1) // 2
    val_range = val_range._replace(end=_offset_of_line(val_range, lines, report))
    name = TERABYTE if last + 1 == DAYS else f"criteo-{last + 1}-days"
    return Source(name, train, (val_range,), f"days 0 to {last - 1}; the first {lines:,} lines of day {last} held out")


# Hold out a file's last lines
def _single(path: Path, fraction: Optional[float], report: Report) -> Source:
    full_range = _file_range(path)
    lines = _count_lines(full_range, report)
    val_lines = round(lines * (HELD_OUT if fraction is None else fraction))
    if not 0 < val_lines < lines:
        raise Problem(
            f"{path} has {lines:,} lines, of which {val_lines:,} are held out",
            "lines to train on and lines to evaluate on",
            "a larger file, or another --validation-fraction",
        )
    cut = _offset_of_line(full_range, lines - val_lines, report)
    name = path.stem if path.parent.name in ("", ".") else path.parent.name
    train, val = (full_range._replace(end=cut),), (full_range._replace(start=cut),)
    return Source(name, train, val, f"{path.name}, its last {val_lines:,} lines held out")


# Full range without blank lines at the end; rejects a file that is truncated within a row
def _file_range(path: Path) -> Range:
    text_files.check(path, UNPACKED)
    end, tail, rows = path.stat().st_size, b"", b""
    with path.open("rb") as file:
        while end and not rows:
            start = max(0, end - TAIL)
            file.seek(start)
            tail = file.read(end - start)
            rows = tail.rstrip(b"\r\n")
            end = start + len(rows)
    if not rows:
        raise Problem(f"{path} is empty", "rows of clicks", "download it again")
    newline = tail.find(b"\n", len(rows))
    if newline >= 0:
        return Range(str(path), 0, end + newline + 1 - len(rows))
    fields = rows.rsplit(b"\n", 1)[-1].count(TAB) + 1
    if fields != COLUMNS:
        raise Problem(
            f"{path} ends within a row: {fields} of {COLUMNS} fields, and no line end",
            "whole rows: the file was cut short",
            "download or unpack it again",
        )
    return Range(str(path), 0, end)


def _chunks(file_range: Range, report: Report) -> Iterator[bytes]:
    with open(file_range.path, "rb") as file:
        while file.tell() < file_range.end:
            chunk = file.read(min(CHUNK, file_range.end - file.tell()))
            yield chunk
            report(len(chunk))


def _count_lines(file_range: Range, report: Report) -> int:
    lines, last = 0, b"\n"
    for chunk in _chunks(file_range, report):
        lines, last = lines + chunk.count(b"\n"), chunk[-1:]
    return lines + (last != b"\n")


# Offset of the first byte after the given number of lines
def _offset_of_line(file_range: Range, line: int, report: Report) -> int:
    start = 0
    for chunk in _chunks(file_range, report):
        count = chunk.count(b"\n")
        if line <= count:
            return start + int(np.flatnonzero(np.frombuffer(chunk, np.uint8) == NEWLINE)[line - 1]) + 1
        line -= count
        start += len(chunk)
    return start


def ranges(file_ranges: Sequence[Range], size: int) -> List[Range]:
    """Split ranges into pieces of about ``size`` bytes; a line that crosses the end belongs to the piece."""
    return [
        Range(file_range.path, start, min(start + size, file_range.end))
        for file_range in file_ranges
        for start in range(file_range.start, file_range.end, size)
    ]


def read_lines(text: Range) -> Iterator[bytes]:
    """Yield complete lines in pieces: all lines that start in the range."""
    with open(text.path, "rb") as file:
        file.seek(max(0, text.start - 1))
        if text.start > 0 and file.read(1)[0] != NEWLINE:
            _end_of_line(file, text.path)
        while file.tell() < text.end:
            piece = file.read(min(CHUNK, text.end - file.tell()))
            if piece[-1] != NEWLINE:
                piece += _end_of_line(file, text.path)
            yield piece if piece[-1] == NEWLINE else piece + b"\n"


def _end_of_line(file: BinaryIO, path: str) -> bytes:
    start = file.tell()
    rest = file.readline(text_files.LONGEST_LINE)
    if len(rest) == text_files.LONGEST_LINE:
        raise text_files.too_long(path, _count_lines(Range(path, 0, start), lambda size: None))
    return rest


# -- rows ----------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Well-formed rows in a text."""

    # (COLUMNS, rows) int32: label, numbers as they are (0 where empty), categories modulo the index limit.
    columns: np.ndarray
    lines: int  # including malformed lines
    malformed: int
    first_malformed: int  # first malformed line, counted from 0; -1: none


def parse(text: bytes, index_limit: int) -> Rows:
    """Parse complete lines; malformed lines are counted and skipped. The last line must have a newline."""
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(data == NEWLINE)
    begins = np.concatenate((np.zeros(1, ends.dtype), ends[:-1] + 1)) if len(ends) else ends
    tabs = np.flatnonzero(data == TAB)
    first_tab = np.searchsorted(tabs, begins)
    good = np.searchsorted(tabs, ends) - first_tab == COLUMNS - 1
    rows = np.flatnonzero(good)
    inner = tabs[first_tab[rows][:, None] + np.arange(COLUMNS - 1)]
    # CRLF line ends
    stops = ends[rows] - (data[np.maximum(ends[rows] - 1, 0)] == RETURN)
    starts = np.concatenate((begins[rows][:, None], inner + 1), axis=1)
    lengths = np.concatenate((inner, stops[:, None]), axis=1) - starts
    values, valid = _values(data, starts, lengths, index_limit)
    good[rows] = valid
    malformed = np.flatnonzero(~good)
    first = int(malformed[0]) if len(malformed) else -1
    return Rows(np.ascontiguousarray(values[valid].T), len(ends), len(malformed), first)


# Values (rows, COLUMNS) of the fields, and which rows are valid. A missing value counts as 0, as in the reference's
# preparation.
def _values(
    data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, index_limit: int
) -> Tuple[np.ndarray, np.ndarray]:
    values, ends = np.zeros(starts.shape, np.int32), starts + lengths
    labels = data[starts[:, 0]] if len(starts) else np.zeros(0, np.uint8)
    values[:, 0] = labels == ord("1")
    numbers, categories = slice(1, FIRST_TABLE), slice(FIRST_TABLE, COLUMNS)
    negative = (lengths[:, numbers] > 0) & (data[np.minimum(starts[:, numbers], len(data) - 1)] == MINUS)
    digits = lengths[:, numbers] - negative
    totals, decimal = _digits(data, ends[:, numbers], digits, 10, NUMBER_DIGITS, np.int64)
    decimal &= ((digits > 0) | ~negative) & (totals <= MAX_INT)
    values[:, numbers] = np.where(negative, -totals, totals).clip(-MAX_INT, MAX_INT)
    hashes, hexadecimal = _digits(data, ends[:, categories], lengths[:, categories], 16, HEX_DIGITS, np.uint32)
    values[:, categories] = hashes % np.uint32(index_limit)
    valid = (lengths[:, 0] == 1) & ((labels == ord("0")) | (labels == ord("1")))
    return values, valid & decimal.all(axis=1) & hexadecimal.all(axis=1)


# Integers of type ``kind`` from the last ``lengths`` characters before ``ends``, and whether they have up to
# ``max_digits`` valid digits in ``base``
def _digits(
    data: np.ndarray, ends: np.ndarray, lengths: np.ndarray, base: int, max_digits: int, kind: Any
) -> Tuple[np.ndarray, np.ndarray]:
    fine, total = lengths <= max_digits, np.zeros(ends.shape, kind)
    for column in range(min(max_digits, int(lengths.max(initial=0)))):
        is_digit = column < lengths
        digit = DIGITS[data[np.maximum(ends - 1 - column, 0)]]  # anything where that is before the text
        fine &= ~is_digit | (digit < base)
        total += np.where(is_digit, digit, 0).astype(kind) * kind(base**column)
    return total, fine


def transform(column: int, values: np.ndarray) -> np.ndarray:
    """Return a column as training reads it: log(1 + x) for numbers, with negative numbers as 0."""
    if 1 <= column <= NUMBERS:
        return np.log1p(np.maximum(values, 0), dtype=np.float32)
    return values.astype(WORD, copy=False)
