"""The source of a preparation: Criteo's files as ranges of bytes, cut into training and evaluation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from benchmarks.common.data import source_checks
from benchmarks.common.data.problem import Problem
from benchmarks.dlrm.blocks import COLUMNS
from benchmarks.dlrm.criteo import NEWLINE, TAB

DAYS = 24
TERABYTE = "criteo-1tb"
# Samples in NVIDIA's v0.7 logs: days 0 to 22, and the first half of day 23.
TERABYTE_ROWS = {"train": 4195197692, "val": 89137319}
HELD_OUT = 1 / 7  # share of a single file that is held out: Kaggle's train.txt is seven days in order
SUFFIXES = (".txt", ".csv", ".tsv")
CHUNK = 8 << 20  # bytes read at once
TAIL = 1 << 16  # bytes at the end of a file that are searched for its last row: many times a row
UNPACKED = "text that can be read from any place"

Report = Callable[[int], None]
Note = Callable[[str], None]


class Range(NamedTuple):
    """Bytes of a file that begin and end with whole lines; the last line of a file may lack its newline."""

    path: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes of text."""
        return self.end - self.begin


class Source(NamedTuple):
    """Raw data of both splits."""

    name: str
    train: Tuple[Range, ...]
    val: Tuple[Range, ...]
    made: str  # how the splits were cut, for the passport


def list_source(origin: Path, validation_fraction: Optional[float], report: Report, note: Note) -> Source:
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
        if train.exists():
            if not test.exists():
                return _single(train, validation_fraction, report)
            columns = _columns(test)
            if columns == COLUMNS:
                splits = (_whole(train),), (_whole(test),)
                return Source(origin.name, *splits, f"{train.name}; {test.name} held out")
            # Kaggle's own test.txt has no labels.
            note(f"{test} is not used: its first row has {columns} fields, and a label makes it {COLUMNS}")
            return _single(train, validation_fraction, report)
    for path in sorted(filter(Path.is_file, origin.iterdir())):
        source_checks.refuse_compressed(path, UNPACKED)
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
    return Source(
        path.stem if path.parent.name in ("", ".") else path.parent.name,
        (whole._replace(end=cut),),
        (whole._replace(begin=cut),),
        f"{path.name}, its last {held:,} lines held out",
    )


# Return all of a file but blank lines at its end; one that ends within a row was cut short.
def _whole(path: Path) -> Range:
    source_checks.refuse_compressed(path, UNPACKED)
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


def _columns(path: Path) -> int:
    source_checks.refuse_compressed(path, UNPACKED)
    with path.open("rb") as file:
        return file.readline().count(TAB) + 1


def _count_lines(whole: Range, report: Report) -> int:
    lines, last = 0, b"\n"
    for chunk in _chunks(whole, report):
        lines, last = lines + chunk.count(b"\n"), chunk[-1:]
    return lines + (last != b"\n")


# Return the byte at which a line (from 0) begins.
def _offset_of_line(whole: Range, line: int, report: Report) -> int:
    begin = 0
    for chunk in _chunks(whole, report):
        count = chunk.count(b"\n")
        if line <= count:
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == NEWLINE)
            return begin + (int(ends[line - 1]) + 1 if line else 0)
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
