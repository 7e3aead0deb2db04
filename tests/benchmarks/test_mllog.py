"""Log of each benchmark in the format of each of its rounds, parsed and checked by the rules of that round."""

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

STEPS = 1000  # Steps per epoch, for events that count steps
FACTS = {"negatives": 999, "users": 138493}  # Values of the data set that NCF logs


def submitted() -> list[Any]:
    # The first submitted system of each benchmark in each of its rounds
    pairs = {}
    for name in catalogue.benchmarks():
        choice = catalogue.choose(name)
        for system in catalogue.systems(choice):
            if system.kind == "submitted":
                pairs.setdefault(f"{name}-{system.round}", (choice, system))
    return [pytest.param(*pair, id=name) for name, pair in pairs.items()]


def hyperparameters(events: Any, config: Any, ranks: int) -> dict[str, Any]:
    arguments = {
        "config": config, "ranks": ranks, "steps_per_epoch": STEPS, "facts": FACTS, "max_predictions": 76,
        "generation": 1, "count": 8192,
    }  # fmt: skip
    values: dict[str, Any] = {}
    for name in ("initialization", "hyperparameters", "decays", "games"):
        function = getattr(events, name, dict)
        names = inspect.signature(function).parameters if function is not dict else ()
        values.update(function(**{name: arguments[name] for name in names}))
    return values


def write_log(path: Path, choice: Choice, configuration: Configuration) -> None:
    # Log of a run that reaches its targets after its first epoch
    events = importlib.import_module(f"{choice.implementation.module.rsplit('.', 1)[0]}.events")
    config = config_class(choice.folder)(**configuration.plain())
    targets = choice.benchmark.targets(configuration.plain())
    passport.write_log_header(path, configuration, node.this_node(), cache_cleared=True)
    log = log_of(events.WORDING, path, 0, config.round)
    log.init_start(seed=7)
    log.init_stop()
    log.run_start()
    full = choice.benchmark.full_data
    sizes = events.data(FACTS, full.train_samples, 1) if hasattr(events, "data") else {}
    sizes = sizes or samples(full.train_samples, full.eval_samples)
    for key, value in {**hyperparameters(events, config, configuration.ranks), **sizes}.items():
        log.event(key, value)
    log.block_start(0, 1)
    log.epoch_start(0)
    log.epoch_stop(0)
    log.eval_start(1)
    log.eval_stop(1, targets, targets)
    log.block_stop(0)
    log.run_stop(True)


@pytest.mark.parametrize(("choice", "system"), submitted())
def test_log_passes_the_checker_of_its_round(tmp_path: Path, choice: Choice, system: System) -> None:
    path = tmp_path / "result_0.txt"
    write_log(path, choice, resolve(choice, system, system.nodes, system.gpus_per_node, []))
    prefix = {"v0.5": f":::MLPv0.5.0 {choice.name} ", "v0.6": ":::MLL "}.get(system.round, ":::MLLOG ")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith(prefix)] == []
    findings = check(path, f"{system.round[1:]}.0").findings
    assert [finding for finding in findings if finding.severity == "error"] == []
    timing = [finding.found.split()[0] for finding in findings if "model construction included" in finding.rule]
    assert timing == (["init_start"] if system.round == "v0.5" else [])
    run = read_run(path)
    assert run.converged, run.explanation
    assert run.benchmark == canonical(choice.name)
    if system.round < "v0.7":  # All later rounds have the same format
        assert (run.round, run.round_is_guess) == (system.round, False)
