"""Run sets, as compared with each other: runs of Encore or a published submission.

    from encore.results.compare.run_set import load_run_sets, submission
    for run_set in load_run_sets("results/20260101T120000Z-resnet-mxnet-dgxa100"):
        print(run_set.label, run_set.score.estimate, run_set.hardware.accelerator)
    print(submission(cell).score.spread, submission(cell).curves)

``data/digests/`` contains the data for a comparison with any public set. Only the requested round is read.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from encore.errors import EncoreError
from encore.results.audit.audit import audit_score
from encore.results.findings import Finding
from encore.results.logs.run_log import RunLog
from encore.results.logs.timing import Curve, curve_of, length_of, mean_phases, phases_of
from encore.results.published.published import PublishedResult, System, lines_of, system_of
from encore.results.published.systems import cells_at, nearest_description, rounds_system
from encore.results.rules import Rule, Target, is_before, passport_of, rule_for, targets_of
from encore.results.scores.score import (
    SCALED_SINCE,
    Flag,
    Lack,
    Score,
    find_sets,
    official,
    official_score_text,
    score_folder,
)
from encore.results.statistics import Sample

LossCurve = tuple[Sequence[float], Sequence[float]]  # Samples trained, increasing, and the training losses


@dataclass(frozen=True, kw_only=True)
class RunSet:
    """A set of runs. Times are in minutes, phases in seconds."""

    label: str
    round: str | None
    benchmark: str | None
    hardware: System
    score: Sample | None = None  # Minutes to the target; None where no run converged
    # Whether this is a score by the round's rules; otherwise it is the mean of the available runs
    score_is_official: bool = False
    # Factor from raw to official score; None if unknown
    scaling_factor: float | None = None
    score_kind: Literal["raw", "official"] = "raw"
    lack: Lack | None = None  # Reason for a missing official score
    missing: str = ""  # Human-readable form of lack
    runs: int = 0
    converged: int = 0
    required: int | None = None
    lengths: Sample | None = None
    length_unit: str = ""
    # Minutes per epoch (or per sample, or per evaluation), evaluation and start included.
    per_length: Sample | None = None
    global_batch: float | None = None
    train_samples: float | None = None
    division: str | None = None
    targets: tuple[Target, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    # Quality over time of each run, thinned; empty without logs and digest
    curves: tuple[Curve, ...] = ()
    losses: tuple[LossCurve, ...] = ()  # Of the runs whose logs have training losses; thinned in digests
    hyperparameters: Mapping[str, object] = field(default_factory=dict)
    # Environment, versions and data set, which are not in the system description; from Encore's run.json
    settings: Mapping[str, object] = field(default_factory=dict)
    passport: Mapping[str, Any] = field(default_factory=dict)
    # Published result of this run set or of its logs
    published: PublishedResult | None = None
    logs: tuple[RunLog, ...] = ()
    minutes: tuple[float, ...] = ()  # Raw minutes of each converged run, if known
    findings: tuple[Finding, ...] = ()  # Findings of the audit, errors first
    flags: tuple[Flag, ...] = ()  # Remarks on the scoring
    folder: Path | None = None
    round_is_guess: bool = False

    @property
    def ranks(self) -> int | None:
        if self.hardware.accelerators:
            return self.hardware.accelerators
        nodes, ranks_per_node = self.passport.get("nodes"), self.passport.get("ranks_per_node")
        return nodes * ranks_per_node if isinstance(nodes, int) and isinstance(ranks_per_node, int) else None

    @property
    def raw_minutes(self) -> float | None:
        """Raw score, or the mean of the runs if the score is missing"""
        if self.score is None:
            return None
        scaled = self.score_kind == "official" and self.score_is_official
        return self.score.estimate / (self.scaling_factor or 1.0) if scaled else self.score.estimate

    @property
    def official_minutes(self) -> float | None:
        """Raw score times the scaling factor; None if either is unknown"""
        return official(self.raw_minutes, self.scaling_factor) if self.score_is_official else None

    @property
    def score_name(self) -> str:
        return "score" if self.scaling_factor == 1.0 else f"{self.score_kind} score"

    @property
    def submission(self) -> Mapping[str, Any]:
        """Submission status in Encore's run.json: ``kind``, ``submitted``, ``of``, ``text``"""
        submission = self.passport.get("submission")
        return submission if isinstance(submission, dict) else {}

    @property
    def deviations(self) -> tuple[str, ...]:
        deviations = self.passport.get("deviations")
        entries = deviations if isinstance(deviations, list) else []
        return tuple(str(entry.get("text", "")) for entry in entries if isinstance(entry, dict))

    @property
    def choices(self) -> Mapping[str, str]:
        """Choices of the runs for unspecified settings, by key and operator; " / " separates different choices"""
        return _choices(self.passport)

    @property
    def is_cpu(self) -> bool:
        return self.hardware.accelerators == 0


def load_run_sets(path: str | Path) -> list[RunSet]:
    """Load all run sets at or below ``path``: a run folder, a log folder, or a tree of folders."""
    return [build_run_set(score) for score in score_folder(path)]


def load_run_set(path: str | Path) -> RunSet:
    """Load the run set at ``path`` and look it up in the public sets; EncoreError if there are several."""
    scores = score_folder(path)
    if len(scores) > 1:
        names = ", ".join(str(score.folder) for score in scores[:4])
        raise EncoreError(
            f"{path} contains {len(scores)} sets of runs: {names}{' ...' if len(scores) > 4 else ''}",
            expected="the runs of one benchmark on one system",
            hint="pass one of these folders",
        )
    return build_run_set(scores[0], audit_score(scores[0], in_digests=True))


def build_run_set(score: Score, findings: tuple[Finding, ...] | None = None) -> RunSet:
    """Convert a scored set. ``findings``: audit findings, by default from an audit of this set only."""
    passport = passport_of(score.folder)
    scored = score.converged if score.score_minutes is None else (*score.counted, *score.dropped)
    times = [run.minutes for run in scored if run.minutes is not None]
    trimmed = (len(times) - len(score.counted)) // 2 if score.score_minutes is not None else 0
    minutes = score_sample(times, trimmed, score.score_minutes)
    finished = [run for run in score.runs if (run.elapsed_minutes or 0.0) > 0]
    scored_runs = score.counted or score.converged or finished
    lengths_by_run = [(run, length) for run in finished if (length := length_of(run)) is not None and length.value > 0]
    unit = statistics.mode(length.unit for _, length in lengths_by_run) if lengths_by_run else ""
    trained = [
        TrainedRun(
            run.elapsed_minutes or 0.0,
            length.value,
            run.converged,
            any(run is scored_run for scored_run in scored_runs),
        )
        for run, length in lengths_by_run
        if length.unit == unit
    ]
    lengths, per_length = length_samples(trained, minutes.trimmed if minutes else 0)
    with_events = [run for run in score.runs if run.events]
    first = next(iter(with_events), None)
    return RunSet(
        label=score.folder.name if passport else "/".join(score.folder.absolute().parts[-3:]),
        round=score.round,
        benchmark=score.benchmark,
        hardware=_hardware(score, first),
        score=minutes,
        score_is_official=score.score_minutes is not None,
        scaling_factor=score.scaling_factor,
        lack=score.lack,
        missing=score.missing,
        runs=len(score.runs),
        converged=len(score.converged),
        required=score.required,
        lengths=lengths,
        length_unit=unit,
        per_length=per_length,
        global_batch=first.global_batch if first else None,
        train_samples=first.train_samples if first else None,
        division=first.division if first else None,
        targets=targets_for(score.round, score.benchmark, first.global_batch if first else None),
        phases=mean_phases([phases_of(run) for run in scored_runs]),
        curves=tuple(curve_of(run) for run in score.runs),
        losses=tuple(
            ([samples for samples, _ in run.losses], [loss for _, loss in run.losses])
            for run in score.runs
            if run.losses
        ),
        hyperparameters=_common_hyperparameters(with_events),
        settings=_settings(passport),
        passport=passport,
        logs=score.runs,
        minutes=tuple(run.minutes for run in score.converged if run.minutes is not None),
        findings=audit_score(score) if findings is None else findings,
        flags=score.flags,
        folder=score.folder,
        round_is_guess=score.round_is_guess,
    )


def targets_for(round_: str | None, benchmark: str | None, batch: float | None) -> tuple[Target, ...]:
    if rule_for(round_, benchmark, batch) is None or round_ is None or benchmark is None:
        return ()
    return targets_of(round_, benchmark, batch)


def score_sample(minutes: Sequence[float], trimmed: int, score: float | None) -> Sample | None:
    """Return the official score with the spread between its runs, or the mean of the converged runs."""
    if not minutes:
        return None
    return Sample.of(minutes, trimmed) if score is None else replace(Sample.of(minutes, trimmed), estimate=score)


class TrainedRun(NamedTuple):
    """A finished run: minutes, trained length, and whether it converged and counts for the score."""

    minutes: float
    length: float
    reached: bool
    counted: bool


def length_samples(runs: Sequence[TrainedRun], trimmed: int) -> tuple[Sample | None, Sample | None]:
    """Return epochs to the target and minutes per epoch. The latter includes all finished runs if none converged.

    The means are taken over the scored runs, so that their product is the score. The spread is taken over all runs:
    dropped runs are usually those that needed another epoch.
    """
    reached = [run for run in runs if run.reached]
    speeds = [run.minutes / run.length for run in reached or runs]
    if not reached:
        return None, Sample.of(speeds) if speeds else None
    lengths, per_length = Sample.of([run.length for run in reached], trimmed), Sample.of(speeds, trimmed)
    scored = [run for run in reached if run.counted] or reached
    total = sum(run.length for run in scored)
    return (
        replace(lengths, estimate=total / len(scored)),
        replace(per_length, estimate=sum(run.minutes for run in scored) / total),
    )


# Common hyperparameters; the most frequent value if the runs differ
def _common_hyperparameters(runs: Sequence[RunLog]) -> dict[str, object]:
    texts: dict[str, list[str]] = {}
    for key, value in (item for run in runs for item in run.hyperparameters.items()):
        texts.setdefault(key, []).append(json.dumps(value, sort_keys=True))
    return {key: json.loads(statistics.mode(values)) for key, values in texts.items()}


def _hardware(score: Score, first: RunLog | None) -> System:
    description = nearest_description(score.folder)
    if description is not None and description.described:
        return description
    by_name = rounds_system(score.folder, score.round, first.platform if first else None)
    return replace(by_name, caveat=description.caveat) if description is not None else by_name


# Settings in run.json, flattened to dotted names
def _settings(passport: Mapping[str, Any]) -> dict[str, object]:
    def part(name: str) -> dict[str, Any]:
        return section if isinstance(section := passport.get(name), dict) else {}

    parts = {
        "code": ("commit", "uncommitted_sha256"),
        "data": ("name", "id"),
        "node": ("hostname", "kernel", "operating_system", "cpu", "cores", "memory_gib"),
    }
    top_level = ("runtime", "image", "implementation", "system", "nodes", "ranks_per_node")
    configuration = {
        name: entry.get("value") if isinstance(entry, dict) else entry for name, entry in part("configuration").items()
    }
    choices = _choices(passport)
    remaining = configuration.keys() - {name.partition(".")[0] for name in choices}
    return {
        **{name: passport[name] for name in top_level if passport.get(name) is not None},
        **{
            f"{section_name}.{name}": value
            for section_name, names in parts.items()
            for name, value in part(section_name).items()
            if name in names and value is not None
        },
        # Rank 0's environment takes precedence: images add variables, and some runtimes override variables.
        **{f"environment.{name}": value for name, value in (part("environment") | part("rank_environment")).items()},
        **{f"configuration.{name}": value for name, value in configuration.items() if name in remaining},
        **{f"configuration.{name}": value for name, value in choices.items()},
    }


# Choices of all experiments in run.json, merged
def _choices(passport: Mapping[str, Any]) -> dict[str, str]:
    recorded = passport.get("choices")
    values_by_name: dict[str, dict[str, None]] = {}
    for choices in recorded.values() if isinstance(recorded, dict) else ():
        for key, value in choices.items() if isinstance(choices, dict) else ():
            flat = {f"{key}.{name}": part for name, part in value.items()} if isinstance(value, dict) else {key: value}
            for name, choice in flat.items():
                values_by_name.setdefault(name, {})[
                    str(choice).lower() if isinstance(choice, bool) else str(choice)
                ] = None
    return {name: " / ".join(values) for name, values in sorted(values_by_name.items())}


def first_step_seconds(run_set: RunSet) -> dict[str, float]:
    """Return the mean ``first_step_s`` from run_start to the first training step, where Encore's metrics have it."""
    seconds = []
    for run in run_set.logs:
        stream = run.path.parent / f"experiment_{run.path.stem.rpartition('_')[2]}" / "metrics.jsonl"
        if run.start_s is None or not stream.is_file():
            continue
        with suppress(OSError, ValueError, KeyError, TypeError), stream.open("rb") as lines:
            step = next((line for line in lines if b'"kind": "step"' in line), b"")
            seconds.append(json.loads(step)["time"] - run.start_s)
    return {"first_step_s": statistics.fmean(seconds)} if seconds else {}


# --- digests ----------------------------------------------------------------------------------------------------------


def submission(cell: PublishedResult, logs: Path | None = None) -> RunSet:
    """Return the published cell as a run set: from its logs below ``logs``, from its digest, or its score only."""
    if logs is not None and (run_set := _load_from_logs(cell, logs)):
        return run_set
    # Other lines are not parsed.
    start = f'{{"name":{json.dumps(cell.name)},"benchmark":'
    start += f"{json.dumps(cell.benchmark)}," if cell.benchmark else ""
    line = next((line for line in lines_of(cell.round)[1:] if line.startswith(start)), "")
    return _with_published_score(parse_digest(json.loads(line)) if line else _score_only(cell), cell)


def digests(round_: str) -> Iterator[RunSet]:
    return (parse_digest(json.loads(line)) for line in lines_of(round_)[1:])


def parse_digest(entry: dict[str, Any]) -> RunSet:
    round_, submitter, system = entry["name"].split("/", 2)
    scored = _scored_indices(entry, rule_for(round_, entry["benchmark"], entry["global_batch"]))
    converged = [reason is None for reason in entry["reasons"]]
    minutes = [minutes for minutes, reached in zip(entry["minutes"], converged, strict=True) if reached]
    runs = zip(entry["minutes"], entry["lengths"], converged, strict=True)
    trained = [TrainedRun(*run, number in scored) for number, run in enumerate(runs) if run[1]]
    lengths, per_length = length_samples(trained, entry["trimmed"])
    return RunSet(
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
        targets=targets_for(round_, entry["benchmark"], entry["global_batch"]),
        phases=mean_phases([{name: seconds[number] for name, seconds in entry["phases"].items()} for number in scored]),
        minutes=tuple(minutes),
        curves=tuple(
            Curve(minutes=tuple(minutes), values={name: tuple(qualities) for name, qualities in values.items()})
            for minutes, values in entry["curves"]
        ),
        losses=tuple((samples, losses) for samples, losses in entry.get("losses", ())),
        hyperparameters=entry["hyperparameters"],
    )


# Indices of the scored runs, else of the converged runs, else of the finished runs
def _scored_indices(entry: dict[str, Any], rule: Rule | None) -> list[int]:
    finished = [number for number, minutes in enumerate(entry["minutes"]) if minutes]
    converged = [number for number in finished if entry["reasons"][number] is None]
    if entry["score_minutes"] is None or rule is None:
        return converged or finished
    missed = len(entry["minutes"]) - len(converged)
    fastest_first = sorted(converged[: entry["scored"]], key=lambda number: entry["minutes"][number])
    return list(rule.scored_runs(fastest_first, missed))


# The cell's logs, if the folder contains a set with the submitted number of runs
def _load_from_logs(cell: PublishedResult, logs: Path) -> RunSet | None:
    folders = sorted(folder for folder in logs.rglob(cell.system) if folder.is_dir())
    for set_folder in (set_folder for folder in folders for set_folder, _ in find_sets(folder)):
        if [published.name for published in cells_at(set_folder, cell.round, cell.benchmark)[:1]] == [cell.name]:
            for score in score_folder(set_folder, cell.round):
                if score.benchmark == cell.benchmark and len(score.runs) == cell.runs:
                    return _with_published_score(build_run_set(score), cell)
    return None


# Replace the score with the published score, if any
def _with_published_score(run_set: RunSet, cell: PublishedResult) -> RunSet:
    if cell.score_minutes is not None:
        score = run_set.score and replace(run_set.score, estimate=cell.score_minutes)
        run_set = replace(run_set, score=score, score_is_official=True)
    factor = cell.scaling_factor or 1.0
    return replace(run_set, label=cell.name, hardware=cell.hardware, published=cell, scaling_factor=factor)


# A result without logs: the spread is that of the coefficient of variation, if run times were published
def _score_only(cell: PublishedResult) -> RunSet:
    minutes = cell.score_minutes or 0.0
    spread = minutes * cell.cv if cell.cv else None
    score = Sample(estimate=minutes, spread=spread, count=cell.runs or 1, trimmed=int(cell.runs > 2))
    return RunSet(
        label=cell.name,
        round=cell.round,
        benchmark=cell.benchmark,
        hardware=cell.hardware,
        score=None if cell.score_minutes is None else score,
        missing=cell.note,
        runs=cell.runs,
        global_batch=cell.global_batch,
        division=cell.division,
        targets=targets_for(cell.round, cell.benchmark, cell.global_batch),
    )


# --- raw and official scores --------------------------------------------------------------------------------


def use_official_scores(current: RunSet, baseline: RunSet | None) -> tuple[RunSet, RunSet | None]:
    """Convert both to official scores if both factors are known; otherwise keep raw scores."""
    factor, baseline_factor = scaling_factors(current, baseline) if baseline is not None else (None, None)
    if baseline is None or factor is None or baseline_factor is None:
        return current, baseline
    return _scale_score(current, factor), _scale_score(baseline, baseline_factor)


def scaling_factors(current: RunSet, baseline: RunSet) -> list[float | None]:
    """Return the factors from raw to official scores.

    1 in rounds without scaling, and in later rounds without a scaling.json. None if unknown.
    """
    return [
        1.0 if run_set.scaling_factor is None and is_before(run_set.round, SCALED_SINCE) else run_set.scaling_factor
        for run_set in (current, baseline)
    ]


def _scale_score(run_set: RunSet, factor: float) -> RunSet:
    score = run_set.score
    if score is not None and run_set.score_is_official:
        spread = None if score.spread is None else score.spread * factor
        score = replace(score, estimate=score.estimate * factor, spread=spread)
    return replace(run_set, score=score, scaling_factor=factor, score_kind="official")


def score_caveats(current: RunSet, baseline: RunSet) -> Iterator[str]:
    """Describe the compared scores, if raw and official scores differ."""
    factors = [run_set.scaling_factor or 1.0 for run_set in (current, baseline)]
    if factors == [1.0, 1.0]:
        return
    if current.score_kind == "official":
        scores = f"raw scores x {factors[0]:.4f} (yours) and x {factors[1]:.4f}"
        yield f"official score against official score: {scores}, reference convergence"
        return
    run_sets = {"yours": current, baseline.label: baseline}
    missing = " and ".join(name for name, run_set in run_sets.items() if run_set.scaling_factor is None)
    official_scores = [
        f"; {name}: {official_score_text(run_set.score.estimate * run_set.scaling_factor, run_set.scaling_factor)}"
        for name, run_set in run_sets.items()
        if run_set.scaling_factor is not None and run_set.score is not None
    ]
    yield f"raw score against raw score, as {missing} has no scaling.json{''.join(official_scores)}"
