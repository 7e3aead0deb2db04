"""Published results as MLCommons lays them out: a row per system, a column per benchmark, official scores in minutes.

from encore.results.report.result_table import result_table
print(result_table(select(load_published(), round_="v0.7")).as_markdown())
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from encore.results.published.published import PublishedResult
from encore.results.table import Table

GROUPS = ("round", "division", "availability")  # What distinguishes the sections of MLCommons' table
_SYSTEM = ("submitter", "system", "accelerator", "count", "software")
_DIVISIONS = ("closed", "open", "")
_AVAILABILITIES = ("Available on-premise", "Available cloud", "Available", "Preview", "RDI", "")
NOTE = "official scores in minutes; empty: no result known"


def result_table(results: Iterable[PublishedResult]) -> Table:
    """Return one table of all ``results``."""
    known = [result for result in results if result.benchmark and result.official_minutes is not None]
    benchmarks = sorted({result.benchmark or "" for result in known})
    systems: dict[tuple[str, ...], dict[str, PublishedResult]] = {}
    for result in sorted(known, key=_order):
        system = (result.round, result.division, result.availability, result.submitter, result.system)
        systems.setdefault(system, {})[result.benchmark or ""] = result
    return Table(
        title="Published results",
        columns=(*GROUPS, *_SYSTEM, *benchmarks),
        rows=tuple(_row(key, cells, benchmarks) for key, cells in systems.items()),
        formats=dict.fromkeys(benchmarks, ".3f"),
        note=NOTE,
    )


def sections(table: Table) -> list[Table]:
    """Return the table in parts, one per round, division and availability, without columns that are empty there."""
    found: dict[tuple[str, ...], list[tuple[object, ...]]] = {}
    for row in table.rows:
        found.setdefault(tuple(str(cell) for cell in row[: len(GROUPS)]), []).append(row)
    return [_section(table, group, rows) for group, rows in found.items()]


def _section(table: Table, group: tuple[str, ...], rows: Sequence[Sequence[object]]) -> Table:
    first = len(GROUPS)
    kept = [
        place
        for place in range(first, len(table.columns))
        if table.columns[place] in _SYSTEM or any(row[place] is not None for row in rows)
    ]
    round_, division, availability = group
    described = [each for each in (division, availability) if each] or ["division and availability not known"]
    return replace(
        table,
        title=", ".join([round_, *described]),
        columns=tuple(table.columns[place] for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in rows),  # type: ignore[misc]
    )


def parts_of_width(table: Table, width: int, name_width: int) -> list[Table]:
    """Return the section in parts whose benchmarks fit next to names of ``name_width`` characters.

    A part has the systems with a result in it.
    """
    columns = table.columns
    benchmarks = [place for place, column in enumerate(columns) if column not in _SYSTEM]
    parts: list[list[int]] = [[]]
    used = name_width
    for place in benchmarks:
        cells = [table.texts(row)[place] for row in table.rows]
        needed = max(map(len, [columns[place], *cells])) + 2
        if parts[-1] and used + needed > width:
            parts.append([])
            used = name_width
        parts[-1].append(place)
        used += needed
    systems = [place for place, column in enumerate(columns) if column in _SYSTEM]
    return [
        replace(
            table,
            title=table.title if number == 0 else f"{table.title}, continued",
            columns=tuple(columns[place] for place in (*systems, *part)),
            rows=tuple(
                tuple(row[place] for place in (*systems, *part))
                for row in table.rows
                if any(row[place] is not None for place in part)
            ),
        )
        for number, part in enumerate(parts)
    ]


def _order(result: PublishedResult) -> tuple[object, ...]:
    return (
        [int(part) for part in result.round.removeprefix("v").split(".")],
        _DIVISIONS.index(result.division),
        _AVAILABILITIES.index(result.availability),
        result.submitter.lower(),
        result.system.lower(),
    )


def _row(
    key: tuple[str, ...], cells: dict[str, PublishedResult], benchmarks: Sequence[str]
) -> tuple[str | float | int | None, ...]:
    hardware = next(iter(cells.values())).hardware
    software = next((each.hardware.framework for each in cells.values() if each.hardware.framework), None)
    minutes = (cells[name].official_minutes if name in cells else None for name in benchmarks)
    return (*key, hardware.accelerator or "", hardware.accelerators, software or "", *minutes)
