"""Write ``data/digests/`` from checkouts of the public result repositories. ``run_set`` reads them.

    python -m encore.results.compare.digest FOLDER...

One file per round and one line per set: times, lengths, phases, curves and hyperparameters.
"""

import argparse
import csv
import json
import lzma
import operator
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
from encore.results.compare.run_set import LossCurve, RunSet, load_run_sets
from encore.results.logs.run_log import RunLog
from encore.results.logs.timing import PHASES, length_of, phases_of
from encore.results.published.published import DATA, DIGEST_DIGITS, load_published
from encore.results.published.systems import cells_at
from encore.results.rules import ROUNDS, canonical, repository_of
from encore.results.scores.score import find_sets
from encore.results.table import grouped

# Significant digits of times and lengths, which are compared
_TIME_DIGITS = 9
_LOSSES, _LOSS_DIGITS = 48, 5  # Means of a run's training losses, and their significant digits
_CHUNK_SIZE = 4
_CODE = frozenset({"benchmarks", "benchmark"})  # Code folders; logs below them come from tests


# Digest of one folder of logs
@dataclass(frozen=True, kw_only=True)
class _Digest:
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
    options = parser.parse_args(arguments)
    missing = [str(folder) for folder in options.folders if not folder.is_dir()]
    if missing:
        parser.error(f"not a directory: {', '.join(missing)}")
    screen = Console(stderr=True)
    folders = [(root, folder) for root in options.folders for folder, _ in find_sets(root)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(_digest_folder, *zip(*folders, strict=True), chunksize=_CHUNK_SIZE) if folders else iter(())
        digests = list(track(results, "sets", total=len(folders), console=screen))
    # Folders outside submissions have the round of their checkout.
    rounds = grouped({(digest.root, digest.round) for digest in digests if digest.round}, lambda pair: pair[0])
    only = {root: pairs[0][1] for root, pairs in rounds.items() if len(pairs) == 1}
    digests = [digest if digest.round else replace(digest, round=only.get(digest.root, "")) for digest in digests]
    written_digests: list[_Digest] = []
    for round_ in ROUNDS:
        round_digests = [digest for digest in digests if digest.round == round_]
        if any(digest.entry for digest in round_digests):
            written_digests += _write(options.output, round_, round_digests, screen)
    screen.print(f"{_add_rows(options.output, written_digests)} rows added to published.csv", highlight=False)
    for digest in digests:
        if not digest.round:
            screen.print(f"left out: {digest.folder}: {digest.left_out}", highlight=False, soft_wrap=True)
    return 0


# Digest of the logs in one folder.
def _digest_folder(root: Path, folder: Path) -> _Digest:
    relative_path = folder.relative_to(root).as_posix()
    try:
        run_sets = [run_set for run_set in load_run_sets(folder) if run_set.folder == folder]
    except EncoreError:
        run_sets = []
    empty = _Digest(root=root, folder=relative_path, left_out="no MLPerf log")
    if not run_sets:
        return empty
    run_set = max(run_sets, key=lambda run_set: run_set.runs)
    name = _submission_name(run_set, folder, relative_path)
    if run_set.round is None or name is None:
        no_name = "not the logs of a submission: no results/SYSTEM in the path"
        return replace(empty, left_out=run_set.missing if run_set.round is None else no_name)
    other_sets = [f"{other.runs} logs of {other.round} {other.benchmark}" for other in run_sets if other is not run_set]
    entry, row = make_entry(run_set, name, relative_path), _row(run_set, name)
    return replace(empty, round=run_set.round, entry=entry, row=row, left_out=", ".join(other_sets))


# ROUND/SUBMITTER/SYSTEM from the folder ``SUBMITTER/results/SYSTEM``, else from the published cell
def _submission_name(run_set: RunSet, folder: Path, relative_path: str) -> str | None:
    parts = folder.absolute().parts
    if _CODE.intersection(relative_path.split("/")):
        return None
    if run_set.round != "v0.5" and "results" in parts[1:-1]:
        index = len(parts) - 2 - parts[-2::-1].index("results")
        return f"{run_set.round}/{parts[index - 1]}/{parts[index + 1]}"
    # v0.5 and copies of logs in other repositories are organized differently.
    path = "/".join(part for part in parts if part != "results")
    cells = (cell for cell in load_published() if cell.round == run_set.round)
    matches = [cell for cell in cells if f"/{cell.name.split('/', 1)[1]}/" in path]
    return next((cell.name for cell in matches or cells_at(folder, run_set.round, run_set.benchmark)), None)


def make_entry(run_set: RunSet, name: str, folder: str) -> dict[str, Any]:
    """Return the digest of a run set. Lists have one value per run, in file order."""
    runs = run_set.logs
    finished = [run for run in runs if (run.elapsed_minutes or 0.0) > 0]
    phases = {id(run): phases_of(run) for run in finished}
    phase_seconds = {name: [phases.get(id(run), {}).get(name) for run in runs] for name in PHASES}
    seeds, platforms = [run.seeds for run in runs], [run.platform for run in runs if run.platform]
    return {
        "name": name,
        "benchmark": run_set.benchmark,
        "folder": folder,
        "division": run_set.division,
        # Most frequent platform in the logs
        "platform": next((name for name, _ in Counter(platforms).most_common(1)), None),
        "required": run_set.required,
        "missing": run_set.missing,
        "score_minutes": _round_digits(run_set.score.estimate, _TIME_DIGITS)
        if run_set.score and run_set.score_is_official
        else None,
        # Number of finished runs that are scored, in file order, and number dropped at each end
        "scored": run_set.score.count if run_set.score else 0,
        "trimmed": run_set.score.trimmed if run_set.score else 0,
        "minutes": [_round_digits(run.elapsed_minutes, _TIME_DIGITS) if id(run) in phases else None for run in runs],
        "reasons": [run.reason.value if run.reason else None for run in runs],
        "unit": run_set.length_unit,
        "lengths": [_length(run, run_set.length_unit) if id(run) in phases else None for run in runs],
        # Index of the first run with the same seeds: 0, 1, 2 ... if all seeds differ
        "seeds": [seeds.index(value) if value else None for value in seeds],
        "phases": {
            name: [_round_digits(value) for value in values]
            for name, values in phase_seconds.items()
            if values.count(None) < len(values)
        },
        "curves": [
            [
                [_round_digits(value) for value in curve.minutes],
                {name: [_round_digits(value) for value in values] for name, values in curve.values.items()},
            ]
            for curve in run_set.curves
        ],
        "global_batch": run_set.global_batch,
        "train_samples": run_set.train_samples,
        "hyperparameters": dict(sorted(run_set.hyperparameters.items())),
        **({"losses": losses} if (losses := thin_losses(run_set.losses)) else {}),
    }


def thin_losses(curves: Sequence[LossCurve]) -> list[tuple[list[float], list[float]]]:
    """Return the curves with at most _LOSSES means of consecutive losses each; the same numbers of losses in all."""
    stride = -(-max((len(samples) for samples, _ in curves), default=1) // _LOSSES)
    thinned = []
    for samples, losses in curves:
        widths = [end - start for start, end in zip((0.0, *samples), samples, strict=False)]
        parts = [slice(start, start + stride) for start in range(0, len(samples), stride)]
        means = [
            sum(map(operator.mul, widths[part], losses[part])) / sum(widths[part]) for part in parts if widths[part]
        ]
        ends = [samples[min(part.stop, len(samples)) - 1] for part in parts]
        thinned.append((ends, [float(f"{mean:.{_LOSS_DIGITS}g}") for mean in means]))
    return thinned


def _length(run: RunLog, unit: str) -> float | None:
    length = length_of(run)
    return (
        _round_digits(length.value, _TIME_DIGITS)
        if length is not None and length.unit == unit and length.value > 0
        else None
    )


def _round_digits(value: float | None, digits: int = DIGEST_DIGITS) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


# Write and return the round's digests. Of two sets with the same name, keep the one with more runs.
def _write(output: Path, round_: str, digests: Sequence[_Digest], screen: Console) -> list[_Digest]:
    sets: dict[tuple[str, str], _Digest] = {}
    left_out = {digest.folder: digest.left_out for digest in digests if digest.left_out}
    with_entry = [digest for digest in digests if digest.entry]
    for digest in sorted(
        with_entry, key=lambda digest: (-len(digest.entry["minutes"]), len(digest.folder), digest.folder)
    ):
        key = (digest.entry["name"], digest.entry["benchmark"] or "")
        if sets.setdefault(key, digest) is not digest:
            left_out[digest.folder] = f"{sets[key].folder} has the name {' '.join(key)} as well"
    unique = [sets[key] for key in sorted(sets)]
    runs = sum(len(digest.entry["minutes"]) for digest in unique)
    repository = repository_of(round_)
    header: dict[str, Any] = {
        "round": round_,
        "repository": repository,
        "license": "Apache-2.0" if repository.startswith("mlcommons/") else None,  # Forks: license unknown
        "sets": len(unique),
        "runs": runs,
        "left_out": dict(sorted(left_out.items())),
    }
    text = "".join(
        json.dumps(line, separators=(",", ":")) + "\n" for line in (header, *(digest.entry for digest in unique))
    )
    path = output / "digests" / f"{round_}.jsonl.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    screen.print(f"{path}: {len(unique)} sets, {runs} runs, {path.stat().st_size:,} bytes", highlight=False)
    for folder, reason in header["left_out"].items():
        screen.print(f"left out: {folder}: {reason}", highlight=False, soft_wrap=True)
    return unique


# Add a row to published.csv for each new set; return the number of rows.
def _add_rows(output: Path, digests: Sequence[_Digest]) -> int:
    with (DATA / "published.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    existing = {(f"{row['round']}/{row['submitter']}/{row['system']}", canonical(row["benchmark"])) for row in rows}
    new_rows = {(digest.entry["name"], digest.entry["benchmark"]): digest.row for digest in digests}
    missing = [key for key in sorted(new_rows.keys() - existing, key=str) if (key[0], None) not in existing]
    new = [new_rows[key] for key in missing]
    order = ("round", "benchmark", "submitter", "system")
    with (output / "published.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*rows, *new], key=lambda row: [row[name] for name in order]))
    return len(new)


# Row of published.csv for the set
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
        "note": "" if repository.startswith("mlcommons/") else f"logs of the fork {repository}",
        **{name: text for name, text in figures.items() if isinstance(text, str)},
    }


if __name__ == "__main__":
    sys.exit(main())
