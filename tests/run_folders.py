"""Run folders that no training made."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from encore.run import run_folder
from encore.run.run_folder import ExperimentState, RunFolder

PREPARED = ExperimentState(status="prepared")


def made(
    results: Path,
    states: Sequence[ExperimentState | None] = (PREPARED,),
    mark: str = "",
    slurm: str = "",
    config: Mapping[str, Any] = {},
    **facts: Any,
) -> RunFolder:
    """Return a run of resnet with an experiment for each state, None: no state.json; ``facts`` are of its passport."""
    seeds = list(range(5, 5 + len(states)))
    known = {"schema": run_folder.SCHEMA, "name": "resnet", "round": "v0.7", "nodes": 2, "seeds": seeds}
    known |= {"submission": {"text": ""}, "data": {"name": "digits"}, "slurm": {"job": slurm} if slurm else None}
    passport = {**dict.fromkeys(run_folder.NEEDED), **known, **facts}
    run = run_folder.create(results, f"resnet-mxnet-cpu{mark}", lambda path: dict(passport), {}, dict(config), seeds)
    for experiment, state in zip(run.experiments(), states, strict=True):
        if state is not None:
            experiment.set_state(state)
    return run
