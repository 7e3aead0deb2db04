"""Placement of embedding tables on ranks."""

from typing import List, Optional, Sequence, Tuple

from benchmarks.common.data.problem import Problem

Placement = Tuple[Tuple[int, ...], ...]  # tables by rank


def place(sizes: Sequence[int], ranks: int, row_bytes: int = 4, memory: Optional[float] = None) -> Placement:
    """Balance the number of tables between ranks (difference up to 1), within ``memory`` bytes per rank.

    A step looks up, sends and updates one row per table and sample, for any table size. The number of tables
    therefore determines the time, and the number of rows only the memory: tables are assigned in descending order of
    size to the rank with the fewest tables, and among these the fewest rows. If memory is too small, only rows are
    balanced.

    Raises:
        Problem: no placement within ``memory`` was found.
    """
    limit = float("inf") if memory is None else memory / row_bytes
    placement = _assign(sizes, ranks, limit) or _assign(sizes, ranks, limit, by_rows=True)
    if placement is not None:
        return placement
    least = _assign(sizes, ranks, float("inf"), by_rows=True) or ()
    fullest = max(sum(sizes[table] for table in tables) for tables in least)
    fewest = max(max(sizes), -(-sum(sizes) // ranks))
    hint = "use more ranks" if max(sizes) <= limit else "prepare with a lower --index-limit"
    raise Problem(
        f"the embedding tables need {fullest * row_bytes / 1e9:,.1f} GB on the fullest of {ranks} ranks, and "
        f"{fewest * row_bytes / 1e9:,.1f} GB in any placement",
        f"at most {limit * row_bytes / 1e9:,.1f} GB, 90 % of the free memory",
        f"{hint}, or set a narrower bottom_mlp",
    )


# Assign tables in descending order of size to the rank with the fewest tables (or rows) and enough memory
def _assign(sizes: Sequence[int], ranks: int, limit: float, by_rows: bool = False) -> Optional[Placement]:
    assignment: List[List[int]] = [[] for _ in range(ranks)]
    rows = [0] * ranks
    for table in sorted(range(len(sizes)), key=lambda t: (-sizes[t], t)):
        with_room = [rank for rank in range(ranks) if rows[rank] + sizes[table] <= limit]
        if not with_room:
            return None
        rank = min(with_room, key=lambda r: (0 if by_rows else len(assignment[r]), rows[r], len(assignment[r]), r))
        assignment[rank].append(table)
        rows[rank] += sizes[table]
    return tuple(tuple(sorted(tables)) for tables in assignment)
