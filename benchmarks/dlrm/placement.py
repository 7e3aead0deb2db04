"""Which rank holds which embedding table."""

from __future__ import annotations

from typing import List, Sequence, Tuple


def place(sizes: Sequence[int], ranks: int) -> Tuple[Tuple[int, ...], ...]:
    """The tables of each rank: the largest first, each to the rank with the fewest rows so far.

    Among equals the rank with the fewest tables takes it, so that small tables do not gather on one rank:
    what a rank sends is in proportion to its number of tables.
    """
    chosen: List[List[int]] = [[] for _ in range(ranks)]
    rows = [0] * ranks
    for table in sorted(range(len(sizes)), key=lambda t: (-sizes[t], t)):
        rank = min(range(ranks), key=lambda r: (rows[r], len(chosen[r]), r))
        chosen[rank].append(table)
        rows[rank] += sizes[table]
    return tuple(tuple(sorted(tables)) for tables in chosen)
