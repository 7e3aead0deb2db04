"""Which rank holds which embedding table."""

from __future__ import annotations

from typing import Callable, List, Optional, Sequence, Tuple

from benchmarks.common.data.problem import Problem

Placement = Tuple[Tuple[int, ...], ...]  # the tables of each rank


def place(sizes: Sequence[int], ranks: int, row_bytes: int = 4, memory: Optional[float] = None) -> Placement:
    """Give each rank as many tables as any other, or one more or less, within ``memory`` bytes per rank.

    A step looks up, sends and updates one row per table and sample, whether the table is large or small. So the
    number of tables decides how long a rank takes, and the rows only what it needs of memory: the largest table
    comes first, and of the ranks with the fewest tables the one with the fewest rows takes it. Where memory is too
    small for that, equal numbers of rows decide alone.

    Raises:
        Problem: no placement within ``memory`` was found.
    """
    limit = float("inf") if memory is None else memory / row_bytes
    found = _deal(sizes, ranks, limit, _by_tables) or _deal(sizes, ranks, limit, _by_rows)
    if found is not None:
        return found
    least = _deal(sizes, ranks, float("inf"), _by_rows) or ()
    fullest = max(sum(sizes[table] for table in tables) for tables in least)
    fewest = max(max(sizes), -(-sum(sizes) // ranks))
    hint = "use more ranks" if max(sizes) <= limit else "prepare with a lower --index-limit"
    raise Problem(
        f"the embedding tables need {fullest * row_bytes / 1e9:,.1f} GB on the fullest of {ranks} ranks, and "
        f"{fewest * row_bytes / 1e9:,.1f} GB in any placement",
        f"at most {limit * row_bytes / 1e9:,.1f} GB, nine tenths of what is free",
        f"{hint}, or set a narrower bottom_mlp",
    )


def _by_tables(tables: int, rows: int) -> Tuple[int, int]:
    return tables, rows


def _by_rows(tables: int, rows: int) -> Tuple[int, int]:
    return rows, tables


# Give each table, the largest first, to the rank of the least ``load`` that has room for it.
def _deal(
    sizes: Sequence[int], ranks: int, limit: float, load: Callable[[int, int], Tuple[int, int]]
) -> Optional[Placement]:
    chosen: List[List[int]] = [[] for _ in range(ranks)]
    rows = [0] * ranks
    for table in sorted(range(len(sizes)), key=lambda t: (-sizes[t], t)):
        with_room = [rank for rank in range(ranks) if rows[rank] + sizes[table] <= limit]
        if not with_room:
            return None
        rank = min(with_room, key=lambda r: (*load(len(chosen[r]), rows[r]), r))
        chosen[rank].append(table)
        rows[rank] += sizes[table]
    return tuple(tuple(sorted(tables)) for tables in chosen)
