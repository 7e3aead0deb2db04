"""What is kept of the submitted logs: times, lengths, phases, curves and hyperparameters of every public set.

    from encore.results.compare.digest import submission
    side = submission(cell)
    print(side.score.spread, side.phases, side.curves)

``data/digests/`` holds one file per round of v0.5 to v5.1, one line per set; only the round that is asked for is
read. They are made from checkouts of the public result repositories:

    python -m encore.results.compare.digest FOLDER...
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from encore.results.compare.sides import Side, Trained, known_targets, samples_of, score_sample, side_of
from encore.results.logs.timing import Curve, mean_phases
from encore.results.published.published import PublishedResult, lines_of, system_of
from encore.results.published.systems import cells_at
from encore.results.rules import Rule, rule_for
from encore.results.scores.score import find_sets, score_folder


def submission(cell: PublishedResult, logs: Path | None = None) -> Side:
    """Return the published cell as a side: from its logs below ``logs``, else from its digest."""
    side = _from_logs(cell, logs) if logs is not None else None
    return side or _from_digest(cell)


def digests(round_: str) -> Iterator[Side]:
    """Yield every public set of the round."""
    for line in lines_of(round_)[1:]:
        yield side_of_digest(json.loads(line))


def side_of_digest(entry: dict[str, Any]) -> Side:
    """Return the side that the digest was made of, without its logs."""
    round_, submitter, system = entry["name"].split("/", 2)
    counted = _counted(entry, rule_for(round_, entry["benchmark"], entry["global_batch"]))
    converged = [reason is None for reason in entry["reasons"]]
    minutes = [minutes for minutes, reached in zip(entry["minutes"], converged, strict=True) if reached]
    runs = zip(entry["minutes"], entry["lengths"], converged, strict=True)
    trained = [Trained(*run, number in counted) for number, run in enumerate(runs) if run[1]]
    lengths, per_length = samples_of(trained, entry["trimmed"])
    return Side(
        label=entry["name"],
        round=round_,
        benchmark=entry["benchmark"],
        hardware=system_of(round_, submitter, system),
        score=score_sample(minutes[: entry["scored"]], entry["trimmed"], entry["score_minutes"]),
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
        phases=mean_phases(
            [{name: of_runs[number] for name, of_runs in entry["phases"].items()} for number in counted]
        ),
        minutes=tuple(minutes),
        curves=tuple(
            Curve(minutes=tuple(minutes), values={name: tuple(each) for name, each in values.items()})
            for minutes, values in entry["curves"]
        ),
        hyperparameters=entry["hyperparameters"],
    )


# Places of the runs that the score is the mean of; else of those that converged, else that ended.
def _counted(entry: dict[str, Any], rule: Rule | None) -> list[int]:
    ended = [number for number, minutes in enumerate(entry["minutes"]) if minutes]
    converged = [number for number in ended if entry["reasons"][number] is None]
    if entry["score_minutes"] is None or rule is None:
        return converged or ended
    missed = len(entry["minutes"]) - len(converged)
    ordered = sorted(converged[: entry["scored"]], key=lambda number: entry["minutes"][number])
    return list(rule.counted(ordered, missed))


# Cell's logs, where the folder holds a set of as many runs as were submitted.
def _from_logs(cell: PublishedResult, logs: Path) -> Side | None:
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


# Set with the score that was published of it, where there is one.
def _as_published(side: Side, cell: PublishedResult) -> Side:
    if cell.score_minutes is not None:
        score = side.score and replace(side.score, estimate=cell.score_minutes)
        side = replace(side, score=score, score_is_official=True)
    factor = cell.scaling_factor or 1.0
    return replace(side, label=cell.name, hardware=cell.hardware, published=cell, scaling_factor=factor)


def _from_digest(cell: PublishedResult) -> Side:
    start = f'{{"name":{json.dumps(cell.name)},"benchmark":'
    start += f"{json.dumps(cell.benchmark)}," if cell.benchmark else ""
    entry = next(line for line in lines_of(cell.round)[1:] if line.startswith(start))
    return _as_published(side_of_digest(json.loads(entry)), cell)


if __name__ == "__main__":
    from encore.results.compare.digest_build import main

    sys.exit(main())
