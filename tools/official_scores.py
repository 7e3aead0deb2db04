"""Renews the columns of published.csv that MLCommons decides: factor, official score, division, availability.

A score that is missing is taken from the digests, which Encore's own scoring made.

    python -m tools.official_scores CHECKOUTS     # the folder that holds training_results_v0.5 ...; rows of others stay

The factor is that of the set's scaling.json, division and availability those of the submitter's system description.
"""

import csv
import functools
import re
from pathlib import Path

from encore.results.compare.run_set import digests
from encore.results.published.published import DATA
from encore.results.rules import canonical
from encore.results.scores.score import official, read_scaling
from tools import Folder, run

COLUMNS = ("scaling_factor", "official_minutes", "division", "availability")
_DIVISIONS = {"close": "closed"}
# As submitters wrote it, and as MLCommons' tables have it; "available" does not say where
_AVAILABILITY = {
    "available": "Available", "cloud": "Available cloud", "available in cloud": "Available cloud",
    "available cloud": "Available cloud", "on-prem": "Available on-premise", "onprem": "Available on-premise",
    "on-premise": "Available on-premise", "available on premise": "Available on-premise",
    "available on-premise": "Available on-premise", "preview": "Preview", "research": "RDI",
}  # fmt: skip


def field(text: str, name: str) -> str:
    # A field of a description, which need not be valid JSON: 27 of v0.6 and v0.7 have a comma too many
    found = re.search(rf'"{name}"\s*:\s*"([^"]*)"', text)
    return found[1].strip() if found else ""


@functools.cache
def description(checkout: Path, submitter: str, system: str) -> str:
    path = checkout / submitter / "systems" / f"{system}.json"
    if path.is_file():
        return path.read_text("utf-8", "replace")
    entries = sorted((checkout / "v0.5.0" / submitter).rglob("entry.json"))
    own = [entry for entry in entries if f"/{system}/" in entry.as_posix()]
    return own[0].read_text("utf-8", "replace") if own else ""


def scored(row: dict[str, str]) -> dict[str, str]:
    # The row with the score of its digest where it has none; Alibaba's times are in a format of their own
    if row["score_minutes"] or row["submitter"] == "Alibaba":
        return row
    name, benchmark = f"{row['round']}/{row['submitter']}/{row['system']}", canonical(row["benchmark"])
    for side in digests(row["round"]):
        if (side.label, side.benchmark) == (name, benchmark) and side.score and side.score_is_official:
            return {**row, "score_minutes": f"{side.score.estimate:.4f}"}
    return row


def renewed(row: dict[str, str], checkouts: Path) -> dict[str, str]:
    checkout = checkouts / f"training_results_{row['round']}"
    if not checkout.is_dir():
        return row
    factor = read_scaling(checkout / row["submitter"] / "results" / row["system"] / row["benchmark"]).factor
    # Without a scaling.json the summarizer takes the raw score as it is.
    minutes = official(float(row["score_minutes"]) if row["score_minutes"] else None, factor or 1.0)
    text = description(checkout, row["submitter"], row["system"])
    division = field(text, "division").lower()
    return {
        **row,
        "scaling_factor": "" if factor is None else f"{factor:.7g}",
        "official_minutes": "" if minutes is None else f"{minutes:.4f}",
        "division": _DIVISIONS.get(division, division),
        "availability": _AVAILABILITY.get(field(text, "status").lower(), ""),
    }


def main(checkouts: Folder) -> None:
    path = DATA / "published.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = [renewed(scored(row), checkouts) for row in csv.DictReader(file)]
    fields = [name for name in rows[0] if name not in (*COLUMNS, "note")]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*fields, *COLUMNS, "note"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    known = {name: sum(bool(row[name]) for row in rows) for name in COLUMNS}
    print(f"{len(rows)} rows: {known}")


if __name__ == "__main__":
    run(main, __doc__)
