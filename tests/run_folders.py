"""Run folders without a training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from encore.run import run_folder
from encore.run.run_folder import ExperimentState, RunFolder

PREPARED = ExperimentState(status="prepared")


def make_run(
    results: Path,
    states: Sequence[ExperimentState | None] = (PREPARED,),
    mark: str = "",
    slurm: str = "",
    config: Mapping[str, Any] = {},
    **fields: Any,
) -> RunFolder:
    """Create a run of resnet with one experiment per state (None: without state.json) and return it.

    ``mark`` ends the name of the folder, ``slurm`` is the job, ``fields`` change the passport.
    """
    seeds = list(range(5, 5 + len(states)))
    passport = {
        **dict.fromkeys(run_folder.NEEDED),
        "schema": run_folder.SCHEMA,
        "name": "resnet",
        "round": "v0.7",
        "nodes": 2,
        "seeds": seeds,
        "submission": {"text": ""},
        "data": {"name": "digits"},
        "slurm": {"job": slurm} if slurm else None,
        **fields,
    }
    run = run_folder.create(results, f"resnet-mxnet-cpu{mark}", lambda path: dict(passport), {}, dict(config), seeds)
    for experiment, state in zip(run.experiments(), states, strict=True):
        if state is not None:
            experiment.set_state(state)
    return run
