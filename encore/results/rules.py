"""Rules per round, from data: number of runs, quality targets, dropped runs, data set sizes.

``data/rounds/`` contains a TOML file per round, such as ``v0.7.toml``, and ``benchmarks.toml`` with the properties
of benchmarks that do not change between rounds. New rounds only need a new file there, and rule files in
mlperf-logging. Sources are listed at the top of every file.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from encore.files import read_toml

Run = TypeVar("Run")

_FOLDER = Path(__file__).parent / "data" / "rounds"
# Benchmarks of MLPerf HPC, whose rounds have the same numbers, but different rules
_HPC = frozenset({"cosmoflow", "deepcam", "oc20", "openfold"})


@dataclass(frozen=True)
class Target:
    """A quality target. ``name`` is the part of the logged value, by default "value"."""

    name: str
    value: float
    unit: str
    higher_is_better: bool = True
    # End of the unit's range on the better side, as in ATLEAST_ONE_CHECK. Values at or beyond it are in another unit,
    # such as per cent instead of a fraction.
    limit: float = 1.0
    slack: float = 0.0
    strict: bool = False  # Whether the target must be exceeded

    @property
    def quality(self) -> str:
        return self.unit.partition(",")[0]

    def met_by(self, quality: Mapping[str, float]) -> bool:
        value = quality.get(self.name)
        if value is None or self.out_of_range(value) or (self.strict and value == self.value):
            return False
        return value >= self.value - self.slack if self.higher_is_better else value <= self.value + self.slack

    def out_of_range(self, value: float) -> bool:
        return value >= self.limit if self.higher_is_better else value <= self.limit


@dataclass(frozen=True, kw_only=True)
class Rule:
    round: str
    benchmark: str
    runs: int
    targets: tuple[Target, ...]
    dropped_each_side: int = 1
    may_miss: int = 1  # Runs that may miss the target and then count as the slowest
    first_converging: int | None = None  # NCF of v0.5: the first N converged runs are scored

    def scored_runs(self, ordered: Sequence[Run], missed: int) -> Sequence[Run]:
        """Return the runs whose mean is the score, from the converged runs, fastest first.

        Runs that missed the target are the slowest and are dropped first.
        """
        slowest = 0 if self.first_converging else missed
        return ordered[self.dropped_each_side : len(ordered) - max(self.dropped_each_side - slowest, 0)]


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """Number of training and evaluation samples in the real data set of a benchmark."""

    source: str
    train: int | None = None
    evaluate: int | None = None
    least_train: int | None = None  # Smallest ``train_samples`` in submitted logs, if it differs from ``train``
    least_evaluate: int | None = None
    in_batches: bool = False  # Whether ``train_samples`` may be the number of batches
    also: Sequence[float] = ()  # Other counts in submitted logs: evaluation batches, samples per rank


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    runs: int  # Runs per set
    names: Sequence[str] = ()  # Other names in logs and folders
    dropped: int = 1  # Runs dropped at both ends, and runs that may miss the target
    first_converging: int | None = None
    data: DataSize | None = None
    points_in: str = "epochs"  # Unit of the reference convergence points: epochs or samples
    samples_count: bool = False  # Whether evaluations have samples_count instead of epoch_num
    earlier: str = ""  # Name of the same benchmark before round ``earlier_since``
    earlier_since: str = ""


@dataclass(frozen=True, kw_only=True)
class Round:
    dialects: Sequence[str]  # Line formats of the logs, as in ``encore.results.logs.reader.Dialect``
    targets: Mapping[str, tuple[Target, ...]]  # By benchmark
    # Years of the logs, up to the deadline in May or October
    written: Sequence[float] | None = None
    may_miss: int | None = None  # Runs that may miss the target; default: the number of dropped runs
    # Targets for large global batches, by benchmark, with the smallest such batch
    large_batch: Mapping[str, tuple[float, tuple[Target, ...]]] = field(default_factory=dict)
    results: str | None = None  # Repository of the results, if not MLCommons'


def _number(round_: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", round_)]


def _round(table: dict[str, Any]) -> Round:
    def targets_in(entries: Sequence[Mapping[str, Any]]) -> tuple[Target, ...]:
        return tuple(_target(entry, table.get("relative_slack", 0.0)) for entry in entries)

    large = table.get("large_batch", {})
    return Round(
        dialects=table["dialects"],
        targets={name: targets_in(entries) for name, entries in table["targets"].items()},
        written=table.get("written"),
        may_miss=table.get("may_miss"),
        results=table.get("results"),
        large_batch={name: (entry["from"], targets_in(entry["targets"])) for name, entry in large.items()},
    )


# A target's range excludes ``below`` and ``above``, and includes ``up_to`` and ``down_to``.
def _target(entry: Mapping[str, Any], slack: float) -> Target:
    higher = "at_most" not in entry
    value = entry.get("at_least", entry.get("more_than")) if higher else entry["at_most"]
    if higher:
        limit = math.nextafter(entry["up_to"], math.inf) if "up_to" in entry else entry.get("below", 1.0)
    else:
        limit = math.nextafter(entry["down_to"], -math.inf) if "down_to" in entry else entry.get("above", 0.0)
    return Target(
        name=entry.get("name", "value"),
        value=value,
        unit=entry["unit"],
        higher_is_better=higher,
        limit=limit,
        slack=value * slack,
        strict="more_than" in entry,
    )


_FILES = sorted(_FOLDER.glob("v*.toml"), key=lambda file: _number(file.stem))
_ROUNDS = {file.stem: _round(read_toml(file)) for file in _FILES}  # Oldest first
_BENCHMARKS = {
    name: Benchmark(**{**table, "data": DataSize(**table["data"]) if "data" in table else None})
    for name, table in read_toml(_FOLDER / "benchmarks.toml").items()
}
_ALIASES = {alias: name for name, benchmark in _BENCHMARKS.items() for alias in benchmark.names}

ROUNDS = tuple(_ROUNDS)  # All known rounds, oldest first
# Quality is BLEU from 0 to 100; v0.7 logs use 0 to 1.
BLEU_BENCHMARKS = frozenset(
    name
    for round_ in _ROUNDS.values()
    for name, targets in round_.targets.items()
    if any(target.quality == "BLEU" for target in targets)
)


def repository_of(round_: str) -> str:
    """Return the repository of the round's results, as ``owner/name``."""
    return _ROUNDS[round_].results or f"mlcommons/training_results_{round_}"


def is_before(round_: str | None, other: str) -> bool:
    return round_ in ROUNDS and ROUNDS.index(round_) < ROUNDS.index(other)


def rounds_with(dialect: str) -> frozenset[str]:
    return frozenset(name for name, round_ in _ROUNDS.items() if dialect in round_.dialects)


def canonical(name: str | None) -> str | None:
    """Return Encore's name of the benchmark, or None if unknown."""
    lowered = (name or "").strip().lower()
    lowered = _ALIASES.get(lowered, lowered)
    return lowered if lowered in _BENCHMARKS or is_hpc(lowered) else None


def later_name(benchmark: str | None, round_: str | None) -> str | None:
    """Return the benchmark's name in later rounds: since v2.0, ``ssd`` is RetinaNet on OpenImages."""
    for name, info in _BENCHMARKS.items():
        if info.earlier == benchmark and round_ in ROUNDS and not is_before(round_, info.earlier_since):
            return name
    return benchmark


def is_hpc(benchmark: str | None) -> bool:
    return benchmark in _HPC


def benchmark_of(name: str | None) -> Benchmark | None:
    """Return a benchmark's round-independent properties; None if unknown."""
    return _BENCHMARKS.get(name or "")


def rounds_of(benchmark: str) -> frozenset[str]:
    return frozenset(name for name, round_ in _ROUNDS.items() if benchmark in round_.targets)


def targets_of(round_: str, benchmark: str, global_batch: float | None = None) -> tuple[Target, ...]:
    """Return the targets for a benchmark in a round, empty if unknown.

    In v0.7, BERT's target depends on the global batch.
    """
    if round_ not in _ROUNDS:
        return ()
    min_batch, large = _ROUNDS[round_].large_batch.get(benchmark, (math.inf, ()))
    return large if (global_batch or 0.0) >= min_batch else _ROUNDS[round_].targets.get(benchmark, ())


def rule_for(round_: str | None, benchmark: str | None, global_batch: float | None = None) -> Rule | None:
    """Return the round's requirements for the benchmark, or None if the round did not include it."""
    round_rules, info = _ROUNDS.get(round_ or ""), benchmark_of(benchmark)
    if round_ is None or benchmark is None or not round_rules or not info or benchmark not in round_rules.targets:
        return None
    may_miss = info.dropped if round_rules.may_miss is None else round_rules.may_miss
    return Rule(
        round=round_,
        benchmark=benchmark,
        runs=info.runs,
        targets=targets_of(round_, benchmark, global_batch),
        dropped_each_side=info.dropped,
        may_miss=info.runs - info.first_converging if info.first_converging else may_miss,
        first_converging=info.first_converging,
    )


def data_size(benchmark: str | None, round_: str | None = None) -> DataSize | None:
    """Return the size of the benchmark's real data set, if the submitted logs agree on it."""
    info = benchmark_of(later_name(benchmark, round_))
    return info.data if info else None


ROUND_KEYS = frozenset({"run_stop", "gradient_accumulation_steps"})  # Keys that distinguish rounds
LATER_ROUNDS = rounds_with("mllog")  # Rounds with ``:::MLLOG`` lines
_ROUND_FOLDER = re.compile(r"(?:training_results_)?v(\d+\.\d)(?:\.\d)?")
# Clues that do not fit all logs in a round: logs may be submitted again in the next round.
_GUESSES = frozenset({"date", "keys"})
_PASSPORT_LIMIT = 1 << 22
_SECONDS_PER_YEAR = 365.2425 * 86400


def find_round(
    path: Path,
    dialects: Set[str],
    benchmark: str | None,
    division: str | None,
    keys: Collection[str],
    start_s: float | None,
) -> tuple[str | None, str, bool]:
    """Return the round of the log at ``path``, the clues used and whether it is a guess; or None and the reason.

    ``keys``: keys of ``ROUND_KEYS`` in the log.
    """
    if not dialects:
        return None, "no MLPerf event in the file", False
    # A running experiment's log is in the experiment folder.
    recorded = passport_of(path.parent.parent if path.name == "result.txt" else path.parent).get("round")
    recorded = recorded if isinstance(recorded, str) else ""
    if recorded and recorded not in ROUNDS:
        return None, f"its run.json has {recorded!r}, which is not an MLPerf round", False
    folder = _folders_round(path)
    if not recorded and _is_newer(folder):
        return None, f"its folder is of {folder}, which is newer than the rounds that are known, to {ROUNDS[-1]}", False
    clues = {
        "log format": frozenset().union(*map(rounds_with, dialects)),
        "benchmark": rounds_of(benchmark) if benchmark else frozenset(),
        "run folder's run.json": frozenset({recorded}),
        "folder's name": frozenset({folder}),
        "date": rounds_in(start_s) if start_s else frozenset(),
    }
    # training_1.0.0/closed_common.yaml requires gradient_accumulation_steps in closed logs; 0.7.0 and the open
    # division's rules do not.
    if division == "closed" and "run_stop" in keys:
        later = "gradient_accumulation_steps" in keys
        clues["keys"] = LATER_ROUNDS - {"v0.7"} if later else frozenset({"v0.7"})
    candidates = frozenset(ROUNDS)
    used: list[str] = []
    for name, rounds in clues.items():
        narrowed = candidates & rounds
        if narrowed and narrowed != candidates:
            candidates = narrowed
            used.append(name)
        if len(candidates) == 1:
            guess = not _GUESSES.isdisjoint(used)
            return next(iter(candidates)), f"{'inferred ' if guess else ''}from the {', '.join(used)}", guess
    names = ", ".join(round_ for round_ in ROUNDS if round_ in candidates)
    return None, f"may be any of {names}: nothing in the log distinguishes them", False


def rounds_in(seconds: float) -> frozenset[str]:
    """Return the rounds whose logs were written at a Unix time."""
    year, spans = 1970 + seconds / _SECONDS_PER_YEAR, {name: round_.written for name, round_ in _ROUNDS.items()}
    return frozenset(name for name, span in spans.items() if span and span[0] <= year < span[1])


# Round in the name of the log's folder or a parent folder, known or newer; "" if none
def _folders_round(path: Path) -> str:
    matches = (_ROUND_FOLDER.fullmatch(part) for part in reversed(path.absolute().parts[:-1]))
    rounds = (f"v{match[1]}" for match in matches if match)
    return next((round_ for round_ in rounds if round_ in ROUNDS or _is_newer(round_)), "")


def _is_newer(round_: str) -> bool:
    return _number(round_) > _number(ROUNDS[-1])


def passport_of(folder: Path) -> dict[str, Any]:
    """Read ``run.json`` in an Encore run folder; empty if missing or damaged."""
    path = folder / "run.json"
    try:
        loaded = json.loads(path.read_text("utf-8")) if path.stat().st_size <= _PASSPORT_LIMIT else None
    except (OSError, ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
