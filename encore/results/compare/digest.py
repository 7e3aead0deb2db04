"""Make ``data/digests/`` from checkouts of the public result repositories; ``run_sets`` reads what is kept there.

    python -m encore.results.compare.digest FOLDER...

One file per round and one line per set: times, lengths, phases, curves and hyperparameters.
"""

import argparse
import csv
import json
import lzma
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from encore.errors import EncoreError
from encore.results.compare.run_set import RunSet, load_run_sets
from encore.results.logs.run_log import RunLog
from encore.results.logs.timing import PHASES, length_of, phases_of
from encore.results.published.published import DATA, load_published
from encore.results.published.systems import cells_at
from encore.results.rules import ROUNDS, canonical, repository_of
from encore.results.scores.score import find_sets
from encore.results.table import grouped

# Significant digits: of times and lengths, which are compared; of phases and curves, which are shown.
_TIMES, _OTHERS = 9, 6
_ON_EACH_CORE = 4
_CODE = frozenset({"benchmarks", "benchmark"})  # Folders of code; logs below them are of tests


# What one folder of logs came to.
@dataclass(frozen=True, kw_only=True)
class _Made:
    root: Path
    folder: str
    round: str = ""
    entry: dict[str, Any] = field(default_factory=dict)
    row: dict[str, str] = field(default_factory=dict)
    left_out: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m encore.results.compare.digest", description=str(__doc__).split("\n")[0]
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="checkout of a result repository")
    parser.add_argument("-o", "--output", type=Path, default=DATA, help="default: the data that Encore uses")
    given = parser.parse_args(arguments)
    missing = [str(folder) for folder in given.folders if not folder.is_dir()]
    if missing:
        parser.error(f"there is no folder {', '.join(missing)}")
    screen = Console(stderr=True)
    every = [(root, folder) for root in given.folders for folder, _ in find_sets(root)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(_made, *zip(*every, strict=True), chunksize=_ON_EACH_CORE) if every else iter(())
        found = _with_round(list(track(made, "sets", total=len(every), console=screen)))
    kept: list[_Made] = []
    for round_ in ROUNDS:
        of_round = [each for each in found if each.round == round_]
        if any(each.entry for each in of_round):
            kept += _write(given.output, round_, of_round, screen)
    screen.print(f"{_add_rows(given.output, kept)} rows added to published.csv", highlight=False)
    for each in found:
        if not each.round:
            screen.print(f"left out: {each.folder}: {each.left_out}", highlight=False, soft_wrap=True)
    return 0


# Folders, those without a submission with the round of the checkout that they are in.
def _with_round(found: Sequence[_Made]) -> list[_Made]:
    rounds = {
        root: {each.round for each in of_root} - {""}
        for root, of_root in grouped(found, lambda each: each.root).items()
    }
    only = {root: next(iter(names)) for root, names in rounds.items() if len(names) == 1}
    return [each if each.round else replace(each, round=only.get(each.root, "")) for each in found]


# Digest of the logs in one folder.
def _made(root: Path, folder: Path) -> _Made:
    where = folder.relative_to(root).as_posix()
    try:
        run_sets = [run_set for run_set in load_run_sets(folder) if run_set.folder == folder]
    except EncoreError:
        run_sets = []
    nothing = _Made(root=root, folder=where, left_out="no MLPerf log")
    if not run_sets:
        return nothing
    run_set = max(run_sets, key=lambda run_set: run_set.runs)
    name = _name(run_set, folder, where)
    if run_set.round is None or name is None:
        unnamed = "not the logs of a submission: no results/SYSTEM in the path"
        return replace(nothing, left_out=run_set.missing if run_set.round is None else unnamed)
    others = [f"{other.runs} logs of {other.round} {other.benchmark}" for other in run_sets if other is not run_set]
    entry, row = entry_of(run_set, name, where), _row(run_set, name)
    return replace(nothing, round=run_set.round, entry=entry, row=row, left_out=", ".join(others))


# Round, submitter and system by the folder ``SUBMITTER/results/SYSTEM``, else of the published cell.
def _name(run_set: RunSet, folder: Path, where: str) -> str | None:
    parts = folder.absolute().parts
    if _CODE.intersection(where.split("/")):
        return None
    if run_set.round != "v0.5" and "results" in parts[1:-1]:
        at = len(parts) - 2 - parts[-2::-1].index("results")
        return f"{run_set.round}/{parts[at - 1]}/{parts[at + 1]}"
    # v0.5 has no such order, and nor have logs that somebody else keeps.
    path = "/".join(part for part in parts if part != "results")
    of_round = (cell for cell in load_published() if cell.round == run_set.round)
    below = [cell for cell in of_round if f"/{cell.name.split('/', 1)[1]}/" in path]
    return next((cell.name for cell in below or cells_at(folder, run_set.round, run_set.benchmark)), None)


def entry_of(run_set: RunSet, name: str, where: str) -> dict[str, Any]:
    """Return the digest of a set of runs. Lists have one value per run, in the order of the files."""
    runs = run_set.logs
    ended = [run for run in runs if (run.elapsed_minutes or 0.0) > 0]
    phases = {id(run): phases_of(run) for run in ended}
    each_phase = {name: [phases.get(id(run), {}).get(name) for run in runs] for name in PHASES}
    seeds, platforms = [run.seeds for run in runs], [run.platform for run in runs if run.platform]
    return {
        "name": name,
        "benchmark": run_set.benchmark,
        "folder": where,
        "division": run_set.division,
        # The platform that most of the logs name, the first of several.
        "platform": next((name for name, _ in Counter(platforms).most_common(1)), None),
        "required": run_set.required,
        "missing": run_set.missing,
        "score_minutes": _short(run_set.score.estimate, _TIMES)
        if run_set.score and run_set.score_is_official
        else None,
        # How many of the runs with a result the score is of, from the first on, and how many it drops on each side.
        "scored": run_set.score.count if run_set.score else 0,
        "trimmed": run_set.score.trimmed if run_set.score else 0,
        "minutes": [_short(run.elapsed_minutes, _TIMES) if id(run) in phases else None for run in runs],
        "reasons": [run.reason.value if run.reason else None for run in runs],
        "unit": run_set.length_unit,
        "lengths": [_length(run, run_set.length_unit) if id(run) in phases else None for run in runs],
        # The first run with the same seeds: 0, 1, 2 ... where every run has its own.
        "seeds": [seeds.index(each) if each else None for each in seeds],
        "phases": {
            name: [_short(each) for each in values]
            for name, values in each_phase.items()
            if values.count(None) < len(values)
        },
        "curves": [
            [
                [_short(each) for each in curve.minutes],
                {name: [_short(each) for each in values] for name, values in curve.values.items()},
            ]
            for curve in run_set.curves
        ],
        "global_batch": run_set.global_batch,
        "train_samples": run_set.train_samples,
        "hyperparameters": dict(sorted(run_set.hyperparameters.items())),
    }


def _is_official(repository: str) -> bool:
    return repository.startswith("mlcommons/")


def _length(run: RunLog, unit: str) -> float | None:
    length = length_of(run)
    return _short(length.value, _TIMES) if length is not None and length.unit == unit and length.value > 0 else None


def _short(value: float | None, digits: int = _OTHERS) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


# Write the round's digests and return them; of two sets of one name, the one with more runs.
def _write(output: Path, round_: str, made: Sequence[_Made], screen: Console) -> list[_Made]:
    sets: dict[tuple[str, str], _Made] = {}
    left_out = {each.folder: each.left_out for each in made if each.left_out}
    found = [each for each in made if each.entry]
    for each in sorted(found, key=lambda each: (-len(each.entry["minutes"]), len(each.folder), each.folder)):
        key = (each.entry["name"], each.entry["benchmark"] or "")
        if sets.setdefault(key, each) is not each:
            left_out[each.folder] = f"{sets[key].folder} has the name {' '.join(key)} as well"
    kept = [sets[key] for key in sorted(sets)]
    runs = sum(len(each.entry["minutes"]) for each in kept)
    repository = repository_of(round_)
    first: dict[str, Any] = {
        "round": round_,
        "repository": repository,
        "license": "Apache-2.0" if _is_official(repository) else None,  # That of a fork is not known
        "sets": len(kept),
        "runs": runs,
        "left_out": dict(sorted(left_out.items())),
    }
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in (first, *(each.entry for each in kept)))
    path = output / "digests" / f"{round_}.jsonl.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    screen.print(f"{path}: {len(kept)} sets, {runs} runs, {path.stat().st_size:,} bytes", highlight=False)
    for folder, why in first["left_out"].items():
        screen.print(f"left out: {folder}: {why}", highlight=False, soft_wrap=True)
    return kept


# Add a row to published.csv for each set that has none; return how many.
def _add_rows(output: Path, made: Sequence[_Made]) -> int:
    with (DATA / "published.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    known = {(f"{row['round']}/{row['submitter']}/{row['system']}", canonical(row["benchmark"])) for row in rows}
    found = {(each.entry["name"], each.entry["benchmark"]): each.row for each in made}
    lacking = [key for key in sorted(found.keys() - known, key=str) if (key[0], None) not in known]
    new = [found[key] for key in lacking]
    order = ("round", "benchmark", "submitter", "system")
    with (output / "published.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*rows, *new], key=lambda row: [row[name] for name in order]))
    return len(new)


# What published.csv says of the set.
def _row(run_set: RunSet, name: str) -> dict[str, str]:
    round_, submitter, system = name.split("/", 2)
    minutes = [run.minutes for run in run_set.logs if run.minutes is not None]
    score = run_set.score if run_set.score_is_official else None
    repository = repository_of(round_)
    figures = {
        "score_minutes": score and f"{score.estimate:.4f}",
        "fastest_minutes": minutes and f"{min(minutes):.4f}",
        "slowest_minutes": minutes and f"{max(minutes):.4f}",
        "cv": score and score.cv is not None and f"{score.cv:.4f}",
        "global_batch": run_set.global_batch and f"{run_set.global_batch:.0f}",
        "init_seconds": "init_s" in run_set.phases and f"{run_set.phases['init_s']:.1f}",
    }
    return {
        "round": round_,
        "submitter": submitter,
        "system": system,
        "benchmark": run_set.benchmark or "?",
        "runs": str(run_set.runs),
        "converged": str(run_set.converged),
        "note": "" if _is_official(repository) else f"logs of the fork {repository}",
        **{name: text for name, text in figures.items() if isinstance(text, str)},
    }


if __name__ == "__main__":
    sys.exit(main())
