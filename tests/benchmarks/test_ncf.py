"""NCF: ratings in any form, and bad input."""

import gzip
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encore import data
from tests import preparing
from tests.conftest import Encore
from tests.preparing import check_refusal, notes, write_files

RATINGS = [(user, item, 4, 1000 + 10 * user + item) for user in range(1, 7) for item in range(user, user + 5)]
HEADER = "userId,movieId,rating,timestamp\n"
run = partial(preparing.run, "ncf", workers=0)


def rows(separator: str, ratings: Sequence[tuple[object, ...]] = RATINGS) -> str:
    return "".join(separator.join(map(str, row)) + "\n" for row in ratings)


def change_ids(prefix: str) -> str:
    # RATINGS with other ids in the same order
    return rows(",", [(f"{prefix}{user:02}", f"{prefix}{item:02}", *rest) for user, item, *rest in RATINGS])


def arrays_of(folder: Path) -> dict[str, list[Any]]:
    return {path.stem: np.load(path).tolist() for path in folder.glob("*.npy")}


SWAPPED = "".join(f"{item},{user},{time},{stars}\n" for user, item, stars, time in RATINGS)
QUOTED = "".join(f'"{user}","{item}","{stars}","{time}"\r\n' for user, item, stars, time in RATINGS)
LONGER = "".join(f'{n},{user},{item},{stars},{time},"a, b"\n' for n, (user, item, stars, time) in enumerate(RATINGS))
EQUIVALENT = {
    "plain": ("ratings.csv", HEADER + rows(",")),
    "ml-1m": ("ratings.dat", rows("::")),
    "ml-100k": ("u.data", rows("\t")),
    "no header": ("ratings.csv", rows(",")),
    "other column order": ("ratings.csv", "movieId,userId,timestamp,rating\n" + SWAPPED),
    "byte order mark": ("ratings.csv", "\ufeff" + HEADER + rows(",")),
    "quotes and CRLF": ("ratings.csv", HEADER + QUOTED),
    "additional columns": ("ratings.csv", "n,user_id,ITEM_ID,rating,timestamp,note\n" + LONGER),
    "blank lines": ("ratings.csv", "\n" + HEADER + "\n" + rows(",") + "\n\n"),
    "leading zeros": ("ratings.csv", HEADER + change_ids("0")),
    "ids above 2**53": ("ratings.csv", HEADER + change_ids("900719925474099")),
    "ids of text": ("ratings.csv", HEADER + change_ids("film-")),
    "any positive scale": ("ratings.csv", HEADER + rows(",", [(u, i, 100, time) for u, i, _, time in RATINGS])),
}


def test_form_of_the_ratings_does_not_matter(tmp_path: Path) -> None:
    ids = {}
    for name, (file, text) in EQUIVALENT.items():
        notes(run(write_files(tmp_path / name, {file: text}), "-o", tmp_path / f"{name} set", "--name", "mine"))
        ids[name] = data.read_passport(tmp_path / f"{name} set").id
    with zipfile.ZipFile(tmp_path / "ml-mine.zip", "w") as archive:
        archive.writestr("ml-mine/ratings.csv", EQUIVALENT["plain"][1])
    notes(run(tmp_path / "ml-mine.zip", "-o", tmp_path / "zip set", "--name", "mine"))
    manifest = data.read_passport(tmp_path / "zip set")
    assert set(ids.values()) == {manifest.id}, ids
    assert data.check_data(tmp_path / "zip set", "ncf") == manifest
    # A user rates 5 successive items, the last one last in time; the negatives are the other items, repeated.
    arrays = arrays_of(tmp_path / "zip set")
    negatives = arrays.pop("test_negatives")
    assert arrays == {
        "train_users": [user for user in range(6) for _ in range(4)],
        "train_items": [user + number for user in range(6) for number in range(4)],
        "test_items": [4, 5, 6, 7, 8, 9],
    }
    assert [len(row) for row in negatives] == [999] * 6
    assert [set(row) for row in negatives] == [{*range(10)} - {*range(user, user + 5)} for user in range(6)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [*rows[:-1], "6::10::4"], "line 30: '6::10::4'"),
        (lambda rows: [*rows, "-7::1::4::99"], "line 31: '-7::1::4::99'"),
        (lambda rows: [*rows, "1::1::4::99"], "line 31: user 1 rates item 1 again, as in line 1"),
        (lambda rows: [*rows, "9::1::4::99"], "1 users with a single rating, the first is user 9 in line 31"),
        (lambda rows: [*rows, *(f"9::{item}::4::{item}" for item in range(1, 11))], "user 9 has rated all 10 items"),
        (lambda rows: [*rows[:5], "1::77::4::9::5", "1::78::4", *rows[5:]], "line 7: '1::78::4'"),
        (lambda rows: [*rows, "2::99::nan::99"], "line 31: '2::99::nan::99'"),
        (lambda rows: [*rows, "2::99::0::99"], "line 31: '2::99::0::99'"),
        (lambda rows: [*rows, "2::99::inf::99"], "line 31: '2::99::inf::99'"),
        (lambda rows: [*rows, "2::99::4::nan"], "line 31: '2::99::4::nan'"),
        (lambda rows: [*rows, "2::99::4::-1"], "line 31: '2::99::4::-1'"),
        (lambda rows: [*rows, "::99::4::99"], "line 31: '::99::4::99'"),
        (lambda rows: ["userId::movieId::timestamp", *rows], "no column rating in its header"),
        (lambda rows: ["nothing here"], "begins with 'nothing here"),
        (lambda rows: ["1::2::3::2024-05-01"], "number the lines in a column timestamp"),
        (lambda rows: ["user::item::rating", "1::2::3"], "number the lines in a column timestamp"),
    ],
)  # fmt: skip
def test_bad_ratings_are_rejected(tmp_path: Path, change: Callable[[list[str]], list[str]], message: str) -> None:
    text = "\n".join(change(rows("::").splitlines())) + "\n"
    check_refusal("ncf", tmp_path / "raw", {"ratings.dat": text}, [message], "--name", "mine")


def test_compressed_ratings_are_named(tmp_path: Path) -> None:
    files = {"ratings.csv.gz": gzip.compress(rows(",").encode())}
    check_refusal("ncf", tmp_path / "raw", files, ["ratings.csv.gz is compressed by gzip", "gunzip"])


@pytest.mark.parametrize(
    ("folder", "options", "message"),
    [
        ("ml-20m", (), "20,000,263 ratings of 138,493 users on 26,744 items, as ml-20m has"),
        ("other", ("--name", "ml-1m"), "1,000,209 ratings of 6,040 users on 3,706 items, as ml-1m has"),
    ],
)
def test_part_of_a_release_is_rejected(tmp_path: Path, folder: str, options: tuple[str, ...], message: str) -> None:
    parts = ("30 ratings of 6 users on 10 items", message)
    check_refusal("ncf", tmp_path / folder, {"ratings.dat": rows("::")}, parts, *options)


PAPER = {
    "x.train.rating": "0\t1\t5\t9\n0\t2\t5\t9\n1\t0\t5\t9\n1\t3\t5\t9\n",
    "x.test.rating": "0\t3\t5\t9\n1\t4\t5\t9\n",
    "x.test.negative": "(0,3)\t0\t4\t5\n(1,4)\t1\t2\t5\n",
}


def test_files_of_the_paper(tmp_path: Path) -> None:
    noted = notes(run(write_files(tmp_path / "raw", PAPER), "-o", tmp_path / "to"))
    assert "1 of 6 items are held out and never trained on (the first is 4)" in noted
    manifest = data.read_passport(tmp_path / "to")
    assert (manifest.name, manifest.counts) == ("x", {"train": 4, "test": 2})
    notes(run("--verify", tmp_path / "to"))
    assert arrays_of(tmp_path / "to") == {
        "train_users": [0, 0, 1, 1], "train_items": [1, 2, 0, 3], "test_items": [3, 4],
        "test_negatives": [[0, 4, 5], [1, 2, 5]],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("x.test.rating", "0\t3\n0\t4\n", "lists user 0 2 times"),
        ("x.test.rating", "1\t3\n2\t4\n", "does not list the users 0, 1, 2 ... in order"),
        ("x.test.rating", "0\t3\n1\t-4\n", "line 2: '1\\t-4'"),
        ("x.train.rating", "0\t1\n1\t0\n0\t1\n", "line 3: user 0 with item 1, as in line 1"),
        ("x.train.rating", "0\t1\n1\t4294967297\n", "line 2: '1\\t4294967297'"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n(1,4)\t1\t2\t4294967297\n", "line 2 does not fit"),
        ("x.train.rating", "0\t1\n2\t1\n", "has user 2"),
        ("x.train.rating", "0\t3\n1\t1\n", "trains on 1 of the held-out pairs"),
        ("x.train.rating", "0 1\n", "user TAB item"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n", "has 1 lines"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n(1,3)\t1\t2\t5\n", "line 2 does not fit"),
        ("x.test.negative", "(0,3)\t0\t4\t5\n(1,4)\t1\t2\n", "line 2 does not fit"),
    ],
)
def test_bad_files_of_the_paper_are_rejected(tmp_path: Path, file: str, text: str, message: str) -> None:
    check_refusal("ncf", tmp_path / "raw", {**PAPER, file: text}, [message])


@pytest.mark.long
def test_changed_data_set_is_rejected_before_a_run(encore: Encore, pytorch_python: Path, tmp_path: Path) -> None:
    notes(run(write_files(tmp_path / "raw", PAPER), "-o", tmp_path / "to"))
    (tmp_path / "to" / "test_negatives.npy").write_bytes(b"")
    done = encore("run", "ncf", "1", "--data", str(tmp_path / "to"), "--results", str(tmp_path / "results"), code=2)
    assert "has changed" in done.stderr
    (problem,) = data.verify("ncf", tmp_path / "to", pytorch_python)
    assert "bytes" in problem.found
