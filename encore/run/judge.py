"""Judge ended experiments: time to target, compliance of the log, and what the result may be called."""

from collections.abc import Mapping
from dataclasses import dataclass

from encore import catalogue, files
from encore.results.compliance.compliance import check
from encore.results.findings import ComplianceReport
from encore.results.logs.run_log import RunLog, read_run
from encore.results.logs.timing import length_of
from encore.results.rules import ROUNDS
from encore.run.follow import read_progress
from encore.run.run_folder import FINISHED, Experiment, ExperimentState, RunFolder


@dataclass(frozen=True, kw_only=True)
class Figures:
    """How far an experiment came: by its log once it has finished, by its metrics stream before."""

    log: RunLog | None  # None before it has finished
    epochs: float
    planned_epochs: int
    qualities: Mapping[str, float]  # The evaluation that met the targets, else the last one
    targets: Mapping[str, float]
    resumed: bool  # Whether it resumed from a checkpoint: its minutes then include the time in between

    @property
    def seed(self) -> int | None:
        return self.log.seeds[0] if self.log and self.log.seeds else None

    @property
    def minutes(self) -> float | None:
        return self.log.minutes if self.log else None


@dataclass(frozen=True)
class Judgement:
    number: int
    state: ExperimentState
    figures: Figures
    compliance: ComplianceReport | None


def figures(experiment: Experiment, benchmark: catalogue.Benchmark) -> Figures:
    # How far an experiment came; minutes, epochs and qualities of a finished one are its log's.
    progress = read_progress(experiment.metrics)
    finished = experiment.state().status in FINISHED and experiment.result.exists()
    log = read_run(experiment.result) if finished else None
    length = length_of(log) if log else None
    epochs = length.value if length and length.unit == "epochs" else float(progress.epoch)
    return Figures(
        log=log,
        epochs=int(epochs) if epochs.is_integer() else epochs,
        planned_epochs=progress.epochs,
        qualities=benchmark.named(log.best_quality) if log else progress.qualities,
        targets=benchmark.targets(files.read_json(experiment.config)),
        resumed=progress.starts > 1,
    )


def judge_experiment(experiment: Experiment, benchmark: catalogue.Benchmark, ruleset: str | None) -> Judgement:
    # Judge an experiment by its log; not checked: one that has not finished, and without a ruleset.
    found = figures(experiment, benchmark)
    compliance = check(experiment.result, ruleset) if found.log and ruleset else None
    return Judgement(experiment.number, experiment.state(), found, compliance)


def judge(run: RunFolder) -> list[Judgement]:
    """Judge every experiment of a run by the rules of its round; a benchmark that MLPerf has not has none."""
    passport = run.passport()
    benchmark = catalogue.choose(passport["name"]).benchmark
    round_name = passport["round"]
    ruleset = f"{round_name.removeprefix('v')}.0" if round_name in ROUNDS else None
    return [judge_experiment(experiment, benchmark, ruleset) for experiment in run.experiments()]


def standing(run: RunFolder) -> str:
    passport = run.passport()
    return f"{passport['submission']['text']}; trained on {passport['data']['name']}"
