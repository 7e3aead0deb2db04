"""Ratings of MovieLens: the zip file as GroupLens gives it, its folder, or the file of ratings alone.

A line has user, item, stars and time, separated by ',' or '::' or tabs, with or without a header. Columns go by the
header's names where there is one, else by their order; further columns are ignored. Ids are whole numbers or any other
text. A byte order mark, quotes, Windows' line ends and blank lines do not matter.
"""

import csv
import io
import math
import re
import zipfile
from array import array
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from benchmarks.common.data import text_files
from benchmarks.common.data.problem import Problem

FILES = ("ratings.csv", "ratings.dat", "u.data")  # in ml-20m (and later), in ml-1m and ml-10m, and in ml-100k
# Names that a header may have for each column; upper and lower case are alike.
NAMES = {
    "user": ("userid", "user_id", "user", "uid"),
    "item": ("movieid", "movie_id", "itemid", "item_id", "item", "movie"),
    "rating": ("rating", "stars"),
    "timestamp": ("timestamp", "time"),
}
# Hint for ratings in the order in which they were made.
NO_TIMES = "; without times, number the lines in a column timestamp"
SHOWN = 60  # characters of a line in a message
WHOLE_NUMBER = re.compile(r"-?[0-9]+")


class Ratings(NamedTuple):
    """Ratings in the order of the file; users and items count from 0, in the order of their ids."""

    users: np.ndarray
    items: np.ndarray
    times: np.ndarray
    user_ids: Any  # a sequence. As in the file: whole numbers where all of them are, else text
    item_ids: Any
    lines: np.ndarray  # number of the line of each rating, from 1


class Release(NamedTuple):
    """The size of a release by its README."""

    ratings: int
    users: int
    items: int

    def __str__(self) -> str:
        return f"{self.ratings:,} ratings of {self.users:,} users on {self.items:,} items"


RELEASES = {
    "ml-20m": Release(20000263, 138493, 26744),
    "ml-1m": Release(1000209, 6040, 3706),
    "ml-100k": Release(100000, 943, 1682),
}


def read(origin: Path, name: Optional[str]) -> Tuple[str, Ratings, str]:
    """Return the name and the ratings of a release or of your own; the default name is that of the file or folder.

    The third value names the file in messages.

    Raises:
        Problem: they cannot be read, or are called a release that they are not.
    """
    path = _find(origin)
    with text_files.undamaged(path, "a MovieLens release"):
        raw, where, supposed = _open(path)
        with raw:
            ratings = parse(raw, where)
    found = Release(len(ratings.users), len(ratings.user_ids), len(ratings.item_ids))
    same = [release for release, size in RELEASES.items() if size == found]
    if same and name in (None, same[0]):
        return same[0], ratings, where
    wanted = name or (supposed if supposed in RELEASES else origin.resolve().stem)
    if wanted in RELEASES:
        hint = f"download {wanted} again, or give the data set a name of its own with --name"
        raise Problem(f"{where} has {found}", f"{RELEASES[wanted]}, as {wanted} has", hint)
    return wanted, ratings, where


def _find(origin: Path) -> Path:
    if origin.is_dir():
        found = [origin / file for file in FILES if (origin / file).is_file()]
        zips = sorted(origin.glob("ml-*.zip"))
        if not found and len(zips) != 1:
            raise Problem(
                f"{origin} has none of {', '.join(FILES)}",
                "MovieLens as it was downloaded (zip or folder), or the NCF paper's *.train.rating, "
                "*.test.rating and *.test.negative",
                "name the folder that has them as the raw data",
            )
        return (found or zips)[0]
    return origin


# Return the ratings, their name for messages, and the release that is named in the path
def _open(origin: Path) -> Tuple[BinaryIO, str, str]:
    if zipfile.is_zipfile(str(origin)):
        archive = zipfile.ZipFile(str(origin))
        inside = [entry for entry in archive.namelist() if entry.rsplit("/", 1)[-1] in FILES]
        if not inside:
            raise Problem(f"{origin} has none of {', '.join(FILES)}", "a MovieLens release", "name its zip file")
        # Buffered: a ZipExtFile reads lines in Python.
        stream = io.BufferedReader(archive.open(inside[0]))  # type: ignore[type-var]
        return stream, f"{inside[0]} in {origin}", inside[0].split("/")[0]
    if origin.suffix == ".zip":
        raise zipfile.BadZipFile("not a complete zip file")
    text_files.check(origin, "ratings as text, or a zip file of MovieLens")
    return origin.open("rb"), str(origin), origin.parent.name


# -- lines ---------------------------------------------------------------------------------------------


# Numbers for ids, in the order in which they come.
class _Codes:
    def __init__(self) -> None:
        self.known: Dict[str, int] = {}
        self.of_rows = array("q")

    def add(self, text: str) -> None:
        self.of_rows.append(self.known.setdefault(text, len(self.known)))

    def in_order(self) -> Tuple[np.ndarray, Sequence[object]]:
        """The number of each row's id among all ids in order, and the ids; 007 is 7 where all are whole numbers."""
        ids: List[Any] = list(self.known)
        if all(map(WHOLE_NUMBER.fullmatch, ids)):
            ids = list(map(int, ids))
        ordered = sorted(set(ids))
        places = {each: place for place, each in enumerate(ordered)}
        renumbered = np.array([places[each] for each in ids], np.int64)
        return renumbered[np.frombuffer(self.of_rows, np.int64)], ordered


def parse(raw: BinaryIO, where: str) -> Ratings:
    """Read all ratings of ``raw``; Problem that names the line, as ``where`` has it, of the first that is none."""
    first = next((line for line in raw if line.lstrip(b"\xef\xbb\xbf").strip()), b"")
    separator = next((mark for mark in ("::", "\t", ",") if mark.encode() in first), None)
    if separator is None:
        raise Problem(
            f"{where} begins with {_shown(first.decode('utf-8', 'replace'))}",
            "user, item, rating and timestamp, separated by ',' or '::' or tabs",
            "name the file of ratings",
        )
    raw.seek(0)
    users, items, times, numbers = _Codes(), _Codes(), array("d"), array("q")
    columns: Sequence[int] = ()
    for number, row in _rows(raw, separator, where):
        if not columns:
            header = _header(row, where)
            columns = header or (0, 1, 2, 3)
            if header:
                continue
        found = _rating(row, columns)
        if found is None:
            raise Problem(
                f"{where}, line {number:,}: {_shown(separator.join(row))}",
                "user, item, rating (any number above 0) and timestamp (seconds, by which the last is found); "
                "ids not negative",
                "correct or remove the line; turn dates into seconds (date -d DATE +%s)" + NO_TIMES,
            )
        users.add(found[0])
        items.add(found[1])
        times.append(found[2])
        numbers.append(number)
    if not numbers:
        raise Problem(f"{where} has no ratings", "ratings", "name a file that has some")
    of_users, user_ids = users.in_order()
    of_items, item_ids = items.in_order()
    return Ratings(of_users, of_items, np.array(times), user_ids, item_ids, np.array(numbers))


# Yield the fields of each line that is not blank, with its number.
def _rows(raw: BinaryIO, separator: str, where: str) -> Iterator[Tuple[int, List[str]]]:
    # An id in another encoding stays what it is.
    texts = (line.decode("utf-8", "surrogateescape") for line in raw)
    whole = chain([next(texts).lstrip("\ufeff")], texts)
    lines = (line.replace("::", "\t") if separator == "::" else line for line in whole)
    reader, number = csv.reader(lines, delimiter="\t" if separator == "::" else separator, strict=True), 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            hint = "correct or remove the line"
            raise Problem(f"{where}, line {number:,}: {error}", "whole lines, quotes closed", hint) from None
        if row is None:
            return
        if any(field.strip() for field in row):
            yield number, [field.strip() for field in row]
        number = reader.line_num + 1


# Places of user, item, rating and timestamp by the names of a header; none where the row has no such name.
def _header(row: Sequence[str], where: str) -> Sequence[int]:
    meaning = {name: column for column, known in NAMES.items() for name in known}
    meanings = [meaning.get(name.strip('"').lower()) for name in row]
    if not any(meanings):
        return ()
    missing = [name for name in NAMES if name not in meanings]
    if missing:
        raise Problem(
            f"{where} has no column {missing[0]} in its header: {_shown(', '.join(row))}",
            f"one of {', '.join(NAMES[missing[0]])}",
            "rename the column in the header" + NO_TIMES * (missing[0] == "timestamp"),
        )
    return [meanings.index(name) for name in NAMES]


# User, item and time of a row, or None where it is no rating.
def _rating(row: Sequence[str], columns: Sequence[int]) -> Optional[Tuple[str, str, float]]:
    try:
        user, item, stars, time = (row[column] for column in columns)
        values = float(stars), float(time)
    except (IndexError, ValueError):
        return None
    fits = values[0] > 0 and values[1] >= 0 and all(map(math.isfinite, values))
    bad_ids = any(not each or (each[0] == "-" and WHOLE_NUMBER.fullmatch(each)) for each in (user, item))
    return (user, item, values[1]) if fits and not bad_ids else None


def _shown(text: str) -> str:
    return repr(text.rstrip("\r\n")[:SHOWN].encode("utf-8", "replace").decode("utf-8"))
