"""How often verdicts are right, as tools/calibrate_verdicts.py measured it, and the tables of docs/compare.md.

from encore.results.published.calibration import calibration_table
"""

import csv

from encore.results.published.published import DATA

DATA_FILE = DATA / "calibration.csv"
COLUMNS = ("population", "ours", "theirs", "apart", "trials", "reproduced", "different")
SHIFT = "shift"  # In the column ``apart``: the two sets converge differently
Table = tuple[list[str], list[list[str]]]  # Head and rows
_APART = {"0": "equal", "0.05": "5 % apart", "0.1": "10 % apart", "0.2": "20 % apart"}


def load_calibration() -> list[dict[str, str]]:
    """Return the lines of the file."""
    with DATA_FILE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def calibration_table() -> Table:
    """Return the head, and a line for each population and number of runs, ``reproduced / different`` in per cent."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for line in load_calibration():
        if line["apart"] != SHIFT:
            rows.setdefault((line["population"], _sizes(line)), {})[line["apart"]] = _shares(line)
    head = ["what varies", "runs, yours against theirs", *_APART.values()]
    return head, [[*key, *(found[apart] for apart in _APART)] for key, found in rows.items()]


def shift_table() -> Table:
    """Return the same for sets that converge differently, a column for each number of runs."""
    rows: dict[str, dict[str, str]] = {}
    for line in load_calibration():
        if line["apart"] == SHIFT:
            rows.setdefault(line["population"], {})[_sizes(line)] = _shares(line)
    sizes = list(next(iter(rows.values())))
    return ["epochs", *sizes], [[name, *(found[size] for size in sizes)] for name, found in rows.items()]


def _sizes(line: dict[str, str]) -> str:
    return f"{line['ours']} against {line['theirs']}"


def _shares(line: dict[str, str]) -> str:
    trials = int(line["trials"])
    return " / ".join(f"{100 * int(line[what]) / trials:.1f}" for what in ("reproduced", "different"))
