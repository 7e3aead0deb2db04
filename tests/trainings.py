"""Helpers that start, stop and compare trainings."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from encore import catalogue, configuration, paths
from encore.machine import processes
from encore.run import run_folder
from tests import json_schemas
from tests.conftest import TINY, Encore, evaluations, logged, losses, only_run, records

InFramework = Callable[..., str]  # Runs a program of tests/in_framework: in_mxnet, in_pytorch, in_tensorflow

SEED = ("--seed", "7")  # The seed of every training that is compared with another one

# Hang detection of runs with a hanging rank; on a busy machine a step of a healthy rank may take seconds.
HANGS = ("--hang-seconds", "15")

# Timeout in seconds for events on a busy machine, shorter than the hang detection (600 s)
PATIENCE = 500.0


def result(output: str) -> Any:
    lines = [line.split("<stdout>:")[-1] for line in output.splitlines()]
    return json.loads([line for line in lines if line.startswith(("{", "["))][-1])


def train(encore: Encore, name: str, data: Path, results: Path, *arguments: str, ranks: int = 1) -> Path:
    # A short run of two epochs that cannot reach its target; its experiment's folder
    where = ("--data", str(data), "--results", str(results))
    encore("run", name, str(ranks), *SEED, *where, *TINY, *arguments, code=3)
    return recorded(only_run(results) / "experiment_0")


def recorded(experiment: Path) -> Path:
    passport = json.loads((experiment.parent / "run.json").read_text(encoding="utf-8"))
    left = {key for key, value in passport["configuration"].items() if value["value"] == "auto"}
    taken = passport.get("choices", {}).get("0", {})  # MXNet leaves nothing to choose
    assert left <= set(taken), f"not recorded: {left - set(taken)}"
    assert '"auto"' not in json.dumps(taken)
    return experiment


def settings(values: dict[str, str]) -> list[str]:
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def in_background(*arguments: str, environment: Mapping[str, str] = {}) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-m", "encore.cli.app", *arguments], subprocess.PIPE
    variables = {**os.environ, **environment}
    # `nohup make test` ignores SIGHUP, which tests send
    default = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    return subprocess.Popen(
        command, cwd=paths.ROOT, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True, preexec_fn=default
    )


@dataclass(frozen=True)
class Started:
    """A run in the background."""

    process: subprocess.Popen[str]
    results: Path

    @staticmethod
    def run(data: Path, results: Path, *arguments: str, name: str = "resnet", ranks: int = 2) -> Started:
        where = ("--data", str(data), "--results", str(results))
        return Started(in_background("run", name, str(ranks), *SEED, *where, *arguments), results)

    @staticmethod
    def again(run: Path) -> Started:
        return Started(in_background("run", "--resume", str(run)), run.parent)

    def wait_for_step(self, step: int) -> Path:
        return wait_for_step(self.process, self.results, step)

    def ranks(self, folder: Path) -> list[psutil.Process]:
        return [psutil.Process(beat.pid) for beat in processes.heartbeats(folder / "heartbeat")]

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, output

    def ended(self, code: int) -> str:
        # Output of the process, which must exit with this code
        found, output = self.end()
        assert found == code, output
        return output


def resumed_as_printed(output: str) -> subprocess.CompletedProcess[str]:
    (command,) = re.findall("^resume with: (.*)$", output, re.MULTILINE)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": programs, "PYTHONPATH": str(paths.ROOT)}
    return subprocess.run(["bash", "-c", command], cwd="/", env=variables, capture_output=True, text=True, check=False)


def wait_for_step(run: subprocess.Popen[str], results: Path, step: int, seconds: float = PATIENCE) -> Path:
    def folders() -> list[Path]:
        metrics: list[Path] = []
        with contextlib.suppress(FileNotFoundError):  # a folder that gets its name meanwhile
            metrics = list(results.glob("**/[!.]*/experiment_0/metrics.jsonl"))
        at_step = [path.parent for path in metrics if steps_so_far(path) >= step]
        assert at_step or run.poll() is None, run.communicate()[0]
        return at_step

    wait_until(lambda: bool(folders()), f"step {step}", seconds)
    return folders()[0]


def steps_so_far(metrics: Path) -> int:
    return metrics.read_text(encoding="utf-8").count('"kind": "step"') if metrics.exists() else 0


def wait_until(holds: Callable[[], bool], event: str, seconds: float = PATIENCE, poll: float = 0.05) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds:g} s: {event}"
        time.sleep(poll)


def is_told(process: psutil.Process, number: signal.Signals) -> bool:
    # True if a signal is pending for a suspended process (proc(5), ShdPnd)
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    (pending,) = re.findall(r"^ShdPnd:\s*(\w+)$", status, re.MULTILINE)
    return bool(int(pending, 16) >> (number - 1) & 1)


def held_port(address: str = "127.0.0.1") -> socket.socket:
    # Reserve a port: the OS gives it to no other program, but a server with SO_REUSEADDR can listen on it, since this
    # socket does not listen.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    return held


def resolved(
    benchmark: str, system: str, round_: str | None, ranks: int = 0, *settings: str, nodes: int = 0
) -> configuration.Configuration:
    # Configuration of a system, with its number of nodes and of ranks per node if they are not given
    choice = catalogue.choose(benchmark)
    source = catalogue.find_system(choice, system, round_)
    return configuration.resolve(choice, source, nodes or source.nodes, ranks or source.gpus_per_node, list(settings))


def write_small_config(
    path: Path, benchmark: str, ranks: int, settings: Iterable[str], round_name: str | None = None, seed: int = 3
) -> Path:
    # Config.json of a benchmark's small system with a fixed seed
    plain = resolved(benchmark, "cpu", round_name, ranks, *settings, nodes=1).plain()
    path.write_text(json.dumps({**plain, "seed": seed}), encoding="utf-8")
    return path


def config_of(benchmark: str, system: str, round_: str | None, ranks: int, *settings: str, nodes: int = 1) -> Any:
    return SimpleNamespace(**resolved(benchmark, system, round_, ranks, *settings, nodes=nodes).plain())


def checked_config(
    benchmark: str, system: str, round_: str | None, *settings: str, ranks: int = 8, nodes: int = 1
) -> Any:
    # The same, checked by the config class of the benchmark
    plain = resolved(benchmark, system, round_, ranks, *settings, nodes=nodes).plain()
    return configuration.config_class(catalogue.choose(benchmark).folder)(**plain)


def reached(encore: Encore, benchmark: str, data: Path, results: Path, *options: str, seed: str = "1") -> Path:
    # Run the small system on two ranks to its target by the command line; return the run folder
    where = ("--data", str(data), "--results", str(results))
    encore("run", benchmark, "2", *where, "--seed", seed, *options, code=0)
    run = only_run(results)
    json_schemas.validate_run(run)
    return run


@dataclass(frozen=True)
class BareRuns:
    """Trainings of one implementation in PyTorch on one data set, rank by rank as any launcher starts them."""

    module: str
    python: Path
    folder: Path  # The data set
    write_config: Callable[..., Path]  # Takes a path, ranks and settings
    factory: pytest.TempPathFactory
    whole: dict[tuple[int, tuple[str, ...]], Path] = field(default_factory=dict)
    meeting: socket.socket = field(default_factory=held_port)  # MASTER_PORT

    def start(self, output: Path, ranks: int, *settings: str) -> list[subprocess.Popen[str]]:
        # Without a launcher
        config, port = self.write_config(output.with_suffix(".json"), ranks, *settings), self.meeting.getsockname()[1]
        output.mkdir(exist_ok=True)
        arguments = ["--config", str(config), "--data", str(self.folder), "--output", str(output)]
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        return [
            subprocess.Popen(
                [str(self.python), "-m", self.module, *arguments],
                env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=paths.ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def ended(self, children: list[subprocess.Popen[str]], code: int = 0) -> str:
        # Output of rank 0; all ranks must exit with this code
        outputs = [child.communicate(timeout=PATIENCE)[1] for child in children]
        assert [child.returncode for child in children] == [code] * len(children), outputs
        return outputs[0]

    def end(self, output: Path, ranks: int, *settings: str) -> Path:
        self.ended(self.start(output, ranks, *settings))
        return output

    def uninterrupted(self, ranks: int, *settings: str) -> Path:
        key = ranks, settings
        if key not in self.whole:
            self.whole[key] = self.end(self.factory.mktemp("uninterrupted") / "run", ranks, *settings)
        return self.whole[key]

    def stop(self, output: Path, ranks: int, *settings: str, once: Callable[[], bool]) -> None:
        # Train until something holds and send SIGTERM to one rank: all stop at the same place
        children = self.start(output, ranks, *settings)
        wait_until(lambda: children[0].poll() is not None or once(), "the place to stop at")
        children[-1].send_signal(signal.SIGTERM)
        self.ended(children)
        assert records(output / "metrics.jsonl", "end")[-1]["outcome"] == "interrupted"

    def refused(self, output: Path, ranks: int, *settings: str) -> str:
        output_of_rank_0 = self.ended(self.start(output, ranks, *settings), code=2)
        assert "Traceback" not in output_of_rank_0
        return output_of_rank_0


def assert_resumed(output: Path, uninterrupted: Path) -> None:
    # A resumed run must have the losses and evaluations of an uninterrupted run
    ours, theirs = (each / "metrics.jsonl" for each in (output, uninterrupted))
    assert losses(ours) == losses(theirs) and evaluations(ours) == evaluations(theirs)


def assert_none_left(ranks: list[psutil.Process]) -> None:
    assert not [rank for rank in ranks if processes.is_running(rank)]


def assert_same_run(folder: Path, unbroken: Path) -> None:
    # A resumed experiment must have the losses, evaluations and log of an uninterrupted one
    assert_resumed(folder, unbroken)
    logs = [[event["key"] for event in logged(each.parent / "result_0.txt")] for each in (folder, unbroken)]
    assert logs[0] == logs[1]


ATTEMPTS = 5  # Free ports are looked up before a server takes them: another program may come first


def exported(
    encore: Encore, run: Path, to: Path, format_name: str = "torch-export", *options: str, rel: float = 1e-3
) -> dict[str, Any]:
    # Export a run and return its passport; the model is the training code's, and of the run's quality. ``rel`` is how
    # far the qualities may be apart, as a share of the run's.
    done = encore("export", str(run), "-o", str(to), "--format", format_name, "--json", *options, code=0)
    content: dict[str, Any] = json.loads(done.stdout)
    json_schemas.validate("export", content)
    checked = content["checked"]
    assert checked["samples"] > 1 and checked["largest_difference"] <= checked["tolerance"]
    # A run sums on two ranks, and some quality is of answers that a last bit may turn.
    quality = {name: checked["quality"][name] for name in content["quality"]}
    assert quality and quality == pytest.approx(content["quality"], rel=rel)
    return content


def free_ports() -> tuple[str, str]:
    with held_port() as http, held_port() as grpc:
        return str(http.getsockname()[1]), str(grpc.getsockname()[1])


def served(encore: Encore, folder: Path, *options: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    # Serve an export with a real Triton server, compare the outputs of its samples, and return the JSON output
    for _ in range(ATTEMPTS):
        http, grpc = free_ports()
        ports = ("--http-port", http, "--grpc-port", grpc, "--metrics-port", "0")
        done = encore("serve", str(folder), "--check", *ports, "--json", *options, environment=environment or {})
        if "a port is taken" not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    json_schemas.validate("served", found)
    assert all(each["same"] for models in found["check"].values() for each in models)
    return found


@contextlib.contextmanager
def serving(exported: Path) -> Iterator[dict[str, str]]:
    # Serve an export with a real Triton server on this machine until the context ends; its ports by protocol
    log = ""
    for _ in range(ATTEMPTS):
        http, grpc = free_ports()
        words = ["serve", str(exported), "--runtime", "host", "--http-port", http, "--grpc-port", grpc]
        child = in_background(*words, "--metrics-port", "0")
        for line in child.stdout or ():
            log += line
            if line.startswith("ready:"):
                break
        if child.poll() is None and "ready:" in log:
            break
        child.wait()
        assert "a port is taken" in log, log
    assert "ready:" in log, log
    try:
        yield {"http": http, "grpc": grpc}
    finally:
        child.send_signal(signal.SIGINT)
        assert child.wait() in (0, 130)


def evaluated(encore: Encore, folder: Path, run: Path, content: dict[str, Any], *options: str) -> None:
    # Pass a run's evaluation set through a server on the host: ``content`` is what `exported` found of the model
    found = served(encore, folder, "--runtime", "host", "--evaluate", str(run), *options)
    through, checked = found["evaluation"], content["checked"]
    assert through["samples"] == checked["samples"]
    assert through["largest_difference"] <= through["tolerance"] == checked["tolerance"]
    assert through["quality"] == pytest.approx(checked["quality"], rel=1e-3)


PREPARED = run_folder.ExperimentState(status="prepared")


def make_run(
    results: Path,
    states: Sequence[run_folder.ExperimentState | None] = (PREPARED,),
    mark: str = "",
    slurm: str = "",
    config: Mapping[str, Any] = {},
    **fields: Any,
) -> run_folder.RunFolder:
    """Create a run of resnet with one experiment per state (None: without state.json) and return it.

    ``mark`` ends the name of the folder, ``slurm`` is the job, ``fields`` change the passport.
    """
    seeds = list(range(5, 5 + len(states)))
    passport = {
        "schema": run_folder.SCHEMA,
        "name": "resnet",
        "round": "v0.7",
        "nodes": 2,
        "seeds": seeds,
        "submission": {"text": "", "kind": "small"},
        "configuration": {"device": {"value": "cpu"}},
        "data": {"name": "digits"},
        "slurm": {"job": slurm} if slurm else None,
        **fields,
    }
    run = run_folder.create(results, f"resnet-mxnet-cpu{mark}", lambda path: dict(passport), {}, dict(config), seeds)
    for experiment, state in zip(run.experiments(), states, strict=True):
        if state is not None:
            experiment.set_state(state)
    return run
