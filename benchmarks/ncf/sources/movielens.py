"""Ratings of MovieLens: the zip file as GroupLens gives it, its folder, or the file of ratings alone.

Every rating counts as an interaction, whatever its stars (implicit feedback; He et al. 2017, section 4.1).
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple, Optional, Tuple

from benchmarks.common.data.problem import Problem
from benchmarks.ncf.sources.interactions import MLPERF_NEGATIVES, Interactions, leave_one_out
from benchmarks.ncf.sources.ratings import parse

# The ratings in ml-20m (and later), in ml-1m and ml-10m, and in ml-100k.
FILES = ("ratings.csv", "ratings.dat", "u.data")


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


def read(origin: Path, name: Optional[str], seed: int) -> Interactions:
    """Return the interactions of a release, or, with a ``name`` of its own, of other ratings in the same format."""
    raw, where, supposed = _open(origin)
    with raw:
        ratings = parse(raw, where)
    found = Release(len(ratings.users), len(ratings.user_ids), len(ratings.item_ids))
    name = _identify(name, supposed, found, where)
    made = f"{where}: the last rating of each user held out, {MLPERF_NEGATIVES} negatives drawn"
    return leave_one_out(name, ratings, where, made, seed)


# Return the stream of ratings, its name for messages, and the release that the names speak of.
def _open(origin: Path) -> Tuple[BinaryIO, str, str]:
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
        return _open((found or zips)[0])
    if zipfile.is_zipfile(str(origin)):
        archive = zipfile.ZipFile(str(origin))
        inside = [entry for entry in archive.namelist() if entry.rsplit("/", 1)[-1] in FILES]
        if not inside:
            raise Problem(f"{origin} has none of {', '.join(FILES)}", "a MovieLens release", "name its zip file")
        # Buffered: a ZipExtFile reads lines in Python.
        stream = io.BufferedReader(archive.open(inside[0]))  # type: ignore[type-var]
        return stream, f"{inside[0]} in {origin}", inside[0].split("/")[0]
    if origin.suffix == ".zip":
        raise Problem(f"{origin} is no whole zip file", "a MovieLens release", "download it again")
    return origin.open("rb"), str(origin), origin.parent.name


# Return the name of the data set; Problem where it is called a release that it is not.
def _identify(name: Optional[str], supposed: str, found: Release, where: str) -> str:
    same = [release for release, size in RELEASES.items() if size == found]
    if same and name in (None, same[0]):
        return same[0]
    wanted = name or supposed
    if wanted in RELEASES:
        raise Problem(
            f"{where} has {found}",
            f"{RELEASES[wanted]}, as {wanted} has",
            f"download {wanted} again, or give the data set a name of its own with --name",
        )
    if name is None:
        hint = "to use it as a data set of your own: --name NAME"
        raise Problem(f"{where} has {found}: no known release of MovieLens", ", ".join(RELEASES), hint)
    return name
