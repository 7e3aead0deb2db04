"""Ratings of MovieLens: the zip file as GroupLens gives it, its folder, or the file of ratings alone.

Every rating counts as an interaction, whatever its stars (implicit feedback; He et al. 2017, section 4.1).
"""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import BinaryIO, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.ncf.sources.interactions import (
    MLPERF_NEGATIVES,
    Interactions,
    check_pairs,
    draw_negatives,
    leave_one_out,
    untrained_note,
)

FILES = ("ratings.csv", "ratings.dat", "u.data")
"""The ratings in ml-20m (and later), in ml-1m and ml-10m, and in ml-100k."""
COLUMNS = ("user", "item", "rating", "timestamp")
CHUNK = 1 << 24
"""Bytes parsed at once."""
MOST_STARS = 5.0


class Release(NamedTuple):
    """What the README of a release says that it holds."""

    ratings: int
    users: int
    items: int


RELEASES: Dict[str, Release] = {
    "ml-20m": Release(20000263, 138493, 26744),
    "ml-1m": Release(1000209, 6040, 3706),
    "ml-100k": Release(100000, 943, 1682),
}


def read(origin: Path, name: Optional[str], seed: int) -> Interactions:
    """The interactions of a release, or, with a ``name`` of its own, of other ratings in the same format."""
    raw, where, told = _open(origin)
    with raw:
        table = _parse(raw, where)
    users, items = (np.unique(table[:, column], return_inverse=True) for column in (0, 1))
    found = Release(len(table), len(users[0]), len(items[0]))
    name = _identify(name, told, found, where)
    user_ids, item_ids = users[1].astype(np.int32), items[1].astype(np.int32)
    check_pairs(user_ids, item_ids, where)
    train_users, train_items, test_items = leave_one_out(user_ids, item_ids, table[:, 3])
    negatives = draw_negatives(train_users, train_items, test_items, found.items, MLPERF_NEGATIVES, seed)
    return Interactions(
        name=name,
        users=found.users,
        items=found.items,
        train_users=train_users,
        train_items=train_items,
        test_items=test_items,
        negatives=negatives,
        made="{}: the last rating of each user held out, {} negatives drawn".format(where, MLPERF_NEGATIVES),
        notes=untrained_note(test_items, train_items, found.items),
    )


def _open(origin: Path) -> Tuple[BinaryIO, str, str]:
    """The stream of ratings, its name for messages, and the release that the names speak of."""
    if origin.is_dir():
        found = [origin / file for file in FILES if (origin / file).is_file()]
        zips = sorted(origin.glob("ml-*.zip"))
        if not found and len(zips) == 1:
            return _open(zips[0])
        if not found:
            raise Problem(
                "{} has none of {}".format(origin, ", ".join(FILES)),
                "MovieLens as it was downloaded (zip or folder), or the NCF paper's *.train.rating, "
                "*.test.rating and *.test.negative",
                "name the folder that has them with --from",
            )
        return found[0].open("rb"), str(found[0]), origin.name
    if zipfile.is_zipfile(str(origin)):
        archive = zipfile.ZipFile(str(origin))
        inside = [entry for entry in archive.namelist() if entry.rsplit("/", 1)[-1] in FILES]
        if not inside:
            raise Problem(
                "{} has none of {}".format(origin, ", ".join(FILES)),
                "a MovieLens release",
                "name its zip file",
            )
        return archive.open(inside[0]), "{} in {}".format(inside[0], origin), inside[0].split("/")[0]  # type: ignore[return-value]
    if origin.suffix == ".zip":
        raise Problem("{} is no whole zip file".format(origin), "a MovieLens release", "download it again")
    return origin.open("rb"), str(origin), origin.parent.name


def _parse(raw: BinaryIO, where: str) -> np.ndarray:
    """(ratings, 4) float64: user, item, rating, timestamp."""
    first = raw.readline()
    separator = next((mark for mark in (b"::", b"\t", b",") if mark in first), None)
    if separator is None:
        raise Problem(
            "{} begins with {!r}".format(where, first[:60].decode("utf-8", "replace")),
            "user, item, rating and timestamp, separated by ',' or '::' or tabs",
            "name the file of ratings",
        )
    is_head = first[:1].isalpha() or first[:1] == b'"'
    tables: List[np.ndarray] = []
    line, rest = 1 + is_head, b"" if is_head else first
    while True:
        chunk = raw.read(CHUNK)
        text = rest + chunk
        end = text.rfind(b"\n") + 1 if chunk else len(text)
        if end:
            tables.append(_parse_lines(text[:end], separator, line, where))
            line += len(tables[-1])
        rest = text[end:]
        if not chunk:
            break
    if not tables:
        raise Problem("{} has no ratings".format(where), "ratings", "download it again")
    return np.concatenate(tables)


def _parse_lines(text: bytes, separator: bytes, first_line: int, where: str) -> np.ndarray:
    with warnings.catch_warnings():
        # It warns of what it cannot read; the count tells it as well.
        warnings.simplefilter("ignore", DeprecationWarning)
        values = np.fromstring(text.replace(separator, b" "), dtype=np.float64, sep=" ")
    lines = text.count(b"\n") + (not text.endswith(b"\n"))
    if len(values) == lines * len(COLUMNS):
        table = values.reshape(lines, len(COLUMNS))
        bad = (table[:, :2] < 0).any(1) | (table[:, 2] <= 0) | (table[:, 2] > MOST_STARS) | (table[:, 3] < 0)
        bad |= (table[:, :2] != np.floor(table[:, :2])).any(1)
        if not bad.any():
            return table
    for number, each in enumerate(text.splitlines(), first_line):
        if not _is_rating(each, separator):
            raise Problem(
                "{}, line {:,}: {!r}".format(where, number, each[:60].decode("utf-8", "replace")),
                "user, item, rating (0.5 to 5) and timestamp; ids not negative",
                "the file is damaged or truncated: download it again",
            )
    raise Problem("{}: lines that are no ratings".format(where), "ratings", "download it again")


def _is_rating(line: bytes, separator: bytes) -> bool:
    try:
        user, item, rating, timestamp = (float(field) for field in line.split(separator))
    except ValueError:
        return False
    whole = user == int(user) and item == int(item)
    return whole and min(user, item, timestamp) >= 0 and 0 < rating <= MOST_STARS


def _identify(name: Optional[str], told: str, found: Release, where: str) -> str:
    """The name of the data set; Problem where it is called a release that it is not."""
    counts = "{:,} ratings of {:,} users on {:,} items".format(*found)
    same = [release for release, size in RELEASES.items() if size == found]
    if same and name in (None, same[0]):
        return same[0]
    wanted = name or told
    if wanted in RELEASES:
        raise Problem(
            "{} has {}".format(where, counts),
            "{:,} ratings of {:,} users on {:,} items, as {} has".format(*RELEASES[wanted], wanted),
            "download {} again, or give the data set a name of its own with --name".format(wanted),
        )
    if name is None:
        raise Problem(
            "{} has {}: no known release of MovieLens".format(where, counts),
            ", ".join(RELEASES),
            "to use it as a data set of your own: --name NAME",
        )
    return name
