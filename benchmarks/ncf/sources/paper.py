"""The files of the NCF paper: NAME.train.rating (or .train.pairs), NAME.test.rating and NAME.test.negative.

The first two have a user and an item a line, separated by tabs; more columns are ignored. A line of the third
starts with (user,item), the held-out pair, and lists the items that it is ranked among.
"""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.ncf.sources.interactions import Interactions, check_pairs

NEGATIVES = ".test.negative"
"""What the name of the third file ends with."""


def read(negative: Path, name: Optional[str]) -> Interactions:
    """Return the interactions of the files that ``negative`` is one of, their ids and negatives unchanged."""
    stem = negative.name[: -len(NEGATIVES)]
    train, pairs, test = (negative.with_name(stem + end) for end in (".train.rating", ".train.pairs", ".test.rating"))
    train = pairs if pairs.is_file() and not train.is_file() else train
    for path in (train, test):
        if not path.is_file():
            raise Problem(f"{path} is missing", "the three files of the NCF paper", "complete the folder")
    users, items = _read_pairs(train)
    check_pairs(users, items, str(train))
    test_users, test_items = _read_pairs(test)
    _check_users(users, test_users, train, test)
    negatives = _read_negatives(negative, test_items)
    count = 1 + max(int(items.max()), int(test_items.max()), int(negatives.max()))
    trained = np.isin(test_users.astype(np.int64) * count + test_items, users.astype(np.int64) * count + items)
    if trained.any():
        raise Problem(
            f"{train} trains on {trained.sum():,} of the held-out pairs, the first is user {np.argmax(trained)}",
            "held-out pairs that are nowhere in training",
            "remove them from the training file",
        )
    order = np.lexsort((items, users))
    made = f"the NCF paper's files {stem}.*: as they are, {negatives.shape[1]} negatives listed"
    return Interactions(name or stem, count, users[order], items[order], test_items, negatives, made)


def _read_pairs(path: Path) -> Tuple[np.ndarray, np.ndarray]:
    try:
        table = np.loadtxt(str(path), dtype=np.int64, delimiter="\t", usecols=(0, 1), ndmin=2)
    except ValueError as error:
        found = str(error).split("; ")[0]
        raise Problem(f"{path}: {found}", "user TAB item, whole numbers", "fix the line") from None
    if len(table) == 0:
        raise Problem(f"{path} is empty", "user TAB item", "restore the file")
    if table.min() < 0:
        raise Problem(f"{path} has the id {table.min()}", "ids from 0 on", "fix the file")
    return table[:, 0].astype(np.int32), table[:, 1].astype(np.int32)


def _check_users(train_users: np.ndarray, test_users: np.ndarray, train: Path, test: Path) -> None:
    users, counts = np.unique(test_users, return_counts=True)
    if (counts > 1).any():
        found = f"{test} lists user {users[np.argmax(counts > 1)]} {counts.max()} times"
        raise Problem(found, "one held-out item of each user", "remove the repeated lines")
    if not np.array_equal(test_users, np.arange(len(test_users))):
        raise Problem(
            f"{test} does not list the users 0, 1, 2 ... in order",
            "a line for each user, in the order of their ids",
            "sort the lines, and number the users without gaps",
        )
    if train_users.max() >= len(test_users):
        found = f"{train} has user {train_users.max()}, {test} has users 0 to {len(test_users) - 1}"
        raise Problem(found, "the same users in both", "complete the files")


def _read_negatives(path: Path, test_items: np.ndarray) -> np.ndarray:
    """(users, negatives); each line must belong to the held-out pair of its user."""
    rows: List[List[int]] = []
    with path.open(encoding="ascii", errors="replace") as file:
        for number, line in enumerate(file):
            expected = ""
            head, _, rest = line.rstrip("\n").partition("\t")
            try:
                pair = tuple(int(part) for part in head.strip("()").split(","))
                rows.append([int(part) for part in rest.split("\t")])
            except ValueError:
                expected = "(user,item) TAB item TAB item ..."
            else:
                if number >= len(test_items):
                    expected = "no line, as in the test file"
                elif pair != (number, test_items[number]):
                    expected = f"({number},{test_items[number]}), as in the test file"
                elif min(rows[-1]) < 0 or len(rows[-1]) != len(rows[0]):
                    expected = f"{len(rows[0]) if number else '1 or more'} items, ids from 0 on"
            if expected:
                raise Problem(f"{path}, line {number + 1:,} does not fit", expected, "restore the file")
    if len(rows) != len(test_items):
        raise Problem(f"{path} has {len(rows):,} lines", f"{len(test_items):,}, one a user", "restore it")
    return np.array(rows, np.int32)
