"""Step times and waiting time of a rank, with threads and clocks that the test controls."""

import importlib
import importlib.util
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.run import step_times
from benchmarks.common.run.mllog import log_of, samples
from benchmarks.common.run.ranks import Ranks
from benchmarks.llama import mlperf as llama_keys
from encore import catalogue
from encore.configuration import Configuration, config_class, resolve
from encore.machine import node
from encore.results.compliance.compliance import check
from encore.results.logs.run_log import read_run
from encore.results.rules import canonical
from encore.run import run_metadata
from tests.preparing import write_files
from tests.trainings import wait_until

RANKS = Ranks(3, 4, 1, 2, None)


class Rank:
    """A rank whose thread 11 trains and whose thread 12 communicates; samples advance its clock."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, communicating: set[str] | None) -> None:
        self.tasks, self.file, self.now = folder / "tasks", folder / "steps" / "rank_3.jsonl", 1000.0
        self.set_threads("S", "S")
        patch.setattr(step_times, "time", SimpleNamespace(time=lambda: self.now, process_time=lambda: self.now / 4))
        patch.setattr(step_times, "TASKS", str(self.tasks))
        patch.setattr(threading.Thread, "start", lambda thread: None)
        self.input = SimpleNamespace(total=0.0)
        self.times = step_times.StepTimes(folder / "steps", RANKS, self.input, communicating)

    def set_threads(self, *states: str) -> None:
        for name, state in zip(("11", "12"), states, strict=True):
            stat, schedstat = f"{name} (python (train) {state} 1 1", f"5 {round((self.now - 1000) * 1e8)} 7"
            write_files(self.tasks / name, {"stat": stat, "schedstat": schedstat})

    def follow(self, samples: Iterator[Callable[[], object]]) -> list[dict[str, Any]]:
        # Return the lines; the end of the samples is the end of the training
        self.times._ended = SimpleNamespace(  # type: ignore[assignment]
            wait=lambda seconds: bool(next(samples, lambda: True)()), set=lambda: None
        )
        self.times.start()
        self.times._follow()
        self.times.end()
        return [json.loads(line) for line in self.file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("communicating", "waiting"), [({"12"}, 0.3889), (None, None)], ids=["cpu", "gpu"])
def test_rank_waits_while_no_thread_works_or_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, communicating: set[str] | None, waiting: float | None
) -> None:
    rank = Rank(tmp_path, monkeypatch, communicating)

    def sample(training: str, library: str, seconds: float = 0.25, fetches: bool = False) -> Callable[[], None]:
        def apply() -> None:
            rank.now += seconds
            rank.set_threads(training, library)
            rank.times._fetching = fetches
            rank.times.add(range(rank.times._step, rank.times._step + 2))
            rank.input.total += 0.25 * fetches

        return apply

    samples = [
        *(sample("R", "S"), sample("D", "S"), sample("S", "S", fetches=True)),  # 0.75 s of work
        *(sample("S", "S"), sample("S", "R")),  # 0.5 s of waiting: the library may spin
        sample("S", "S", seconds=1.0),  # The sampling thread had no core: 0.375 s count
    ]
    (line,) = rank.follow(iter(samples))
    assert {**line, "node": ""} == {
        "time": 1002.25,
        "node": "",
        "local_rank": 1,
        "step": 12,
        "steps": 12,
        "window": 2.25,
        "median": 0.125,
        "p99": 0.5,
        "waiting": waiting,
        "input": 0.1111,
        "cpu": 0.562,
        "delayed": 0.45,
    }


def test_lines_are_written_during_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The states of real threads
    monkeypatch.setattr(step_times, "SAMPLE_SECONDS", 0.01)
    monkeypatch.setattr(step_times, "FIRST_SECONDS", 0.01)
    times, path = step_times.StepTimes(tmp_path, RANKS, SimpleNamespace(total=0.0), set()), tmp_path / "rank_3.jsonl"
    times.start()
    times.add(range(1))
    wait_until(lambda: bool(path.read_text()), "a line")
    times.end()
    assert len(path.read_text().splitlines()) == 1 and str(threading.get_native_id()) in step_times.delays()


COUNTS = {"negatives": 999, "users": 138493}  # Values of the data set that NCF logs


SUBMITTED = [
    pytest.param(choice, system, id=f"{choice.name} {system.round} {system.system}")
    for choice in map(catalogue.choose, catalogue.benchmarks())
    for system in catalogue.systems(choice)
    if system.kind == "submitted"
]


def hyperparameters(keys: Any, config: Any, ranks: int) -> dict[str, Any]:
    arguments = {
        "config": config, "ranks": ranks, "steps_per_epoch": 1000, "counts": COUNTS, "max_predictions": 76,
        "generation": 1, "count": 8192,
    }  # fmt: skip
    values: dict[str, Any] = {}
    for name in sorted({"initialization", "hyperparameters", "decays", "games"} & set(dir(keys))):
        names = inspect.signature(getattr(keys, name)).parameters
        values.update(getattr(keys, name)(**{name: arguments[name] for name in names}))
    return values


def write_log(path: Path, choice: catalogue.Choice, configuration: Configuration) -> None:
    # Log of a run that reaches its targets after its first epoch
    package = choice.implementation.module.rsplit(".", 1)[0]
    # The benchmarks that pretrain a language model share their keys
    has_own_keys = importlib.util.find_spec(f"{package}.mlperf") is not None
    keys = importlib.import_module(f"{package}.mlperf") if has_own_keys else llama_keys
    config = config_class(choice.folder)(**configuration.plain())
    targets, full = choice.benchmark.targets(configuration.plain()), choice.benchmark.full_data
    run_metadata.write_log_header(path, configuration, node.this_node(), cache_cleared=True)
    log = log_of(keys.WORDING if has_own_keys else llama_keys.wording(choice.folder.name), path, 0, config.round)
    log.init_start(seed=7)
    log.init_stop()
    log.run_start()
    sizes = keys.data(COUNTS, full.train_samples, 1) if hasattr(keys, "data") else {}
    sizes = sizes or samples(full.train_samples, full.eval_samples)
    for key, value in {**hyperparameters(keys, config, configuration.ranks), **sizes}.items():
        log.event(key, value)
    log.block_start(0, 1)
    log.epoch_start(0)
    log.epoch_stop(0)
    log.eval_start(1)
    log.eval_stop(1, targets, targets)
    log.block_stop(0)
    log.run_stop(True)


@pytest.mark.parametrize(("choice", "system"), SUBMITTED)
def test_log_passes_the_checker_of_its_round(
    tmp_path: Path, choice: catalogue.Choice, system: catalogue.System
) -> None:
    path = tmp_path / "result_0.txt"
    write_log(path, choice, resolve(choice, system, system.nodes, system.gpus_per_node, []))
    prefix = {"v0.5": f":::MLPv0.5.0 {choice.name} ", "v0.6": ":::MLL "}.get(system.round, ":::MLLOG ")
    assert all(line.startswith(prefix) for line in path.read_text(encoding="utf-8").splitlines())
    findings, run = check(path, f"{system.round[1:]}.0").findings, read_run(path)
    # Minigo's data are the games that it generates: this log has none
    allowed = ("minigo", "small_data")
    errors = [entry for entry in findings if entry.severity == "error" and (choice.name, entry.kind) != allowed]
    timing = [entry.found.split()[0] for entry in findings if "model construction included" in entry.rule]
    assert (errors, timing) == ([], ["init_start"] if system.round == "v0.5" else [])
    # All rounds from v0.7 on have the same format
    guess = (run.round, run.round_is_guess) if system.round < "v0.7" else (system.round, False)
    assert (run.converged, run.benchmark, *guess) == (True, canonical(choice.name), system.round, False)
