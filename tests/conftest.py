"""Fixtures that several tests share."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from encore import data, environment, paths
from encore.machine import node

Encore = Callable[..., "subprocess.CompletedProcess[str]"]

# Small enough for seconds on two cores, and the real network, input and optimizer all the same.
TINY = ("--set", "epochs=2", "--set", "quality_target=1.0")


MARKS = {
    "training": {"mxnet_python", "pytorch_python", "tensorflow_python", "kernels_python", "serving_python"},
    "cluster": {"cluster"},
    "engine": {"docker", "engine"},
}
"""Which fixtures give a test its mark: nobody can forget it. `gpu` is written at the test."""


LONGEST = (
    "tests/containers/test_engine.py",
    "tests/cluster/test_cluster.py",
    "tests/benchmarks/test_resnet_frameworks.py",
    "tests/run/test_run.py",
)
"""Begun first, by tests/all.sh: no worker of pytest-xdist is to begin one of them when the others are almost done."""


def pytest_configure() -> None:
    """Take SIGINT again where a caller ignores it, as nohup and background jobs of a shell do: tests send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; mark the tests by their fixtures; skip those of a GPU where there is none."""
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONGEST)))
    without_gpu = pytest.mark.skip(reason="NO GPU: nothing was tested on one")
    for item in items:
        for mark, fixtures in MARKS.items():
            if fixtures & set(getattr(item, "fixturenames", ())):
                item.add_marker(mark)
        if item.get_closest_marker("gpu") and not node.gpus():
            item.add_marker(without_gpu)


@pytest.fixture(scope="session", autouse=True)
def runs_on_the_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runtime `host` where a test names none: an engine of this machine may have images of the benchmarks."""
    file = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    file.write_text('runtime = "host"\n', encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENCORE_CLUSTER", str(file))
        # Steps of several trainings on two cores can take many seconds.
        patch.setenv("ENCORE_STOP_SECONDS", "60")
        yield


@pytest.fixture(scope="session")
def mxnet_python() -> Path:
    """Python of the MXNet environment, which is made if need be."""
    return environment.ensure_environment("mxnet", lambda text: print(text, file=sys.stderr))


@pytest.fixture(scope="session")
def pytorch_python() -> Path:
    """Python of the PyTorch environment, which is made if need be."""
    return environment.ensure_environment("pytorch", lambda text: print(text, file=sys.stderr))


@pytest.fixture(scope="session")
def tensorflow_python() -> Path:
    """Python of the TensorFlow environment, which is made if need be."""
    return environment.ensure_environment("tensorflow", lambda text: print(text, file=sys.stderr))


@pytest.fixture(scope="session")
def kernels_python() -> Path:
    """Python of the environment with Triton, which is made if need be."""
    return environment.ensure_environment("kernels", lambda text: print(text, file=sys.stderr))


@pytest.fixture(scope="session")
def serving_python() -> Path:
    """Python of the environment with Triton Inference Server and ONNX Runtime, which is made if need be."""
    return environment.ensure_environment("serving", lambda text: print(text, file=sys.stderr))


@dataclass(frozen=True)
class Shared:
    """What all workers of pytest-xdist look at and none changes: the first that asks makes it, the others wait."""

    folder: Path

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return the folder that ``make`` has filled, which is empty when it is called."""
        folder, done = self.folder / name, self.folder / f"{name}.made"
        with FileLock(self.folder / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Shared:
    """A folder of this test run: a worker's own is in it."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "shared"
    folder.mkdir(exist_ok=True)
    return Shared(folder)


@pytest.fixture(scope="session")
def digits(mxnet_python: Path, shared: Shared) -> Path:
    """The small data set of resnet."""
    return shared.made("digits", lambda folder: prepared("resnet", folder, mxnet_python)) / "resnet"


def prepared(name: str, folder: Path, python: Path) -> None:
    data.prepare(name, folder / name, data.Preparation(), python, lambda update: None)


@pytest.fixture(scope="session")
def encore() -> Encore:
    """Runs the command line of this checkout."""

    def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "encore.cli.app", *arguments]
        variables = {**os.environ, "COLUMNS": "120", **options.pop("environment", {})}
        return subprocess.run(
            command, capture_output=True, text=True, cwd=paths.ROOT, env=variables, check=False, **options
        )

    return run


@dataclass(frozen=True)
class Study:
    """A finished sweep of resnet over one and two ranks with seed 7, and what it printed."""

    folder: Path
    printed: dict[str, Any]

    def of_ranks(self, ranks: int) -> Path:
        """Return the experiment folder on so many ranks: what every other training with this seed is held against."""
        (found,) = self.folder.glob(f"1x{ranks}/*/experiment_0")
        return found


@pytest.fixture(scope="session")
def study(encore: Encore, digits: Path, shared: Shared) -> Study:
    """Trains twice: the tests of runs and of sweeps look at it."""

    def train(folder: Path) -> None:
        where = ("--data", str(digits), "--results", str(folder))
        done = encore("sweep", "resnet", "--gpus", "1,2", "--seed", "7", *where, *TINY, "--predict", "4", "--json")
        assert done.returncode == 0, done.stderr
        (folder / "printed.json").write_text(done.stdout, encoding="utf-8")

    printed = json.loads((shared.made("study", train) / "printed.json").read_text(encoding="utf-8"))
    return Study(Path(printed["study"]), printed)


@cache
def inside(python: Path, launcher: tuple[str, ...], program: str, *arguments: str) -> str:
    """Run a program in tests/in_framework in a framework's environment, once per arguments; return its output."""
    command = [*launcher, "python", f"tests/in_framework/{program}", *arguments]
    if launcher[:1] == ("torchrun",):
        command.remove("python")
    variables = {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(paths.ROOT),
        "OMP_NUM_THREADS": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=paths.ROOT, env=variables, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def in_mxnet(mxnet_python: Path) -> Callable[..., str]:
    """Runs a program of tests/in_framework in MXNet's environment on so many ranks; returns its output."""

    def run(program: str, *arguments: str, ranks: int = 1) -> str:
        launcher = () if ranks == 1 else ("horovodrun", "--gloo", "-np", str(ranks))
        return inside(mxnet_python, launcher, program, *arguments)

    return run


@pytest.fixture(scope="session")
def in_tensorflow(tensorflow_python: Path) -> Callable[..., str]:
    """Runs a program of tests/in_framework in TensorFlow's environment on so many ranks; returns its output."""

    def run(program: str, *arguments: str, ranks: int = 1) -> str:
        launcher = () if ranks == 1 else ("horovodrun", "--gloo", "-np", str(ranks))
        return inside(tensorflow_python, launcher, program, *arguments)

    return run


@pytest.fixture(scope="session")
def in_pytorch(pytorch_python: Path) -> Callable[..., str]:
    """Runs a program of tests/in_framework in PyTorch's environment on so many ranks; returns their output."""

    def run(program: str, *arguments: str, ranks: int = 1) -> str:
        launcher = () if ranks == 1 else ("torchrun", "--standalone", "--nproc-per-node", str(ranks))
        return inside(pytorch_python, launcher, program, *arguments)

    return run


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    """Return records of one kind of a metrics stream."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def evaluations(path: Path) -> list[dict[str, Any]]:
    """Return what every evaluation of a metrics stream found, without its times."""
    found = records(path, "eval")
    return [{key: value for key, value in each.items() if key not in ("time", "seconds")} for each in found]


def quality(evaluation: dict[str, Any]) -> float:
    """Return the only quality of an evaluation."""
    (value,) = evaluation["qualities"].values()
    return float(value)


def logged(path: Path) -> list[dict[str, Any]]:
    """Return the events of a log that holds nothing else."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert all(line.startswith(":::MLLOG ") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def losses(path: Path) -> list[float]:
    """Return the loss of every step of a metrics stream."""
    return [record["loss"] for record in records(path, "step")]


def only_run(results: Path) -> Path:
    """Return the single run folder in ``results``."""
    (found,) = [path for path in results.iterdir() if not path.name.startswith(".")]
    return found
