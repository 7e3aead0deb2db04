"""Criteo's click logs: which files there are, how they split, and their text parsed without a Python loop over rows.

A row is a label, 13 integers and 26 hexadecimal values, separated by tabs; any of them but the label may be
empty. The Terabyte logs (day_0 to day_23) and Kaggle's train.txt have it alike.
"""

import re
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from benchmarks.common.data import text_files
from benchmarks.common.data.problem import Problem
from benchmarks.dlrm.blocks import COLUMNS, FIRST_TABLE, NUMBERS, WORD

DAYS = 24
TERABYTE = "criteo-1tb"
# Samples in NVIDIA's v0.7 logs: days 0 to 22, and the first half of day 23.
TERABYTE_ROWS = {"train": 4195197692, "val": 89137319}
HELD_OUT = 1 / 7  # share of a single file that is held out: Kaggle's train.txt is seven days in order
SUFFIXES = (".txt", ".csv", ".tsv")
CHUNK = 8 << 20  # bytes read at once
TAIL = 1 << 16  # bytes at the end of a file that are searched for its last row: many times a row
UNPACKED = "text that can be read from any place"

TAB, NEWLINE, RETURN, MINUS = 9, 10, 13, 45
NUMBER_DIGITS = 10  # characters of the largest number next to its sign: the logs' counts fit in 32 bits
HEX_DIGITS = 8
MAX_INT = 2**31 - 1
DIGITS = np.full(256, 255, np.uint8)  # value of a character
DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
DIGITS[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)

Report = Callable[[int], None]


# -- files ---------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """Bytes of a file that begin and end with whole lines; the last line of a file may lack its newline."""

    path: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


class Source(NamedTuple):
    name: str
    train: Tuple[Range, ...]
    val: Tuple[Range, ...]
    made: str  # how the splits were cut, for the manifest


def list_source(
    origin: Path, validation_fraction: Optional[float], report: Report, note: Callable[[str], None]
) -> Source:
    """Find Criteo's files in a folder, or take the file that is named; ``report`` gets the bytes looked at.

    ``note`` gets what is there and not used.
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
                columns = file.readline().count(b"\t") + 1
            if columns == COLUMNS:
                return Source(origin.name, (_whole(train),), (_whole(test),), f"{train.name}; {test.name} held out")
            # Kaggle's own test.txt has no labels.
            note(f"{test} is not used: its first row has {columns} fields, and a label makes it {COLUMNS}")
        return _single(train, validation_fraction, report)
    for path in sorted(filter(Path.is_file, origin.iterdir())):
        text_files.check(path, UNPACKED)
    raise Problem(
        f"{origin} has no day_0 and no train.txt, train.csv or train.tsv",
        "Criteo's day_0 to day_23, or train.txt",
        "name their folder as the raw data",
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
    train = tuple(_whole(days[number]) for number in range(last))
    held = _whole(days[last])
    # With the odd line: 89,137,319 lines of the Terabyte logs' day 23.
    lines = (_count_lines(held, report) + 1) // 2
    held = held._replace(end=_offset_of_line(held, lines, report))
    name = TERABYTE if last + 1 == DAYS else f"criteo-{last + 1}-days"
    return Source(name, train, (held,), f"days 0 to {last - 1}; the first {lines:,} lines of day {last} held out")


# Hold out the last lines of one file.
def _single(path: Path, fraction: Optional[float], report: Report) -> Source:
    whole = _whole(path)
    lines = _count_lines(whole, report)
    held = round(lines * (HELD_OUT if fraction is None else fraction))
    if not 0 < held < lines:
        raise Problem(
            f"{path} has {lines:,} lines, of which {held:,} are held out",
            "lines to train on and lines to evaluate on",
            "a larger file, or another --validation-fraction",
        )
    cut = _offset_of_line(whole, lines - held, report)
    name = path.stem if path.parent.name in ("", ".") else path.parent.name
    train, val = (whole._replace(end=cut),), (whole._replace(begin=cut),)
    return Source(name, train, val, f"{path.name}, its last {held:,} lines held out")


# All of a file but blank lines at its end; one that ends within a row was cut short.
def _whole(path: Path) -> Range:
    text_files.check(path, UNPACKED)
    end, tail, rows = path.stat().st_size, b"", b""
    with path.open("rb") as file:
        while end and not rows:
            begin = max(0, end - TAIL)
            file.seek(begin)
            tail = file.read(end - begin)
            rows = tail.rstrip(b"\r\n")
            end = begin + len(rows)
    if not rows:
        raise Problem(f"{path} is empty", "rows of clicks", "download it again")
    newline = tail.find(b"\n", len(rows))
    if newline >= 0:
        return Range(str(path), 0, end + newline + 1 - len(rows))
    fields = rows.rsplit(b"\n", 1)[-1].count(TAB) + 1
    if fields != COLUMNS:
        found = f"{path} ends within a row: {fields} of {COLUMNS} fields, and no line end"
        raise Problem(found, "whole rows: the file was cut short", "download or unpack it again")
    return Range(str(path), 0, end)


def _chunks(whole: Range, report: Report) -> Iterator[bytes]:
    with open(whole.path, "rb") as file:
        while file.tell() < whole.end:
            chunk = file.read(min(CHUNK, whole.end - file.tell()))
            yield chunk
            report(len(chunk))


def _count_lines(whole: Range, report: Report) -> int:
    lines, last = 0, b"\n"
    for chunk in _chunks(whole, report):
        lines, last = lines + chunk.count(b"\n"), chunk[-1:]
    return lines + (last != b"\n")


# The byte at which a line (from 1: what is behind that many lines) begins.
def _offset_of_line(whole: Range, line: int, report: Report) -> int:
    begin = 0
    for chunk in _chunks(whole, report):
        count = chunk.count(b"\n")
        if line <= count:
            return begin + int(np.flatnonzero(np.frombuffer(chunk, np.uint8) == NEWLINE)[line - 1]) + 1
        line -= count
        begin += len(chunk)
    return begin


def ranges(whole: Sequence[Range], size: int) -> List[Range]:
    """Cut ranges into pieces of about ``size`` bytes; a piece takes the line that crosses its end."""
    return [
        Range(each.path, begin, min(begin + size, each.end))
        for each in whole
        for begin in range(each.begin, each.end, size)
    ]


def read_lines(text: Range) -> Iterator[bytes]:
    """Yield pieces of whole lines: those that begin in the range, up to the line that crosses its end."""
    with open(text.path, "rb") as file:
        file.seek(max(0, text.begin - 1))
        if text.begin > 0 and file.read(1)[0] != NEWLINE:
            file.readline()
        while file.tell() < text.end:
            piece = file.read(min(CHUNK, text.end - file.tell()))
            if piece[-1] != NEWLINE:
                piece += file.readline()
            yield piece if piece[-1] == NEWLINE else piece + b"\n"


# -- rows ----------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The well-formed rows of a piece of text."""

    # (COLUMNS, rows) int32: label, numbers as they are (0 where empty), categories modulo the index limit.
    columns: np.ndarray
    lines: int  # of the text, malformed ones included
    malformed: int
    first_malformed: int  # number of the first malformed line, from 0; -1 when there is none


def parse(text: bytes, index_limit: int) -> Rows:
    """Read whole lines; what is no row is counted and left out. The last line needs its newline."""
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(data == NEWLINE)
    begins = np.concatenate((np.zeros(1, ends.dtype), ends[:-1] + 1)) if len(ends) else ends
    tabs = np.flatnonzero(data == TAB)
    first_tab = np.searchsorted(tabs, begins)
    good = np.searchsorted(tabs, ends) - first_tab == COLUMNS - 1
    rows = np.flatnonzero(good)
    inner = tabs[first_tab[rows][:, None] + np.arange(COLUMNS - 1)]
    # Windows' line ends.
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


# Whole numbers of type ``kind`` by the last ``lengths`` characters before ``ends``, and which have at most ``most``
# digits of ``base`` and nothing else.
def _digits(
    data: np.ndarray, ends: np.ndarray, lengths: np.ndarray, base: int, most: int, kind: Any
) -> Tuple[np.ndarray, np.ndarray]:
    fine, total = lengths <= most, np.zeros(ends.shape, kind)
    for place in range(min(most, int(lengths.max(initial=0)))):
        inside = place < lengths
        digit = DIGITS[data[np.maximum(ends - 1 - place, 0)]]  # anything where that is before the text
        fine &= ~inside | (digit < base)
        total += np.where(inside, digit, 0).astype(kind) * kind(base**place)
    return total, fine


def transformed(column: int, values: np.ndarray) -> np.ndarray:
    """Values of a column as training reads them: numbers become log(1 + x), negative ones count as 0."""
    if 1 <= column <= NUMBERS:
        return np.log1p(np.maximum(values, 0), dtype=np.float32)
    return values.astype(WORD, copy=False)
