"""The log of each benchmark in the dialect of each of its rounds, read back and checked by that round's rules."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.run.mllog import log_of, samples
from encore import catalogue
from encore.catalogue import Choice, System
from encore.configuration import Configuration, config_class, resolve
from encore.machine import node
from encore.results.compliance.compliance import check
from encore.results.logs.run_log import read_run
from encore.results.rules import canonical
from encore.run import passport

STEPS = 1000  # of an epoch, for events that count in them
FACTS = {"negatives": 999, "users": 138493}  # what NCF logs of its data set


def submitted() -> list[Any]:
    """The first submitted system of each benchmark in each of its rounds."""
    found = {}
    for name in catalogue.benchmarks():
        choice = catalogue.choose(name)
        for system in catalogue.systems(choice):
            if system.kind == "submitted":
                found.setdefault((name, system.round), (choice, system))
    return [pytest.param(*pair, id=f"{name}-{round_name}") for (name, round_name), pair in found.items()]


def configured(choice: Choice, system: System) -> Configuration:
    return resolve(choice, system, system.nodes, system.gpus_per_node, [])


def logged_before_the_data(events: Any, config: Any, ranks: int) -> dict[str, Any]:
    known = {"config": config, "ranks": ranks, "steps_per_epoch": STEPS, "facts": FACTS, "max_predictions": 76}
    known.update({"generation": 1, "count": 8192})
    found: dict[str, Any] = {}
    for function in (getattr(events, name, None) for name in ("initialization", "hyperparameters", "decays", "games")):
        if function is not None:
            found.update(function(**{name: known[name] for name in inspect.signature(function).parameters}))
    return found


def write_log(path: Path, choice: Choice, configuration: Configuration) -> None:
    """A run that reaches its targets after its first epoch."""
    events = importlib.import_module(f"{choice.implementation.module.rsplit('.', 1)[0]}.events")
    config = config_class(choice.folder)(**configuration.plain())
    targets = choice.benchmark.targets(configuration.plain())
    passport.write_log_header(path, configuration, node.this_node(), cache_cleared=True)
    log = log_of(events.WORDING, path, 0, config.round)
    log.init_start(seed=7)
    log.init_stop()
    full = choice.benchmark.full_data
    sizes = events.data(FACTS, full.train_samples, 1) if hasattr(events, "data") else {}
    log.run_start()
    for key, value in {
        **logged_before_the_data(events, config, configuration.ranks),
        **(sizes or samples(full.train_samples, full.eval_samples)),
    }.items():
        log.event(key, value)
    log.block_start(0, 1)
    log.epoch_start(0)
    log.epoch_stop(0)
    log.eval_start(1)
    log.eval_stop(1, targets, targets)
    log.block_stop(0)
    log.run_stop(True)


@pytest.mark.parametrize(("choice", "system"), submitted())
def test_a_run_passes_the_checker_of_its_round(tmp_path: Path, choice: Choice, system: System) -> None:
    configuration = configured(choice, system)
    path = tmp_path / "result_0.txt"
    write_log(path, choice, configuration)
    lines = path.read_text(encoding="utf-8").splitlines()
    mark = {"v0.5": f":::MLPv0.5.0 {choice.name} ", "v0.6": ":::MLL "}.get(system.round, ":::MLLOG ")
    assert [line for line in lines if not line.startswith(mark)] == []
    report = check(path, f"{system.round[1:]}.0")
    assert [finding for finding in report.findings if finding.severity == "error"] == []
    timing = [finding.found for finding in report.findings if "model construction included" in finding.rule]
    assert [found.split()[0] for found in timing] == (["init_start"] if system.round == "v0.5" else [])
    run = read_run(path)
    assert run.converged, run.explanation
    assert run.benchmark == canonical(choice.name)
    if system.round < "v0.7":  # whose lines are those of all later rounds
        assert (run.round, run.round_is_guess) == (system.round, False)
