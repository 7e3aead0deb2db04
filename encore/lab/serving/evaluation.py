"""The evaluation set of a run through a server: the quality that its clients get."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore import catalogue
from encore.catalogue import Choice
from encore.errors import EncoreError
from encore.lab.serving import export as exports
from encore.lab.serving.serving import ENVIRONMENT
from encore.run import programs, run_folder


@dataclass(frozen=True)
class Evaluation:
    """What is passed through the server, and where the model is from."""

    source: Path  # the export that is served
    choice: Choice
    experiment: Path
    data: Path


def plan(source: Path, run_path: Path, data: Path | None) -> Evaluation:
    """Return the evaluation of an export by its run; EncoreError if it is another one's, or its data are missing."""
    run = run_folder.open_run(run_path)
    passport = run.passport()
    whole = exports.read_whole(source)
    if whole.run.id != passport["sha256"]:
        raise EncoreError(
            f"{source} is not from {run_path}",
            expected=f"the run {whole.run.name or 'that it was exported from'}",
            hint="--evaluate RUN: name that run",
        )
    choice = catalogue.choose(passport["name"])
    experiment = programs.chosen_experiment(run, whole.run.experiment)
    folder = programs.data_set(data, passport["data"], choice)
    return Evaluation(source.absolute(), choice, experiment.folder.absolute(), folder)


def evaluate(evaluation: Evaluation, url: str, on_step: Callable[[str], None]) -> dict[str, Any]:
    """Pass the evaluation set through the server at ``url`` and through the training code.

    Returns samples, largest difference, tolerance and quality. Raises EncoreError if the difference is beyond it.
    """
    variables = programs.variables_of(evaluation.choice, None, [ENVIRONMENT], on_step)
    on_step(f"passing the evaluation set of {evaluation.data} through the server")
    places = ("--experiment", str(evaluation.experiment), "--data", str(evaluation.data))
    served = ("--through", url, "--exported", str(evaluation.source))
    return programs.call(evaluation.choice, (*places, *served), variables)
