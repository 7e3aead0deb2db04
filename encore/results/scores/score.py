"""Scores of run sets by the rules of their round.

    from encore.results.scores.score import score_folder
    for score in score_folder("results/dgxa100/resnet"):
        print(score.round, score.benchmark, score.score_minutes, score.missing)

The raw score is the mean of the runs without the fastest and the slowest (training_rules.adoc, benchmark results).
Sets that converge in fewer epochs than the reference get the reference's epochs: since v2.0, mlperf-logging's
package checker writes a factor into scaling.json, and the official score is the raw score times that factor.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TypeVar

from typing_extensions import TypedDict

from encore.errors import EncoreError
from encore.results.findings import Finding
from encore.results.logs.parallel import FileSet, OnRead, map_files, map_sets
from encore.results.logs.reader import has_mark
from encore.results.logs.run_log import Reason, RunLog, read_run
from encore.results.rules import LATER_ROUNDS, ROUNDS, Rule, is_before, is_hpc, rule_for

_RESULT = re.compile(r"result.*\.txt(\.gz)?", re.IGNORECASE)
_SUBMISSION = frozenset({"benchmarks", "benchmark", "systems", "code"})  # Siblings of results/ in a submitter's tree
_OTHER_LOG = re.compile(r".*\.(txt|log|out)(\.gz)?", re.IGNORECASE)


class Lack(str, Enum):
    NO_RULE = "no_rule"
    TOO_FEW_RUNS = "too_few_runs"
    NOT_CONVERGED = "not_converged"  # More runs missed the target than the round allows
    UNUSABLE_LOG = "unusable_log"
    NONE_COUNTED = "none_counted"


@dataclass(frozen=True)
class Flag:
    """Note about the scoring; ``log`` is the log concerned, None: the set."""

    text: str
    log: Path | None = None


class RunJson(TypedDict):
    """A run of a set."""

    file: str
    minutes: float | None  # To the target; null of a run without a time
    reason: Reason | None  # Why it has none
    explanation: str
    elapsed_minutes: float | None
    quality: dict[str, float]  # Of the evaluation that met the targets, else the best
    epochs: float | None
    seeds: list[int]
    flags: list[str]
    counted: bool
    dropped: bool  # Whether it is the fastest or the slowest, which a score leaves out


class ClaimJson(TypedDict):
    """The score of a set of runs by the rules of its round."""

    folder: str
    round: str | None
    benchmark: str | None
    score_minutes: float | None  # The raw score
    scaling_factor: float | None  # Of scaling.json; null without one
    official_minutes: float | None  # The raw score times that factor
    required: int | None  # Number of runs that the round requires
    runs: list[RunJson]
    counted: list[str]  # Files of the runs that the score is the mean of
    dropped: list[str]
    converged: int
    lack: Lack | None  # Reason for the missing score; null with a score
    missing: str  # The same as a sentence
    flags: list[str]


class ScoreJson(ClaimJson):
    """The score of a set, and whether its round was said."""

    round_is_guess: bool


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of a run set, or the reason why it has none."""

    folder: Path
    round: str | None
    benchmark: str | None
    runs: tuple[RunLog, ...]
    required: int | None  # Runs required by the round; None if the round or benchmark is unknown
    counted: tuple[RunLog, ...] = ()
    dropped: tuple[RunLog, ...] = ()
    score_minutes: float | None = None  # The raw score
    scaling_factor: float | None = None  # From scaling.json; None without that file
    lack: Lack | None = None  # Reason why there is no score; None with a score
    missing: str = ""  # The same as a sentence
    flags: tuple[Flag, ...] = ()  # Notes about the scoring; unusual logs are findings of the audit
    # Whether the round was taken from the date or the keys of the logs, which neighbouring rounds share.
    round_is_guess: bool = False

    @property
    def official_minutes(self) -> float | None:
        """The raw score times the factor; None without a scaling.json."""
        return official(self.score_minutes, self.scaling_factor)

    @property
    def converged(self) -> tuple[RunLog, ...]:
        return tuple(run for run in self.runs if run.converged)

    def as_json(self, findings: Sequence[Finding] = ()) -> ScoreJson:
        """Return the score as plain data, with an audit's findings."""
        counted, dropped = set(map(id, self.counted)), set(map(id, self.dropped))
        return {
            "folder": str(self.folder),
            "round": self.round,
            "round_is_guess": self.round_is_guess,
            "benchmark": self.benchmark,
            "score_minutes": _rounded(self.score_minutes),
            "scaling_factor": self.scaling_factor,
            "official_minutes": _rounded(self.official_minutes),
            "required": self.required,
            "runs": [
                {
                    "file": run.path.name,
                    "minutes": _rounded(run.minutes),
                    "reason": run.reason,
                    "explanation": run.explanation,
                    "elapsed_minutes": _rounded(run.elapsed_minutes),
                    "quality": dict(run.best_quality),
                    "epochs": run.epochs,
                    "seeds": list(run.seeds),
                    "flags": _flags(findings, run.path),
                    "counted": id(run) in counted,
                    "dropped": id(run) in dropped,
                }
                for run in self.runs
            ],
            "counted": [run.path.name for run in self.counted],
            "dropped": [run.path.name for run in self.dropped],
            "converged": len(self.converged),
            "lack": self.lack,
            "missing": self.missing,
            "flags": [*(flag.text for flag in self.flags), *_flags(findings, None)],
        }


# Round to 1e-6 minutes: smaller digits are floating-point noise from Unix times.
def _rounded(minutes: float | None) -> float | None:
    return None if minutes is None else round(minutes, 6)


def _flags(findings: Sequence[Finding], path: Path | None) -> list[str]:
    return [f"{finding.rule}: {finding.found}" for finding in findings if finding.path == path]


def score_folder(path: str | PathLike[str], round_: str | None = None, on_read: OnRead | None = None) -> list[Score]:
    """Score every set of logs at or below ``path``: a file, a folder of results, or a submission tree."""
    root = existing(path)
    sets = list(find_sets(root))
    files = [file for _, set_files in sets for file in set_files]
    runs = map_files(partial(read_run, round_=round_), files, on_read)
    scores = [
        score for folder, set_files in sets for score in score_logs(folder, [*itertools.islice(runs, len(set_files))])
    ]
    if not scores:
        raise no_log(root)
    return scores


Judged = TypeVar("Judged")


def judge_folder(
    path: str | PathLike[str],
    judge: Callable[[Score], Judged],
    round_: str | None = None,
    on_read: OnRead | None = None,
) -> list[Judged]:
    """Return ``judge`` of every set at or below ``path``, computed on all cores in the process that reads the logs.

    ``judge`` must be picklable.
    """
    root = existing(path)
    sets = list(find_sets(root))
    results = map_sets(partial(_judge_set, judge=judge, round_=round_), sets, on_read)
    if results is None:
        return [judge(score) for score in score_folder(path, round_, on_read)]
    if not (judged_sets := [judged for set_results in results for judged in set_results]):
        raise no_log(root)
    return judged_sets


def _judge_set(file_set: FileSet, judge: Callable[[Score], Judged], round_: str | None) -> list[Judged]:
    folder, files = file_set
    return [judge(score) for score in score_logs(folder, [read_run(file, round_) for file in files])]


def existing(path: str | PathLike[str]) -> Path:
    root = Path(path)
    if not root.exists():
        raise EncoreError(f"{root} does not exist", expected="a folder of result files", hint="check the path")
    return root


def no_log(root: Path) -> EncoreError:
    return EncoreError(
        f"no MLPerf log in {root}",
        expected="result_0.txt, result_1.txt ... with :::MLLOG, :::MLL or :::MLPv0.5.0 lines",
        hint="pass the folder of the result files of one benchmark, or a folder above it",
    )


def find_sets(root: Path) -> Iterator[FileSet]:
    """Yield folders with result files, and the files in numerical order.

    Without files named like results, any text file with an MLPerf line is used, except below folders that have
    results: these are raw logs of the same runs. In a submitter's tree, only ``results/`` is read.
    """
    if root.is_dir():
        yield from _sets_below(root, True, set())
    else:
        yield root.parent, [root]


def _sets_below(root: Path, any_log: bool, visited: set[Path]) -> Iterator[FileSet]:
    real = root.resolve()
    if real in visited:
        return
    visited.add(real)
    try:
        entries = sorted(root.iterdir())
    except OSError as error:
        raise EncoreError(f"cannot read {root}: {error.strerror}", hint="check the folder's permissions") from error
    files = [entry for entry in entries if entry.is_file()]
    result_files = [entry for entry in files if _RESULT.fullmatch(entry.name)]
    if not result_files and (root / "run.json").is_file():
        # Encore run folder before the end of the first experiment
        result_files = sorted(log for log in root.glob("experiment_*/result.txt") if log.is_file())
    log_files = result_files or [
        entry for entry in files if any_log and _OTHER_LOG.fullmatch(entry.name) and has_mark(entry)
    ]
    if log_files:
        yield root, sorted(log_files, key=_natural)
    if result_files and (root / "run.json").is_file():
        # Encore run folder: deeper files are the sources of its result files.
        return
    folders = [entry for entry in entries if entry.is_dir()]
    if not _SUBMISSION.isdisjoint(folder.name for folder in folders):
        # Submitter's tree: logs outside of results/ are examples and program output
        folders = [folder for folder in folders if folder.name == "results"] or folders
    for folder in folders:
        yield from _sets_below(folder, any_log and not result_files, visited)


def score_runs(folder: Path, runs: Sequence[RunLog]) -> Score:
    """Score runs with the same benchmark and round, in file order."""
    first = next((run for run in runs if run.events), runs[0])
    round_, benchmark = (first.round, first.benchmark) if first.events else (None, None)
    rule = rule_for(round_, benchmark, first.global_batch)
    scaling = read_scaling(folder, round_)
    score = Score(
        folder=folder,
        round=round_,
        benchmark=benchmark,
        runs=tuple(runs),
        required=rule.runs if rule else None,
        scaling_factor=scaling.factor,
        round_is_guess=any(run.round_is_guess for run in runs if run.events),
        flags=(Flag(scaling.flag),) if scaling.flag else (),
    )
    if rule is None:
        return replace(score, lack=Lack.NO_RULE, missing=_no_rule(runs, round_, benchmark))
    return _apply_rule(rule, score)


def _apply_rule(rule: Rule, score: Score) -> Score:
    runs, converged = score.runs, score.converged
    if len(runs) < rule.runs:
        lacking = rule.runs - len(runs)
        missing = f"{len(runs)} of {rule.runs} runs: {lacking} more needed"
        return replace(score, lack=Lack.TOO_FEW_RUNS, missing=missing)
    if rule.first_converging:
        if len(converged) < rule.first_converging:
            missing = f"{len(converged)} runs converged, {rule.first_converging} must"
            return replace(score, lack=Lack.NOT_CONVERGED, missing=missing)
        return _olympic(rule, score, converged[: rule.first_converging], 0)
    missed = len(runs) - len(converged)
    broken = [run for run in runs if run.reason not in (*_MISSED, *_CRASHED) and not run.converged]
    if broken:
        names = ", ".join(f"{run.path.name} ({run.explanation})" for run in broken)
        return replace(score, lack=Lack.UNUSABLE_LOG, missing=f"cannot be scored: {names}")
    if missed > rule.may_miss:
        outcome = "missed the target or crashed" if any(_crashes(runs)) else "missed the target"
        missing = f"{missed} runs {outcome}; {rule.round} lets {rule.may_miss} of {rule.runs} do so"
        return replace(score, lack=Lack.NOT_CONVERGED, missing=missing)
    return _olympic(rule, replace(score, flags=(*score.flags, *_crashes(runs))), converged, missed)


_MISSED = frozenset({Reason.ABORTED, Reason.TARGET_MISSED})  # Outcomes of runs that did not converge
# A log without an end means that the run crashed, which MLCommons counts as not converged. All other reasons are
# problems of the log and tell nothing about the run.
_CRASHED = frozenset({Reason.NO_EVENTS, Reason.NO_START, Reason.NO_STOP})
NOT_CONVERGED = _MISSED | _CRASHED  # Reasons without a time that still allow scoring the set


def _crashes(runs: Sequence[RunLog]) -> Iterator[Flag]:
    for run in runs:
        if run.reason in _CRASHED:
            text = f"{run.path.name} counts as a run that missed the target, as MLCommons counts it: {run.explanation}"
            yield Flag(text, run.path)


# Mean without the fastest and the slowest; runs that missed the target are the slowest.
def _olympic(rule: Rule, score: Score, runs: Sequence[RunLog], missed: int) -> Score:
    ordered = sorted(runs, key=lambda run: run.minutes or 0.0)
    counted = rule.scored_runs(ordered, missed)
    if not counted:
        missing = "no run is left after dropping the fastest and the slowest"
        return replace(score, lack=Lack.NONE_COUNTED, missing=missing)
    not_converged = [run for run in score.runs if not run.converged] if missed else []
    counted_ids = set(map(id, counted))
    dropped = [*(run for run in ordered if id(run) not in counted_ids), *not_converged]
    minutes = math.fsum(run.minutes for run in counted if run.minutes is not None) / len(counted)
    return replace(score, counted=tuple(counted), dropped=tuple(dropped), score_minutes=minutes)


def score_logs(folder: Path, logs: Sequence[RunLog]) -> Iterator[Score]:
    """Score the logs in a folder, in file order, as one or several sets."""
    sets: dict[tuple[str | None, str | None], list[RunLog]] = {}
    strays: list[RunLog] = []
    for run in one_round(logs):
        if not run.events:
            if _RESULT.fullmatch(run.path.name):
                strays.append(run)
            continue
        sets.setdefault((run.round, run.benchmark), []).append(run)
    unnamed = [run for (_, benchmark), runs in sets.items() if benchmark is None for run in runs]
    if len({benchmark for _, benchmark in sets}) == 2 and unnamed and all(run.reason in _CRASHED for run in unnamed):
        strays += unnamed
        sets = {key: runs for key, runs in sets.items() if key[1] is not None}
    if len(sets) == 1:
        # Result files without a complete event, or that end before the benchmark's name, belong to the set of the
        # remaining files.
        runs = next(iter(sets.values()))
        score = score_runs(folder, sorted([*runs, *strays], key=lambda run: _natural(run.path)))
        (first, count), *other_rounds = Counter(run.round for run in logs if run.round).most_common() or [("", 0)]
        if other_rounds:
            rest = ", ".join(f"{number} like {round_}" for round_, number in other_rounds)
            text = f"{count} of {len(logs)} logs look like {first}, {rest}: scored as one set of {score.round}"
            score = replace(score, flags=(*score.flags, Flag(text)))
        yield score
        return
    for runs in sets.values():
        yield score_runs(folder, runs)
    if strays and not sets:
        yield score_runs(folder, strays)


def one_round(runs: Sequence[RunLog]) -> list[RunLog]:
    """Return the folder's logs, parsed by one round: logs in one folder are from one round.

    A round stated in a log or path is used for logs that leave it open; otherwise the most frequent guess is used.
    """
    stated = {run.round for run in runs if run.round in LATER_ROUNDS and not run.round_is_guess}
    guessed = Counter(run.round for run in runs if run.round and run.round_is_guess)
    if len(stated) > 1 or not (stated or guessed):
        return list(runs)
    round_ = next(iter(stated)) if stated else max(guessed, key=lambda name: (guessed[name], ROUNDS.index(name)))
    how = "from the other logs of the folder" if stated else "inferred from the other logs of the folder"
    return [
        replace(read_run(run.path, round_), round_found=how, round_is_guess=not stated)
        if run.events and run.round != round_ and (run.round is None or run.round_is_guess)
        else run
        for run in runs
    ]


def _no_rule(runs: Sequence[RunLog], round_: str | None, benchmark: str | None) -> str:
    if not any(run.events for run in runs):
        return "; ".join(sorted({f"{run.path.name}: {run.explanation}" for run in runs}))
    if benchmark is None:
        unknown = next((run.unknown_benchmark for run in runs if run.unknown_benchmark), "")
        return f"no round that is known has a benchmark {unknown!r}" if unknown else "the logs do not name a benchmark"
    if is_hpc(benchmark):
        return f"{benchmark} is a benchmark of MLPerf HPC, whose rounds have rules that are not known here"
    if round_ is None:
        return f"the round is not known: {next(run.round_found for run in runs if run.events)}"
    return f"{round_} had no {benchmark}"


# Key that sorts result_2 before result_10.
def _natural(path: Path) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts]


# --- the factor of scaling.json --------------------------------------------------------------------------------


_LARGEST_FILE = 1 << 16
_LARGEST_FACTOR = 10  # The largest of 498 public factors is 1.19
SCALING_FILE = "scaling.json"
SCALED_SINCE = "v2.0"  # First round with a scaling.json, in one set; since v2.1 in all sets that need one


@dataclass(frozen=True)
class Scaling:
    """Factor of a set; None without a usable ``scaling.json``, with the problem in ``flag``."""

    factor: float | None = None
    flag: str = ""


def read_scaling(folder: Path, round_: str | None = None) -> Scaling:
    """Return the factor in the folder's ``scaling.json``; in a round that had none it is not used."""
    path = folder / SCALING_FILE
    if path.is_file() and is_before(round_, SCALED_SINCE):
        return Scaling(flag=f"{SCALING_FILE} is not used: {round_} had none")
    try:
        if path.stat().st_size > _LARGEST_FILE:
            return Scaling(flag=f"{SCALING_FILE} is not used: larger than {_LARGEST_FILE} bytes")
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return Scaling()
    except (OSError, ValueError, RecursionError) as error:
        return Scaling(flag=f"{SCALING_FILE} is not used: {type(error).__name__}, expected one JSON object")
    factor = content.get("scaling_factor") if isinstance(content, dict) else None
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        return Scaling(flag=f"{SCALING_FILE} is not used: it has no number called scaling_factor")
    if not 1.0 <= factor <= _LARGEST_FACTOR:
        # mlperf-logging writes none below 1: it would make the official score better than the logs.
        return Scaling(flag=f"{SCALING_FILE} is not used: a factor of {str(factor)[:20]}, expected 1 to 10")
    return Scaling(float(factor))


def official(minutes: float | None, factor: float | None) -> float | None:
    """Return the official score for a raw score, or None without a factor."""
    return minutes * factor if minutes is not None and factor is not None else None


def official_score_text(minutes: float, factor: float) -> str:
    """Return ``official score 13.218 minutes (x 1.0042, reference convergence)``."""
    return f"official score {minutes:.3f} minutes (x {factor:.4f}, reference convergence)"
