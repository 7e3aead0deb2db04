"""Which rank holds which embedding table."""

from typing import List, Optional, Sequence, Tuple

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
    found = _deal(sizes, ranks, limit) or _deal(sizes, ranks, limit, rows_alone=True)
    if found is not None:
        return found
    least = _deal(sizes, ranks, float("inf"), rows_alone=True) or ()
    fullest = max(sum(sizes[table] for table in tables) for tables in least)
    fewest = max(max(sizes), -(-sum(sizes) // ranks))
    hint = "use more ranks" if max(sizes) <= limit else "prepare with a lower --index-limit"
    raise Problem(
        f"the embedding tables need {fullest * row_bytes / 1e9:,.1f} GB on the fullest of {ranks} ranks, and "
        f"{fewest * row_bytes / 1e9:,.1f} GB in any placement",
        f"at most {limit * row_bytes / 1e9:,.1f} GB, nine tenths of what is free",
        f"{hint}, or set a narrower bottom_mlp",
    )


# Give each table, the largest first, to the rank with the fewest tables (or rows) that has room for it.
def _deal(sizes: Sequence[int], ranks: int, limit: float, rows_alone: bool = False) -> Optional[Placement]:
    chosen: List[List[int]] = [[] for _ in range(ranks)]
    rows = [0] * ranks
    for table in sorted(range(len(sizes)), key=lambda t: (-sizes[t], t)):
        with_room = [rank for rank in range(ranks) if rows[rank] + sizes[table] <= limit]
        if not with_room:
            return None
        rank = min(with_room, key=lambda r: (0 if rows_alone else len(chosen[r]), rows[r], len(chosen[r]), r))
        chosen[rank].append(table)
        rows[rank] += sizes[table]
    return tuple(tuple(sorted(tables)) for tables in chosen)
