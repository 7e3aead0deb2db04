"""The files of the NCF paper: NAME.train.rating (or .train.pairs), NAME.test.rating and NAME.test.negative.

The first two have a user and an item a line, separated by tabs; more columns are ignored. A line of the third
starts with (user,item), the held-out pair, and lists the items that it is ranked among.
"""

from __future__ import annotations

from pathlib import Path
from typing import List, NamedTuple, Optional, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.ncf.sources.interactions import Interactions, check_pairs, untrained_note


class Files(NamedTuple):
    """The three files."""

    name: str
    train: Path
    test: Path
    negative: Path


def find(folder: Path) -> Optional[Files]:
    """The files in ``folder``, or None where it has no *.test.negative."""
    negatives = sorted(folder.glob("*.test.negative"))
    if not negatives:
        return None
    name = negatives[0].name[: -len(".test.negative")]
    trains = [folder / (name + suffix) for suffix in (".train.rating", ".train.pairs")]
    train = next((path for path in trains if path.is_file()), trains[0])
    return Files(name, train, folder / (name + ".test.rating"), negatives[0])


def read(folder: Path, name: Optional[str]) -> Interactions:
    """The interactions of the files in ``folder``, their ids and negatives unchanged."""
    files = find(folder)
    if files is None:
        raise Problem(
            "no *.test.negative in {}".format(folder), "the files of the NCF paper", "name their folder"
        )
    for path in (files.train, files.test):
        if not path.is_file():
            raise Problem(
                "{} is missing".format(path), "the three files of the NCF paper", "complete the folder"
            )
    users, items = _read_pairs(files.train)
    check_pairs(users, items, str(files.train))
    test_users, test_items = _read_pairs(files.test)
    _check_users(users, test_users, files)
    negatives = _read_negatives(files.negative, test_users, test_items)
    count = 1 + max(int(items.max()), int(test_items.max()), int(negatives.max()))
    _check_held_out(users, items, test_items, count, files)
    order = np.lexsort((items, users))
    return Interactions(
        name=name or files.name,
        users=len(test_users),
        items=count,
        train_users=users[order],
        train_items=items[order],
        test_items=test_items,
        negatives=negatives,
        made="the NCF paper's files {0}.*: as they are, {1} negatives listed".format(
            files.name, negatives.shape[1]
        ),
        notes=untrained_note(test_items, items, count),
    )


def _read_pairs(path: Path) -> Tuple[np.ndarray, np.ndarray]:
    try:
        table = np.loadtxt(str(path), dtype=np.int64, delimiter="\t", usecols=(0, 1), ndmin=2)
    except ValueError as error:
        raise Problem(
            "{}: {}".format(path, str(error).split("; ")[0]), "user TAB item, whole numbers", "mend the line"
        ) from None
    if len(table) == 0:
        raise Problem("{} is empty".format(path), "user TAB item", "restore the file")
    if table.min() < 0:
        raise Problem("{} has the id {}".format(path, table.min()), "ids from 0 on", "mend the file")
    return table[:, 0].astype(np.int32), table[:, 1].astype(np.int32)


def _check_users(train_users: np.ndarray, test_users: np.ndarray, files: Files) -> None:
    unique, counts = np.unique(test_users, return_counts=True)
    if (counts > 1).any():
        user = int(unique[np.argmax(counts > 1)])
        raise Problem(
            "{} lists user {} {} times".format(files.test, user, int(counts.max())),
            "one held-out item of each user",
            "remove the repeated lines",
        )
    if not np.array_equal(test_users, np.arange(len(test_users))):
        raise Problem(
            "{} does not list the users 0, 1, 2 ... in order".format(files.test),
            "a line for each user, in the order of their ids",
            "sort the lines, and number the users without gaps",
        )
    if int(train_users.max()) >= len(test_users):
        raise Problem(
            "{} has user {}, {} has users 0 to {}".format(
                files.train, int(train_users.max()), files.test, len(test_users) - 1
            ),
            "the same users in both",
            "complete the files",
        )


def _read_negatives(path: Path, test_users: np.ndarray, test_items: np.ndarray) -> np.ndarray:
    """(users, negatives); each line must belong to the held-out pair of its user."""
    rows: List[List[int]] = []
    with path.open(encoding="ascii", errors="replace") as file:
        for number, line in enumerate(file):
            head, _, rest = line.rstrip("\n").partition("\t")
            try:
                pair = tuple(int(part) for part in head.strip("()").split(","))
                row = [int(part) for part in rest.split("\t")]
            except ValueError:
                raise _bad_line(path, number, "(user,item) TAB item TAB item ...") from None
            if number >= len(test_users) or pair != (number, int(test_items[number])):
                wanted = (
                    "({},{})".format(number, test_items[number]) if number < len(test_users) else "no line"
                )
                raise _bad_line(path, number, "{}, as in the test file".format(wanted))
            if min(row) < 0 or (rows and len(row) != len(rows[0])):
                raise _bad_line(
                    path, number, "{} items, ids from 0 on".format(len(rows[0]) if rows else "1 or more")
                )
            rows.append(row)
    if len(rows) != len(test_users):
        raise Problem(
            "{} has {:,} lines".format(path, len(rows)),
            "{:,}, one a user".format(len(test_users)),
            "restore it",
        )
    return np.array(rows, np.int32)


def _bad_line(path: Path, number: int, expected: str) -> Problem:
    return Problem("{}, line {:,} does not fit".format(path, number + 1), expected, "restore the file")


def _check_held_out(
    users: np.ndarray, items: np.ndarray, test_items: np.ndarray, count: int, files: Files
) -> None:
    held_out = np.arange(len(test_items), dtype=np.int64) * count + test_items
    trained = np.isin(held_out, users.astype(np.int64) * count + items)
    if trained.any():
        raise Problem(
            "{} trains on {:,} of the held-out pairs, the first is user {}".format(
                files.train, int(trained.sum()), int(np.argmax(trained))
            ),
            "held-out pairs that are nowhere in training",
            "remove them from the training file",
        )
