"""The files of the NCF paper: NAME.train.rating (or .train.pairs), NAME.test.rating and NAME.test.negative.

The first two have a user and an item a line, separated by tabs; more columns are ignored. A line of the third
starts with (user,item), the held-out pair, and lists the items that it is ranked among.
"""

from array import array
from pathlib import Path
from typing import List, Optional, Tuple

import numpy as np

from benchmarks.common.data import text_files
from benchmarks.common.data.problem import Problem
from benchmarks.ncf.interactions import Interactions, repeated_pair

NEGATIVES = ".test.negative"  # end of the third file's name
MOST_ID = 2**31 - 2  # ids are stored in 32 bits


def read(negative: Path, name: Optional[str]) -> Interactions:
    """Return the interactions of the files with ``negative``, with unchanged ids and negatives."""
    stem = negative.name[: -len(NEGATIVES)]
    train, pairs, test = (negative.with_name(stem + end) for end in (".train.rating", ".train.pairs", ".test.rating"))
    train = pairs if pairs.is_file() and not train.is_file() else train
    for path in (train, test):
        if not path.is_file():
            raise Problem(f"{path} is missing", "the three files of the NCF paper", "complete the folder")
    users, items = _read_pairs(train)
    first, second = repeated_pair(users, items)
    if second:
        raise Problem(
            f"{train}, line {second + 1:,}: user {users[second]} with item {items[second]}, as in line {first + 1:,}",
            "each user with each item once",
            "remove the repeated lines",
        )
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
    description = f"the NCF paper's files {stem}.*: as they are, {negatives.shape[1]} negatives listed"
    return Interactions(name or stem, count, users[order], items[order], test_items, negatives, description)


# Lines without blank ones at the end
def _lines(path: Path) -> List[bytes]:
    with path.open("rb") as file:
        lines = list(text_files.raw_lines(file, str(path)))
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def _read_pairs(path: Path) -> Tuple[np.ndarray, np.ndarray]:
    values = array("i")
    for number, line in enumerate(_lines(path), 1):
        pair = line.rstrip().split(b"\t", 2)[:2]
        if len(pair) < 2 or not all(map(bytes.isdigit, pair)) or max(map(int, pair)) > MOST_ID:
            raise Problem(
                f"{path}, line {number:,}: {line.rstrip()[:60].decode('utf-8', 'replace')!r}",
                f"user TAB item, whole numbers from 0 to {MOST_ID:,}",
                "correct or remove the line",
            )
        values.extend(map(int, pair))
    if not values:
        raise Problem(f"{path} is empty", "user TAB item", "restore the file")
    users, items = np.array(values, np.int32).reshape(-1, 2).T
    return users, items


def _check_users(train_users: np.ndarray, test_users: np.ndarray, train: Path, test: Path) -> None:
    users, counts = np.unique(test_users, return_counts=True)
    if (counts > 1).any():
        problem = f"{test} lists user {users[np.argmax(counts > 1)]} {counts.max()} times"
        raise Problem(problem, "one held-out item per user", "remove the repeated lines")
    if not np.array_equal(test_users, np.arange(len(test_users))):
        raise Problem(
            f"{test} does not list the users 0, 1, 2 ... in order",
            "a line for each user, in the order of their ids",
            "sort the lines, and number the users without gaps",
        )
    if train_users.max() >= len(test_users):
        problem = f"{train} has user {train_users.max()}, {test} has users 0 to {len(test_users) - 1}"
        raise Problem(problem, "the same users in both", "complete the files")


# (users, negatives); every line must have the held-out pair of the user
def _read_negatives(path: Path, test_items: np.ndarray) -> np.ndarray:
    lines = _lines(path)
    if len(lines) != len(test_items):
        raise Problem(f"{path} has {len(lines):,} lines", f"{len(test_items):,}, one a user", "restore it")
    rows: List[List[int]] = []
    for number, line in enumerate(lines):
        head, _, rest = line.rstrip().partition(b"\t")
        try:
            items = [int(part) for part in rest.split(b"\t")]
        except ValueError:
            items = []
        of_user = head == f"({number},{test_items[number]})".encode()
        fits = of_user and len(items) == len((rows or [items])[0]) > 0
        if not fits or not 0 <= min(items) <= max(items) <= MOST_ID:
            count = len(rows[0]) if rows else "1 or more"
            raise Problem(
                f"{path}, line {number + 1:,} does not fit",
                f"({number},{test_items[number]}) and {count} items, ids from 0 to {MOST_ID:,}, separated by tabs",
                "restore the file",
            )
        rows.append(items)
    return np.array(rows, np.int32)
