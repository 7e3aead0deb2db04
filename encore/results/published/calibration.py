"""How often verdicts are right, as tools/calibrate_verdicts.py measured it, and the tables of docs/compare.md.

from encore.results.published.calibration import calibration_rows
"""

from __future__ import annotations

import csv

from encore.results.published.published import DATA

DATA_FILE = DATA / "calibration.csv"
COLUMNS = ("population", "ours", "theirs", "apart", "trials", "reproduced", "different")
SHIFT = "shift"
"""In the column ``apart``: the two sets converge differently."""
_APART = {"0": "equal", "0.05": "5 % apart", "0.1": "10 % apart", "0.2": "20 % apart"}


def load_calibration() -> list[dict[str, str]]:
    """Return the lines of the file."""
    with DATA_FILE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def calibration_rows() -> list[list[str]]:
    """Return a line for each population and number of runs, with ``reproduced / different`` in per cent."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for line in load_calibration():
        key = (line["population"], f"{line['ours']} against {line['theirs']}")
        cells.setdefault(key, {})[line["apart"]] = _shares(line)
    return [[*key, *(found[apart] for apart in _APART)] for key, found in cells.items() if SHIFT not in found]


def shift_rows() -> list[list[str]]:
    """Return the same for sets that converge differently."""
    lines = [line for line in load_calibration() if line["apart"] == SHIFT]
    sizes = dict.fromkeys(f"{line['ours']} against {line['theirs']}" for line in lines)
    found = {(line["population"], f"{line['ours']} against {line['theirs']}"): _shares(line) for line in lines}
    return [[name, *(found[name, size] for size in sizes)] for name in dict.fromkeys(name for name, _ in found)]


def shift_head() -> list[str]:
    """Return the head of ``shift_rows``."""
    lines = (line for line in load_calibration() if line["apart"] == SHIFT)
    return ["epochs", *dict.fromkeys(f"{line['ours']} against {line['theirs']}" for line in lines)]


def calibration_head() -> list[str]:
    """Return the head of ``calibration_rows``."""
    return ["what varies", "runs, yours against theirs", *_APART.values()]


def _shares(line: dict[str, str]) -> str:
    trials = int(line["trials"])
    return " / ".join(f"{100 * int(line[what]) / trials:.1f}" for what in ("reproduced", "different"))
