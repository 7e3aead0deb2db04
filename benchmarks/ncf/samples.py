"""NCF's data set as samples, for benchmarks/common/data/sample_checks.py: user-item pairs."""

from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Tuple

import numpy as np

from benchmarks.common.data import sample_checks

USERS = 200  # number of users for which negatives are compared with rated items


def view(directory: Path, manifest: Mapping[str, Any]) -> sample_checks.View:
    names = ("train_users", "train_items", "test_items", "test_negatives")
    users, items, held, negatives = (np.load(str(directory / f"{name}.npy"), mmap_mode="r") for name in names)
    counted = manifest["facts"]

    def keys(of: Callable[[np.ndarray], np.ndarray], item: np.ndarray) -> Callable[[np.ndarray], List[bytes]]:
        return lambda chosen: [b"%d %d" % pair for pair in zip(of(chosen).tolist(), item[chosen].tolist())]

    def own() -> Iterator[Tuple[str, str]]:
        for name, array, most in (
            ("users", users, "users"),
            ("items", items, "items"),
            ("held-out items", held, "items"),
        ):
            top = int(array[sample_checks.spread(len(array))].max()) + 1
            if top > counted[most]:
                yield f"{name}: up to {top - 1:,}", f"{counted[most]:,} {most}"
        order = np.asarray(users[sample_checks.spread(len(users))])
        if (np.diff(order) < 0).any():
            yield "train_users.npy is not sorted", "pairs sorted by user, then item"
            return
        right = {}
        for user in sample_checks.spread(len(held), USERS).tolist():
            begin, end = np.searchsorted(users, [user, user + 1])
            right[user] = not np.isin(negatives[user], np.append(items[begin:end], held[user])).any()
        expected = "negatives that the user never rated: they may be another one's"
        yield from sample_checks.agreement(right, "users have negatives that they rated", expected, least=0.95)

    parts = {
        "train": sample_checks.Part(len(users), keys(lambda chosen: users[chosen], items)),
        "test": sample_checks.Part(len(held), keys(lambda chosen: chosen, held)),
    }
    return sample_checks.View(parts, extra_checks=own)
