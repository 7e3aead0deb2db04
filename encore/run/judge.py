"""Judge ended experiments: time to target, compliance of the log, and what the result may be called."""

from __future__ import annotations

from dataclasses import dataclass

from encore import catalogue
from encore.results.compliance import check
from encore.results.findings import ComplianceReport
from encore.results.run_log import read_run
from encore.run.follow import read_progress
from encore.run.run_folder import Experiment, ExperimentState, RunFolder


@dataclass(frozen=True)
class Judgement:
    """What came of one experiment."""

    number: int
    state: ExperimentState
    seed: int | None
    minutes: float | None
    """From run_start to run_stop; None unless the run reached its target."""
    epochs: int
    quality: float | None
    """Last evaluation."""
    target: float
    resumed: bool
    """Whether it went on from a checkpoint: its minutes then include the time in between."""
    compliance: ComplianceReport | None


def judge_experiment(experiment: Experiment, ruleset: str | None) -> Judgement:
    """Read the log and the metrics of an ended experiment."""
    state = experiment.state()
    progress = read_progress(experiment.metrics)
    ended = experiment.result.exists() and state.status in ("reached", "not_reached")
    log = read_run(experiment.result) if ended else None
    return Judgement(
        number=experiment.number,
        state=state,
        seed=log.seeds[0] if log is not None and log.seeds else None,
        minutes=log.elapsed_minutes if log is not None and state.status == "reached" else None,
        epochs=progress.epoch,
        quality=progress.quality,
        target=progress.quality_target,
        resumed=progress.starts > 1,
        compliance=check(experiment.result, ruleset) if ended else None,
    )


def judge(run: RunFolder) -> list[Judgement]:
    """Judge every experiment of a run by the rules of its round."""
    passport = run.passport()
    round_name = passport["round"]
    if catalogue.choose(passport["name"]).benchmark.log_format == "v0.5":
        return [judge_experiment(experiment, "0.5.0") for experiment in run.experiments()]
    # Rounds before v0.7 logged in other formats; our log is read by the rules of the first with this one.
    ruleset = f"{round_name.removeprefix('v')}.0" if round_name >= "v0.7" else "0.7.0"
    return [judge_experiment(experiment, ruleset) for experiment in run.experiments()]


def standing(run: RunFolder) -> str:
    """What the result may be called, in one sentence."""
    passport = run.passport()
    return f"{passport['submission']}; trained on {passport['data']['name']}"
