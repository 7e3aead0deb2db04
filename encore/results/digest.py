"""What is kept of the submitted logs: times, lengths, phases, curves and hyperparameters of every public set.

    from encore.results.digest import submission
    side = submission(cell)
    print(side.score.spread, side.phases, side.curves)

``data/digests/`` holds one file per round of v0.5 to v5.1, one line per set; only the round that is asked for is
read. They are made from checkouts of the public result repositories:

    python -m encore.results.digest FOLDER...
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from encore.results.published import PublishedResult, lines_of, system_of
from encore.results.score import find_sets, score_folder
from encore.results.sides import Side, known_targets, length_samples, side_of
from encore.results.statistics import Sample
from encore.results.systems import cells_at
from encore.results.timing import Curve


def submission(cell: PublishedResult, logs: Path | None = None) -> Side:
    """Return the published cell as a side: from its logs below ``logs``, else from its digest, else its row alone."""
    side = _from_logs(cell, logs) if logs is not None else None
    return side or _from_digest(cell) or _from_row(cell)


def digests(round_: str) -> Iterator[Side]:
    """Yield every public set of the round."""
    for line in lines_of(round_)[1:]:
        yield side_of_digest(json.loads(line))


def side_of_digest(entry: dict[str, Any]) -> Side:
    """Return the side that the digest was made of, without its logs."""
    round_, submitter, system = entry["name"].split("/", 2)
    lengths, per_length = _lengths(entry)
    converged = [reason is None for reason in entry["reasons"]]
    return Side(
        label=entry["name"],
        round=round_,
        benchmark=entry["benchmark"],
        hardware=system_of(round_, submitter, system),
        score=_score(entry),
        score_is_official=entry["score_minutes"] is not None,
        missing=entry["missing"],
        runs=len(converged),
        converged=sum(converged),
        required=entry["required"],
        lengths=lengths,
        length_unit=entry["unit"],
        per_length=per_length,
        global_batch=entry["global_batch"],
        train_samples=entry["train_samples"],
        division=entry["division"],
        targets=known_targets(round_, entry["benchmark"], entry["global_batch"]),
        phases={name: _median(of_runs) for name, of_runs in entry["phases"].items()},
        minutes=tuple(m for m, reason in zip(entry["minutes"], entry["reasons"], strict=True) if reason is None),
        curves=tuple(
            Curve(minutes=tuple(minutes), values={name: tuple(each) for name, each in values.items()})
            for minutes, values in entry["curves"]
        ),
        hyperparameters=entry["hyperparameters"],
    )


def _median(of_runs: Sequence[float | None]) -> float:
    return statistics.median([seconds for seconds in of_runs if seconds is not None])


def _score(entry: dict[str, Any]) -> Sample | None:
    """Return the official score with the spread of its runs, else the mean of the runs that converged."""
    ended = zip(entry["minutes"], entry["reasons"], strict=True)
    minutes = [minutes for minutes, reason in ended if reason is None][: entry["scored"]]
    if not minutes:
        return None
    sample = Sample.of(minutes, trimmed=entry["trimmed"])
    return sample if entry["score_minutes"] is None else replace(sample, estimate=entry["score_minutes"])


def _lengths(entry: dict[str, Any]) -> tuple[Sample | None, Sample | None]:
    """Return lengths to the target and minutes per length of the runs that converged, else the latter of all."""
    known = [each for each in zip(entry["minutes"], entry["lengths"], entry["reasons"], strict=True) if each[1]]
    reached = [(minutes, length) for minutes, length, reason in known if reason is None]
    if reached:
        return length_samples(reached, entry["trimmed"])
    speeds = [minutes / length for minutes, length, _ in known]
    return None, Sample.of(speeds) if speeds else None


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
    """Return the set with the score that was published of it, where there is one."""
    if cell.score_minutes is not None:
        score = side.score or _from_row(cell).score
        score = replace(score, estimate=cell.score_minutes) if score else None
        side = replace(side, score=score, score_is_official=True)
    factor = cell.scaling_factor or 1.0
    return replace(side, label=cell.name, hardware=cell.hardware, published=cell, scaling_factor=factor)


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
        scaling_factor=cell.scaling_factor or 1.0,
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
    start = f'{{"name":{json.dumps(cell.name)},"benchmark":'
    start += f"{json.dumps(cell.benchmark)}," if cell.benchmark else ""
    entry = next((line for line in lines_of(cell.round)[1:] if line.startswith(start)), None)
    return _as_published(side_of_digest(json.loads(entry)), cell) if entry is not None else None


if __name__ == "__main__":
    from encore.results.digest_build import main

    sys.exit(main())
