"""Evaluate experiments: time to target, compliance of the log, and how the result may be reported."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from encore import catalogue, files
from encore.results.compliance.compliance import check
from encore.results.findings import ComplianceReport
from encore.results.format import count_of, with_names
from encore.results.logs.run_log import RunLog, read_run
from encore.results.logs.timing import length_of
from encore.results.rules import ROUNDS
from encore.run.follow import read_progress
from encore.run.run_folder import FINISHED, Experiment, ExperimentState, RunFolder


@dataclass(frozen=True, kw_only=True)
class ExperimentSummary:
    """Progress of an experiment: from the log if finished, otherwise from the metrics stream."""

    number: int
    state: ExperimentState
    log: RunLog | None  # None before it has finished
    epochs: float
    planned_epochs: int
    position: str  # Progress in epochs or samples
    qualities: Mapping[str, float]  # Of the evaluation that met the targets, else of the last one
    targets: Mapping[str, float]
    resumed: bool  # Whether it resumed from a checkpoint; the minutes then include the interruption
    compliance: ComplianceReport | None

    @property
    def seed(self) -> int | None:
        return self.log.seeds[0] if self.log and self.log.seeds else None

    @property
    def minutes(self) -> float | None:
        return self.log.minutes if self.log else None


def evaluate_experiment(
    experiment: Experiment, benchmark: catalogue.Benchmark, ruleset: str | None = None
) -> ExperimentSummary:
    # A finished experiment's minutes, epochs and qualities are from its log, which is checked if a ruleset is given.
    progress, state = read_progress(experiment.metrics), experiment.state()
    finished = state.status in FINISHED and experiment.result.exists()
    log = read_run(experiment.result) if finished else None
    length = length_of(log) if log else None
    epochs = length.value if length and length.unit == "epochs" else float(progress.epoch)
    return ExperimentSummary(
        number=experiment.number,
        state=state,
        log=log,
        epochs=int(epochs) if epochs.is_integer() else epochs,
        planned_epochs=progress.epochs,
        position=progress.position,
        qualities=benchmark.named(log.best_quality) if log else progress.qualities,
        targets=benchmark.targets(files.read_json(experiment.config)),
        resumed=progress.starts > 1,
        compliance=check(experiment.result, ruleset) if log and ruleset else None,
    )


def evaluate_run(run: RunFolder) -> list[ExperimentSummary]:
    """Evaluate a run's experiments by its round's rules; benchmarks outside MLPerf have no rules."""
    metadata = run.metadata()
    benchmark = catalogue.choose(metadata["name"]).benchmark
    round_name = metadata["round"]
    ruleset = f"{round_name.removeprefix('v')}.0" if round_name in ROUNDS else None
    return [evaluate_experiment(experiment, benchmark, ruleset) for experiment in run.experiments()]


def standing(run: RunFolder) -> str:
    metadata = run.metadata()
    return f"{metadata['submission']['text']}; trained on {metadata['data']['name']}"


def is_trial(run: RunFolder) -> bool:
    """Whether a run only tests the setup: on CPUs, or on a toy data set."""
    metadata = run.metadata()
    return bool(metadata["configuration"]["device"]["value"] == "cpu" or metadata["submission"]["kind"] == "small")


def trial_result(run: RunFolder, summaries: Sequence[ExperimentSummary]) -> str:
    """Summarize a trial in one line.

    ``OK: trained on 2 CPU ranks to 0.9798 (target 0.95) in 47 s; toy data, not a reproduction``; for several runs
    ``OK: 5 of 5 runs on 2 CPU ranks reached the target (0.95) in 44 to 61 s; toy data, not a reproduction``.
    """
    metadata = run.metadata()
    small, name = catalogue.choose(metadata["name"]).benchmark.small_data.name, metadata["data"]["name"]
    data = "toy data" if name == small else f"data set {name}"
    kind = "CPU rank" if metadata["configuration"]["device"]["value"] == "cpu" else "GPU"
    ranks = count_of(metadata["nodes"] * metadata["ranks_per_node"], kind)
    reached = [60 * experiment.minutes for experiment in summaries if experiment.minutes is not None]
    target = with_names(summaries[0].targets, "g")
    if len(summaries) == 1 and reached:
        quality = with_names(summaries[0].qualities)
        result = f"OK: trained on {ranks} to {quality} (target {target}) in {reached[0]:.0f} s"
    else:
        is_ok = "OK" if len(reached) == len(summaries) else "NOT OK"
        times = " in " + " to ".join(f"{t:.0f}" for t in sorted({min(reached), max(reached)})) + " s" if reached else ""
        runs = count_of(len(summaries), "run")
        result = f"{is_ok}: {len(reached)} of {runs} on {ranks} reached the target ({target}){times}"
    return f"{result}; {data}, not a reproduction"
