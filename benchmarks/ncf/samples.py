"""NCF's data set as samples, for benchmarks/common/data/sample_checks.py: user-item pairs."""

from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Tuple

import numpy as np

from benchmarks.common.data import sample_checks

USERS = 200  # number of users for which negatives are compared with rated items


def view(directory: Path, manifest: Mapping[str, Any]) -> sample_checks.View:
    names = ("train_users", "train_items", "test_items", "test_negatives")
    users, items, test_items, negatives = (np.load(str(directory / f"{name}.npy"), mmap_mode="r") for name in names)
    counts = manifest["facts"]

    def keys(users_at: Callable[[np.ndarray], np.ndarray], item: np.ndarray) -> Callable[[np.ndarray], List[bytes]]:
        return lambda indices: [b"%d %d" % pair for pair in zip(users_at(indices).tolist(), item[indices].tolist())]

    def extra_checks() -> Iterator[Tuple[str, str]]:
        for name, array, unit in (
            ("users", users, "users"),
            ("items", items, "items"),
            ("held-out items", test_items, "items"),
        ):
            top = int(array[sample_checks.spread(len(array))].max()) + 1
            if top > counts[unit]:
                yield f"{name}: up to {top - 1:,}", f"{counts[unit]:,} {unit}"
        order = np.asarray(users[sample_checks.spread(len(users))])
        if (np.diff(order) < 0).any():
            yield "train_users.npy is not sorted", "pairs sorted by user, then item"
            return
        right = {}
        for user in sample_checks.spread(len(test_items), USERS).tolist():
            start, end = np.searchsorted(users, [user, user + 1])
            right[user] = not np.isin(negatives[user], np.append(items[start:end], test_items[user])).any()
        expected = "negatives that the user never rated: they may be another one's"
        yield from sample_checks.agreement(right, "users have negatives that they rated", expected, least=0.95)

    parts = {
        "train": sample_checks.Part(len(users), keys(lambda indices: users[indices], items)),
        "test": sample_checks.Part(len(test_items), keys(lambda indices: indices, test_items)),
    }
    return sample_checks.View(parts, extra_checks=extra_checks)
