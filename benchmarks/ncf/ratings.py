"""MovieLens ratings: the zip file from GroupLens, an unpacked folder, or only the file of ratings.

A line has user, item, stars and time, separated by ',' or '::' or tabs, with or without a header. Columns are
identified by the header, otherwise by order; other columns are ignored. Ids are integers or arbitrary text. Byte
order marks, quotes, CRLF line ends and blank lines are accepted.
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
# Column names in headers, case-insensitive
NAMES = {
    "user": ("userid", "user_id", "user", "uid"),
    "item": ("movieid", "movie_id", "itemid", "item_id", "item", "movie"),
    "rating": ("rating", "stars"),
    "timestamp": ("timestamp", "time"),
}
# Hint for ratings without times in chronological order
NO_TIMES = "; without times, number the lines in a column timestamp"
MAX_QUOTE = 60  # maximum line length in a message, in characters
WHOLE_NUMBER = re.compile(r"-?[0-9]+")


class Ratings(NamedTuple):
    """Ratings in the order of the file; users and items are numbered from 0 in the order of ids."""

    users: np.ndarray
    items: np.ndarray
    times: np.ndarray
    user_ids: Any  # sequence of the ids in the file: integers if all are integers, otherwise text
    item_ids: Any
    lines: np.ndarray  # line number by rating, from 1


class Release(NamedTuple):
    """Release size according to the README."""

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
    """Return name, ratings and file name for messages; the default name is from the file or folder.

    Raises:
        Problem: the ratings cannot be read, or do not have the size of the named release.
    """
    path = _find(origin)
    with text_files.undamaged(path, "a MovieLens release"):
        raw, source, supposed = _open(path)
        with raw:
            ratings = parse(raw, source)
    actual = Release(len(ratings.users), len(ratings.user_ids), len(ratings.item_ids))
    same = [release for release, size in RELEASES.items() if size == actual]
    if same and name in (None, same[0]):
        return same[0], ratings, source
    release_name = name or (supposed if supposed in RELEASES else origin.resolve().stem)
    if release_name in RELEASES:
        raise Problem(
            f"{source} has {actual}",
            f"{RELEASES[release_name]}, as {release_name} has",
            f"download {release_name} again, or give the data set another name with --name",
        )
    return release_name, ratings, source


def _find(origin: Path) -> Path:
    if origin.is_dir():
        files = [origin / file for file in FILES if (origin / file).is_file()]
        zips = sorted(origin.glob("ml-*.zip"))
        if not files and len(zips) != 1:
            for file in FILES:
                text_files.refuse_packed_copy(origin / file, "ratings as text, or a zip file of MovieLens")
            raise Problem(
                f"{origin} has none of {', '.join(FILES)}",
                "MovieLens as it was downloaded (zip or folder), or the NCF paper's *.train.rating, "
                "*.test.rating and *.test.negative",
                "pass the folder that contains them",
            )
        return (files or zips)[0]
    return origin


# Return the ratings, a name for messages, and the release name in the path
def _open(origin: Path) -> Tuple[BinaryIO, str, str]:
    if zipfile.is_zipfile(str(origin)):
        archive = zipfile.ZipFile(str(origin))
        members = [entry for entry in archive.namelist() if entry.rsplit("/", 1)[-1] in FILES]
        if not members:
            raise Problem(f"{origin} has none of {', '.join(FILES)}", "a MovieLens release", "name its zip file")
        # Buffered: a ZipExtFile reads lines in Python.
        stream = io.BufferedReader(archive.open(members[0]))  # type: ignore[type-var]
        return stream, f"{members[0]} in {origin}", members[0].split("/")[0]
    if origin.suffix == ".zip":
        raise zipfile.BadZipFile("not a complete zip file")
    text_files.check(origin, "ratings as text, or a zip file of MovieLens")
    return origin.open("rb"), str(origin), origin.parent.name


# -- lines ---------------------------------------------------------------------------------------------


# Numbers for ids, in order of appearance
class _Codes:
    def __init__(self) -> None:
        self.known: Dict[str, int] = {}
        self.row_numbers = array("q")

    def add(self, text: str) -> None:
        self.row_numbers.append(self.known.setdefault(text, len(self.known)))

    def renumber(self) -> Tuple[np.ndarray, Sequence[object]]:
        """Return the number of the row ids in sorted order, and the sorted ids; 007 is 7 if all ids are integers."""
        ids: List[Any] = list(self.known)
        if all(map(WHOLE_NUMBER.fullmatch, ids)):
            ids = list(map(int, ids))
        ordered = sorted(set(ids))
        rank_of = {id_: rank for rank, id_ in enumerate(ordered)}
        renumbered = np.array([rank_of[id_] for id_ in ids], np.int64)
        return renumbered[np.frombuffer(self.row_numbers, np.int64)], ordered


def parse(raw: BinaryIO, source: str) -> Ratings:
    """Read all ratings in ``raw``; ``source`` is the file name in messages.

    Raises:
        Problem: a line is not a rating; the message has the number of the first one.
    """
    first = next((line for line in text_files.raw_lines(raw, source) if line.lstrip(b"\xef\xbb\xbf").strip()), b"")
    separator = next((mark for mark in ("::", "\t", ",") if mark.encode() in first), None)
    if separator is None:
        raise Problem(
            f"{source} begins with {_quote(first.decode('utf-8', 'replace'))}",
            "user, item, rating and timestamp, separated by ',' or '::' or tabs",
            "pass the file of ratings",
        )
    raw.seek(0)
    users, items, times, numbers = _Codes(), _Codes(), array("d"), array("q")
    columns: Sequence[int] = ()
    for number, row in _rows(raw, separator, source):
        if not columns:
            header = _header(row, source)
            columns = header or (0, 1, 2, 3)
            if header:
                continue
        rating = _rating(row, columns)
        if rating is None:
            raise Problem(
                f"{source}, line {number:,}: {_quote(separator.join(row))}",
                "user, item, rating (any number above 0) and timestamp (seconds; the last rating is held out); "
                "ids not negative",
                "correct or remove the line; turn dates into seconds (date -d DATE +%s)" + NO_TIMES,
            )
        users.add(rating[0])
        items.add(rating[1])
        times.append(rating[2])
        numbers.append(number)
    if not numbers:
        raise Problem(f"{source} has no ratings", "ratings", "pass a file with ratings")
    of_users, user_ids = users.renumber()
    of_items, item_ids = items.renumber()
    return Ratings(of_users, of_items, np.array(times), user_ids, item_ids, np.array(numbers))


# Yield line number and fields of all non-blank lines
def _rows(raw: BinaryIO, separator: str, source: str) -> Iterator[Tuple[int, List[str]]]:
    # Ids in other encodings are preserved.
    texts = (line.decode("utf-8", "surrogateescape") for line in text_files.raw_lines(raw, source))
    all_texts = chain([next(texts).lstrip("\ufeff")], texts)
    lines = (line.replace("::", "\t") if separator == "::" else line for line in all_texts)
    reader, number = csv.reader(lines, delimiter="\t" if separator == "::" else separator, strict=True), 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise Problem(
                f"{source}, line {number:,}: {error}", "whole lines, quotes closed", "correct or remove the line"
            ) from None
        if row is None:
            return
        if any(field.strip() for field in row):
            yield number, [field.strip() for field in row]
        number = reader.line_num + 1


# Columns of user, item, rating and timestamp according to the header; empty if the row is not a header
def _header(row: Sequence[str], source: str) -> Sequence[int]:
    meaning = {name: column for column, aliases in NAMES.items() for name in aliases}
    meanings = [meaning.get(name.strip('"').lower()) for name in row]
    if not any(meanings):
        return ()
    missing = [name for name in NAMES if name not in meanings]
    if missing:
        raise Problem(
            f"{source} has no column {missing[0]} in its header: {_quote(', '.join(row))}",
            f"one of {', '.join(NAMES[missing[0]])}",
            "rename the column in the header" + NO_TIMES * (missing[0] == "timestamp"),
        )
    return [meanings.index(name) for name in NAMES]


# A row's user, item and time, or None if the row is malformed
def _rating(row: Sequence[str], columns: Sequence[int]) -> Optional[Tuple[str, str, float]]:
    try:
        user, item, stars, time = (row[column] for column in columns)
        values = float(stars), float(time)
    except (IndexError, ValueError):
        return None
    fits = values[0] > 0 and values[1] >= 0 and all(map(math.isfinite, values))
    bad_ids = any(not id_ or (id_[0] == "-" and WHOLE_NUMBER.fullmatch(id_)) for id_ in (user, item))
    return (user, item, values[1]) if fits and not bad_ids else None


def _quote(text: str) -> str:
    return repr(text.rstrip("\r\n")[:MAX_QUOTE].encode("utf-8", "replace").decode("utf-8"))
