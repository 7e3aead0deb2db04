"""What comparisons need of submitted logs, in a small file: times, epochs, phases, hyperparameters.

The logs themselves are not part of this project. ``data/digests.json`` was made from the public ones of
v0.5 to v0.7 that were at hand, with

    python -m encore.results.digest FOLDER > encore/results/data/digests.json
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from encore.results.published import DATA, PublishedResult, load_published
from encore.results.score import find_sets, score_folder
from encore.results.sides import Side, load_sides, side_of
from encore.results.statistics import Sample
from encore.results.systems import cells_at
from encore.results.timing import length_of

_DIGITS = 9


def submission(cell: PublishedResult, logs: Path | None = None) -> Side:
    """Return the published cell as a side: from its logs below ``logs``, else from its digest, else its row alone."""
    side = _from_logs(cell, logs) if logs is not None else None
    return side or _from_digest(cell) or _from_row(cell)


@functools.cache
def digests() -> dict[str, dict[str, Any]]:
    """Return the digests by ``name benchmark``."""
    path = DATA / "digests.json"
    loaded = json.loads(path.read_text("utf-8")) if path.is_file() else []
    return {f"{entry['name']} {entry['benchmark']}": entry for entry in loaded}


def _from_logs(cell: PublishedResult, logs: Path) -> Side | None:
    """Return the cell's logs, where the folder holds a set of as many runs as were submitted."""
    folders = [folder for folder in sorted(logs.rglob(cell.system)) if folder.is_dir()]
    for folder in folders:
        for side in _sides_below(folder, cell):
            if side.runs == cell.runs:
                return _as_published(side, cell)
    return None


def _sides_below(folder: Path, cell: PublishedResult) -> Iterator[Side]:
    for below, _ in find_sets(folder):
        cells = cells_at(below, cell.round, cell.benchmark)
        if cells and cells[0].name == cell.name:
            for score in score_folder(below, cell.round):
                if score.benchmark == cell.benchmark:
                    yield side_of(score)


def _as_published(side: Side, cell: PublishedResult) -> Side:
    score = side.score
    if score is not None and cell.score_minutes is not None:
        score = replace(score, estimate=cell.score_minutes)
    return replace(side, label=cell.name, hardware=cell.hardware, published=cell, score=score)


def _from_row(cell: PublishedResult) -> Side:
    """Return what one row of published.csv says."""
    count = cell.converged or cell.runs
    score = None
    if cell.score_minutes is not None:
        spread = cell.cv * cell.score_minutes if cell.cv is not None else None
        score = Sample(estimate=cell.score_minutes, spread=spread, count=count, trimmed=1 if count > 2 else 0)
    span = _span(cell.last_eval_epochs)
    lengths = per_length = None
    if span is not None and span[0] == span[1] and score is not None and cell.round != "v0.5":
        lengths = Sample(estimate=span[0], spread=0.0, count=count)
        per_length = Sample(
            estimate=score.estimate / span[0],
            spread=score.spread / span[0] if score.spread is not None else None,
            count=count,
        )
    return Side(
        label=cell.name,
        round=cell.round,
        benchmark=cell.benchmark,
        hardware=cell.hardware,
        score=score,
        score_is_official=score is not None,
        runs=cell.runs,
        converged=count,
        lengths=lengths,
        per_length=per_length,
        length_unit="epochs" if span else "",
        counts_last=True,
        # v0.5 logs count epochs in several ways, which only the logs themselves distinguish.
        length_range=span if cell.round != "v0.5" else None,
        global_batch=cell.global_batch,
        phases={"init_s": cell.init_seconds} if cell.init_seconds is not None else {},
        published=cell,
    )


def _span(text: str) -> tuple[float, float] | None:
    """Return ``33-37`` as in published.csv; samples and BERT's constant 1 say nothing about epochs."""
    low, separator, high = text.partition("-")
    try:
        span = float(low), float(high if separator else low)
    except ValueError:
        return None
    return span if 1 < span[0] <= span[1] else None


def _from_digest(cell: PublishedResult) -> Side | None:
    entry = digests().get(f"{cell.name} {cell.benchmark}")
    if entry is None:
        return None
    row = _from_row(cell)
    score = Sample.of(entry["minutes"], trimmed=row.score.trimmed if row.score else 0)
    if cell.score_minutes is not None:
        score = replace(score, estimate=cell.score_minutes)
    return replace(
        row,
        score=score,
        lengths=Sample.of(entry["lengths"]) if entry["lengths"] else None,
        length_unit=entry["unit"],
        length_range=None,
        counts_last=False,
        per_length=Sample.of(entry["minutes_per_length"]) if entry["minutes_per_length"] else None,
        train_samples=entry["train_samples"],
        phases=entry["phases"],
        hyperparameters=entry["hyperparameters"],
    )


def _digest(side: Side, cell: PublishedResult) -> dict[str, Any]:
    ended = [(run, length_of(run)) for run in side.logs if run.elapsed_minutes]
    pairs = [(run, length) for run, length in ended if length is not None and length.unit == side.length_unit]
    return {
        "name": cell.name,
        "benchmark": cell.benchmark,
        "minutes": [_short(run.minutes) for run in side.logs if run.minutes is not None],
        "unit": side.length_unit,
        "lengths": [_short(length.value) for run, length in pairs if run.converged],
        "minutes_per_length": [_short((run.elapsed_minutes or 0.0) / length.value) for run, length in pairs],
        "train_samples": side.train_samples,
        "phases": {name: round(seconds, 3) for name, seconds in side.phases.items()},
        "hyperparameters": dict(sorted(side.hyperparameters.items())),
    }


def _short(value: float | None) -> float:
    return float(f"{value or 0.0:.{_DIGITS}g}")


def _main(root: Path) -> None:
    cells = {f"{cell.name} {cell.benchmark}" for cell in load_published()}
    entries = []
    for side in load_sides(root):
        found = cells_at(side.folder or root, side.round, side.benchmark)
        # One log of ten is no digest of a submission.
        if found and f"{found[0].name} {side.benchmark}" in cells and side.runs == found[0].runs:
            entries.append(_digest(side, found[0]))
    lines = [json.dumps(entry) for entry in sorted(entries, key=lambda e: (e["name"], e["benchmark"]))]
    sys.stdout.write("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
