"""Published results in MLCommons' layout (a row per system, a column per benchmark), and error rates of verdicts.

from encore.results.published.tables import result_table
print(result_table(select(load_published(), round_="v0.7")).as_markdown())
"""

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from encore.results.published.published import DATA, PublishedResult
from encore.results.table import Table, grouped

GROUPS = ("round", "division", "availability")  # Keys of the sections in MLCommons' table
_SYSTEM = ("submitter", "system", "accelerator", "count", "software")
_DIVISIONS = ("closed", "open", "")
_AVAILABILITIES = ("Available on-premise", "Available cloud", "Available", "Preview", "RDI", "")
NOTE = "official scores in minutes; empty: no result known"


def result_table(results: Iterable[PublishedResult]) -> Table:
    scored = [result for result in results if result.benchmark and result.official_minutes is not None]
    benchmarks = sorted({result.benchmark or "" for result in scored})
    systems: dict[tuple[str, ...], dict[str, PublishedResult]] = {}
    for result in sorted(
        scored,
        key=lambda result: (
            [int(part) for part in result.round.removeprefix("v").split(".")],
            _DIVISIONS.index(result.division),
            _AVAILABILITIES.index(result.availability),
            result.submitter.lower(),
            result.system.lower(),
        ),
    ):
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
    parts = []
    for group, rows in grouped(table.rows, lambda row: tuple(str(cell) for cell in row[: len(GROUPS)])).items():
        labels = [label for label in group[1:] if label] or ["division and availability not known"]
        part = replace(table, title=", ".join([group[0], *labels]), rows=tuple(rows))
        empty = {column for index, column in enumerate(table.columns) if all(row[index] is None for row in rows)}
        columns = [column for column in table.columns[len(GROUPS) :] if column not in empty - {*_SYSTEM}]
        parts.append(_select_columns(part, columns))
    return parts


# The columns with these names.
def _select_columns(table: Table, columns: Sequence[str]) -> Table:
    indices = [table.columns.index(column) for column in columns]
    return replace(
        table, columns=tuple(columns), rows=tuple(tuple(row[index] for index in indices) for row in table.rows)
    )


def parts_of_width(table: Table, width: int, name_width: int) -> list[Table]:
    """Split the section so that names of ``name_width`` characters and the benchmarks fit into ``width``.

    Parts only contain systems with results.
    """
    systems = [column for column in table.columns if column in _SYSTEM]
    widths = {
        column: max(map(len, [column, *(table.texts(row)[index] for row in table.rows)])) + 2
        for index, column in enumerate(table.columns)
        if column not in _SYSTEM
    }
    parts: list[list[str]] = [[]]
    for column, needed in widths.items():
        if parts[-1] and name_width + sum(widths[name] for name in parts[-1]) + needed > width:
            parts.append([])
        parts[-1].append(column)
    narrow = [_select_columns(table, [*systems, *part]) for part in parts]
    return [
        replace(
            part_table,
            title=table.title if number == 0 else f"{table.title}, continued",
            rows=tuple(row for row in part_table.rows if any(cell is not None for cell in row[len(systems) :])),
        )
        for number, part_table in enumerate(narrow)
    ]


def _row(
    key: tuple[str, ...], cells: dict[str, PublishedResult], benchmarks: Sequence[str]
) -> tuple[str | float | int | None, ...]:
    hardware = next(iter(cells.values())).hardware
    software = next((cell.hardware.framework for cell in cells.values() if cell.hardware.framework), None)
    minutes = (cells[name].official_minutes if name in cells else None for name in benchmarks)
    return (*key, hardware.accelerator or "", hardware.accelerators, software or "", *minutes)


DATA_FILE = DATA / "calibration.csv"
COLUMNS = ("population", "ours", "theirs", "apart", "trials", "reproduced", "different")
SHIFT = "shift"  # In the column ``apart``: the two sets converge differently
_Rates = tuple[list[str], list[list[str]]]  # Head and rows
_APART = {"0": "equal", "0.05": "5 % apart", "0.1": "10 % apart", "0.2": "20 % apart"}


def load_calibration() -> list[dict[str, str]]:
    with DATA_FILE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def calibration_table() -> _Rates:
    """Return the head, and one row per population and number of runs: ``reproduced / different`` in percent."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for line in load_calibration():
        if line["apart"] != SHIFT:
            rows.setdefault((line["population"], _sizes(line)), {})[line["apart"]] = _verdict_rates(line)
    head = ["what varies", "runs, yours against theirs", *_APART.values()]
    return head, [[*key, *(rates[apart] for apart in _APART)] for key, rates in rows.items()]


def shift_table() -> _Rates:
    """Return the rates for sets that converge differently, one column per number of runs."""
    rows: dict[str, dict[str, str]] = {}
    for line in load_calibration():
        if line["apart"] == SHIFT:
            rows.setdefault(line["population"], {})[_sizes(line)] = _verdict_rates(line)
    sizes = list(next(iter(rows.values())))
    return ["epochs", *sizes], [[name, *(rates[size] for size in sizes)] for name, rates in rows.items()]


def forecast_table() -> _Rates:
    """Return how often the forecast from a truncated log contained the true time, by benchmark and cut, in percent."""
    head = ["benchmark", "cut after", "logs", "with a forecast", "inside", "median error", "median width"]
    return head, [
        [
            line["benchmark"],
            line["cut"],
            str(line["runs"]),
            f"{line['forecasts'] / line['runs'] * 100:.1f}",
            *_accuracy_cells(line),
        ]
        for line in _forecasts("held_out")
    ]


def forecast_by_round() -> _Rates:
    head = ["round", "forecasts", "inside", "median error", "median width"]
    return head, [[line["round"], str(line["forecasts"]), *_accuracy_cells(line)] for line in _forecasts("by_round")]


def _forecasts(part: str) -> Any:
    return json.loads((DATA / "forecast.json").read_text("utf-8"))[part]


def _accuracy_cells(line: dict[str, Any]) -> list[str]:
    return [f"{line[key] * 100:.1f}" if key in line else "–" for key in ("inside", "error", "width")]


def _sizes(line: dict[str, str]) -> str:
    return f"{line['ours']} against {line['theirs']}"


def _verdict_rates(line: dict[str, str]) -> str:
    trials = int(line["trials"])
    return " / ".join(f"{100 * int(line[verdict]) / trials:.1f}" for verdict in ("reproduced", "different"))
