"""Fixtures that several tests share."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from benchmarks.common.data import recordio
from encore import catalogue, data, environment, files, installer, paths
from encore.cli import layout
from encore.cli.app import app
from encore.errors import EncoreError
from encore.machine import node
from tests import time_table
from tests.json_schemas import validate, validate_run
from tests.time_table import pytest_runtest_makereport as pytest_runtest_makereport
from tests.time_table import pytest_terminal_summary as pytest_terminal_summary

# A caller may keep no bytecode: every process of a test would compile all modules again, longer than it works.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

Encore = Callable[..., subprocess.CompletedProcess[str]]

# Small enough for seconds on two cores, and the real network, input and optimizer all the same.
TINY = ("--set", "epochs=2", "--set", "quality_target=1.0")


# Which fixtures give a test its mark: nobody can forget it. `gpu` is written at the test.
MARKS = {
    "training": {
        *("mxnet_python", "pytorch_python", "tensorflow_python", "kernels_python", "serving_python"),
        *("in_mxnet", "in_pytorch", "in_tensorflow", "toy", "toy_run"),
    },
    "cluster": {"cluster"},
    "engine": {"docker", "engine"},
}


# Files that take minutes start first, so that no worker of pytest-xdist starts one when the others are almost done.
LONGEST = (
    "tests/benchmarks/test_toy_runs.py",
    "tests/benchmarks/test_short_runs.py",
    "tests/containers/test_engine.py",
    "tests/in_framework/kernels/operators.py",
    "tests/in_framework/tensorflow/resnet.py",
    "tests/cluster/test_cluster.py",
    "tests/run/test_run.py",
    "tests/benchmarks/test_resnet_frameworks.py",
    "tests/run/test_selftest.py",
    "tests/in_framework/pytorch/resnet.py",
    "tests/in_framework/mxnet/resnet.py",
    "tests/ssh/test_over_ssh.py",
    "tests/kubernetes/test_cluster.py",
    "tests/test_release.py",
)


def pytest_configure() -> None:
    # Take SIGINT again where a caller ignores it, as nohup and background jobs of a shell do: tests send it
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their fixtures, skip GPU tests without a GPU, and sort the files: host side first, then LONGEST.

    Host-side tests run while the frameworks' environments are being built.
    """
    runs_long, heavy_files = "not long" not in config.option.markexpr, set()
    for item in items:
        for mark, fixtures in MARKS.items():
            if fixtures & set(getattr(item, "fixturenames", ())):
                item.add_marker(mark)
        if item.get_closest_marker("gpu") and not node.gpus():
            item.add_marker(pytest.mark.skip(reason="NO GPU: nothing was tested on one"))
        if (runs_long or not item.get_closest_marker("long")) and any(map(item.get_closest_marker, MARKS)):
            heavy_files.add(file_of(item))
    ranks = {file: rank for rank, file in enumerate(LONGEST)}
    items.sort(key=lambda item: (file_of(item) in heavy_files, ranks.get(file_of(item), len(LONGEST))))


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


IN_FRAMEWORK = paths.ROOT / "tests" / "in_framework"
# Of a file on more than one rank, where it is not Horovod's.
LAUNCHERS = {"pytorch": ("torchrun", "--standalone", "--nproc-per-node")}


def on_ranks(framework: str, ranks: int) -> list[str]:
    starts = [*LAUNCHERS.get(framework, ("horovodrun", "--gloo", "-np")), str(ranks)] if ranks > 1 else []
    return starts if starts[:1] == ["torchrun"] else [*starts, "python"]


class FrameworkFile(pytest.File):
    """Tests that import a framework: tests/in_framework/FRAMEWORK/NAME.py, which runs in that framework's environment.

    The file is an ordinary pytest file. ``RANKS = (1, 2)`` runs it on one rank, then on two; ``LONG = True`` leaves it
    to ``make test-all``.
    """

    def collect(self) -> Iterator[pytest.Item]:
        source = self.path.read_text(encoding="utf-8")
        ranks = re.search(r"^RANKS = \(([\d, ]+)\)", source, re.MULTILINE)
        is_long = re.search(r"^LONG = True$", source, re.MULTILINE) is not None
        for size in map(int, re.findall(r"\d+", ranks[1] if ranks else "1")):
            name = f"on_{size}_rank{'s' if size > 1 else ''}"
            yield InFramework.from_parent(self, name=name, size=size, is_long=is_long)


class InFramework(pytest.Item):
    """A test file on ``size`` ranks; its tests report in one output."""

    def __init__(self, *, size: int, is_long: bool, **options: Any) -> None:
        super().__init__(**options)
        self.size = size
        for mark in ("training", "in_framework", *(["long"] if is_long else [])):
            self.add_marker(mark)

    def runtest(self) -> None:
        framework = self.path.parent.name
        python = with_pytest(environment.ensure_environment(framework))
        options = ["--quiet", "--no-header", "--override-ini=addopts=", "--import-mode=importlib"]
        # A rank that goes on after a failure would wait for the others in a collective for ever.
        options += ["--exitfirst"] if self.size > 1 else []
        # tests/conftest.py imports packages that the environments of the frameworks do not have.
        options += ["-p", "no:cacheprovider", f"--confcutdir={IN_FRAMEWORK}", str(self.path)]
        command = [*on_ranks(framework, self.size), "-m", "pytest", *options]
        variables = {"TRITON_INTERPRET": "1"} if framework == "kernels" else {}
        with tempfile.TemporaryDirectory() as together:
            done = in_environment(python, command, {**variables, "TOGETHER": together})
        if done.returncode:
            pytest.fail(done.stdout + done.stderr, pytrace=False)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> FrameworkFile | None:
    # Run a file of a framework's folder where the framework is
    if module_path.parent.parent == IN_FRAMEWORK:
        return FrameworkFile.from_parent(parent, path=module_path)
    return None


def with_pytest(python: Path) -> Path:
    # Install pytest in an environment, as pinned for this one; a user's has none
    with FileLock(python.parent.parent / "pytest.lock"):
        if not any(python.parent.parent.glob("lib/python*/site-packages/pytest")):
            pins = ("--verify-hashes", "--constraints", str(paths.REQUIREMENTS / "dev.txt"), "pytest")
            subprocess.run(installer.install_command(python, *pins), env=installer.environment(), check=True)
    return python


@pytest.fixture(scope="session", autouse=True)
def runs_on_the_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # Use the runtime `host` by default: this machine may have images of the benchmarks
    file = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    file.write_text('runtime = "host"\n', encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENCORE_CLUSTER", str(file))
        # Steps of several trainings on two cores can take many seconds.
        patch.setenv("ENCORE_STOP_SECONDS", "60")
        yield


@pytest.fixture(scope="session", autouse=True)
def printed_json_is_as_published() -> Iterator[None]:
    # Validate all --json output of this process against its schema
    def as_text(name: str, content: object) -> str:
        text = layout_text(name, content)
        validate(name, json.loads(text))
        return text

    layout_text = layout.as_text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "as_text", as_text)
        yield


def python_of(framework: str) -> Any:
    # The fixture of the Python of a framework's environment, which is made if need be
    @pytest.fixture(scope="session", name=f"{framework}_python")
    def python() -> Path:
        return environment.ensure_environment(framework, lambda text: print(text, file=sys.stderr))

    return python


mxnet_python, pytorch_python, tensorflow_python = map(python_of, ("mxnet", "pytorch", "tensorflow"))
kernels_python, serving_python, hub_python = map(python_of, ("kernels", "serving", "hub"))


@dataclass(frozen=True)
class Shared:
    """What all workers of pytest-xdist look at and none changes: the first that asks makes it, the others wait."""

    folder: Path

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        folder, done, failed = (self.folder / f"{name}{end}" for end in ("", ".made", ".failed"))
        with FileLock(self.folder / f"{name}.lock"):
            assert not failed.exists(), f"{name} failed in an earlier test, which has the output"
            if not done.exists():
                start = time.monotonic()
                folder.mkdir()
                failed.touch()
                make(folder)
                failed.rename(done)
                time_table.record(f"shared by tests: {name}", time.monotonic() - start)
        return folder


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Shared:
    # A folder of this test run: a worker's own is in it
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "shared"
    folder.mkdir(exist_ok=True)
    return Shared(folder)


@pytest.fixture(scope="session")
def digits(mxnet_python: Path, toy: Callable[[str], Path]) -> Path:
    return toy("resnet")


@pytest.fixture(scope="session")
def few_digits(digits: Path, mxnet_python: Path, shared: Shared) -> Path:
    # Every second one, 12 steps an epoch: for all that holds whatever a training learns
    def make(folder: Path) -> None:
        for split in ("train", "val"):
            with (digits / f"{split}.rec").open("rb") as file:
                for key, offset in itertools.islice(recordio.read_index(digits / f"{split}.idx"), None, None, 2):
                    label, image = recordio.unpack(recordio.read_record(file, offset))
                    path = folder / "images" / split / f"{label:g}" / f"{key:04}.jpg"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(image)
        prepared("resnet", folder, mxnet_python, source=folder / "images", options=("--name", "digits"))

    return shared.made("few_digits", make) / "resnet"


def prepared(name: str, folder: Path, python: Path, **wanted: Any) -> None:
    data.prepare(name, folder / name, data.Preparation(**wanted), python, lambda update: None)


# Benchmarks that read the toy data set of another one.
SAME_DATA = {
    "resnet-pytorch": "resnet",
    "resnet-tensorflow": "resnet",
    "maskrcnn": "ssd",
    "gpt-oss-20b": "llama31-8b",
}


@pytest.fixture(scope="session")
def toy(request: pytest.FixtureRequest, shared: Shared) -> Callable[[str], Path]:
    """Return a function that prepares the toy data set of a benchmark, once per test session; nobody changes it."""

    def prepare(name: str) -> Path:
        source = SAME_DATA.get(name, name)
        python = request.getfixturevalue(f"{catalogue.choose(source).implementation.framework}_python")
        return shared.made(f"toy-{source}", lambda folder: prepared(source, folder, python)) / source

    return prepare


# Read-only commands run in this process; a new process would import Encore for a second.
READERS = {"archive", "audit", "check", "compare", "list", "plan", "published", "report", "score", "show", "status"}


@pytest.fixture(scope="session")
def encore() -> Encore:
    # Runs the command line of this checkout; with ``code`` it must end with this exit code
    def run(*arguments: str, code: int | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "encore.cli.app", *arguments]
        variables = {**os.environ, "COLUMNS": "120", **options.pop("environment", {})}
        only_reads = arguments[0] in READERS or "--dry-run" in arguments
        if only_reads and not options and variables == {**os.environ, "COLUMNS": "120"}:
            done = in_process(command, variables)
        else:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=paths.ROOT, env=variables, check=False, **options
            )
        assert code in (None, done.returncode), done.stdout + done.stderr
        return done

    return run


def in_process(command: list[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(paths.ROOT)
        patch.setenv("ENCORE_CLUSTER", variables["ENCORE_CLUSTER"])  # restored: --cluster sets it
        done = CliRunner().invoke(app, command[3:], env=dict(variables), prog_name="encore")
    if isinstance(done.exception, EncoreError):
        errors = f"{done.stderr}error: {done.exception}\n"
        return subprocess.CompletedProcess(command, done.exception.exit_code, done.stdout, errors)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)


@dataclass(frozen=True)
class ToyRun:
    """A finished training on the toy data set, two ranks, target reached."""

    folder: Path
    printed: dict[str, Any]  # Output of ``encore run --json``

    @property
    def experiment(self) -> Path:
        return self.folder / "experiment_0"

    @property
    def metrics(self) -> Path:
        return self.experiment / "metrics.jsonl"


# Options of the one training per implementation: targets that every seed reaches with margin, in about a minute.
TOY_OPTIONS: dict[str, tuple[str, ...]] = {
    "bert": ("--set", "quality_target=0.08"),
    "dlrm": ("--set", "quality_target=0.75"),
    "gnmt": ("--set", "quality_target=2.0"),
    "gpt-oss-20b": ("--set", "expert_parallelism=2", "--set", "quality_target=5.0"),
    "llama31-8b": ("--set", "quality_target=5.0"),
    "maskrcnn": ("--set", "box_target=0.1", "--set", "mask_target=0.1"),
    "minigo": (
        # The first four generations won 6 to 8 of 16 games; two of 16 are enough
        *("--set", "games=64", "--set", "eval_games=16", "--set", "epochs=2"),
        *("--set", "quality_target=0.1", "--set", "eval_first_model=false"),
    ),
    "resnet": ("--set", "quality_target=0.3", "--env", "MY_TOKEN=hush", "--env", "NOTE=plain"),
    "ncf": ("--set", "quality_target=0.3"),
    "resnet-pytorch": ("--set", "quality_target=0.2"),
    "resnet-tensorflow": ("--set", "quality_target=0.3"),
    "ssd": ("--set", "quality_target=0.1", "--set", "eval_epochs=[4,6,8,10]"),
    "transformer": ("--set", "quality_target=20.0"),
}


@pytest.fixture(scope="session")
def toy_run(encore: Encore, toy: Callable[[str], Path], shared: Shared) -> Callable[[str], ToyRun]:
    """Return a function that trains a benchmark once per test session, for all tests that read a finished run."""

    def run(name: str) -> ToyRun:
        def train(folder: Path) -> None:
            command = ("run", name, "2", "--seed", "1", "--data", str(toy(name)), "--results", str(folder), "--json")
            done = encore(*command, *TOY_OPTIONS.get(name, ()), code=0)
            (folder / "printed.json").write_text(done.stdout, encoding="utf-8")
            validate_run(Path(json.loads(done.stdout)["run"]))

        toy(name)  # Outside the lock of the run: its tests may wait for the data set only
        printed = files.read_json(shared.made(f"run-{name}", train) / "printed.json")
        return ToyRun(Path(printed["run"]), printed)

    return run


@dataclass(frozen=True)
class Study:
    """A finished sweep of resnet over one and two ranks with seed 7, and what it printed."""

    folder: Path
    printed: dict[str, Any]

    def of_ranks(self, ranks: int) -> Path:
        # Experiment folder of a rank count, the reference of other trainings with this seed
        (found,) = self.folder.glob(f"1x{ranks}/*/experiment_0")
        return found


@pytest.fixture(scope="session")
def study(encore: Encore, few_digits: Path, shared: Shared) -> Study:
    # Trains twice: the tests of runs and of sweeps look at it
    def train(folder: Path) -> None:
        asked = ("--gpus-per-node", "1,2", "--seed", "7", *TINY, "--predict", "4", "--json")
        done = encore("sweep", "resnet", *asked, "--data", str(few_digits), "--results", str(folder), code=0)
        (folder / "printed.json").write_text(done.stdout, encoding="utf-8")

    printed = files.read_json(shared.made("study", train) / "printed.json")
    return Study(Path(printed["study"]), printed)


def in_environment(
    python: Path, command: Sequence[str], own: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[str]:
    # Run a command in a framework's environment, with one thread for each rank
    variables = {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(paths.ROOT),
        "OMP_NUM_THREADS": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **own,
    }
    return subprocess.run(command, capture_output=True, text=True, cwd=paths.ROOT, env=variables, check=False)


@cache
def inside(framework: str, ranks: int, program: str, *arguments: str) -> str:
    # Run a program in tests/in_framework in a framework's environment, once per arguments; return its output
    command = [*on_ranks(framework, ranks), f"tests/in_framework/{program}", *arguments]
    done = in_environment(environment.ensure_environment(framework), command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def runs_in(framework: str) -> Any:
    # Return a fixture that runs a program of tests/in_framework and returns its output
    @pytest.fixture(scope="session", name=f"in_{framework}")
    def run_in() -> Callable[..., str]:
        return lambda program, *arguments, ranks=1: inside(framework, ranks, program, *arguments)

    return run_in


in_mxnet, in_tensorflow, in_pytorch = map(runs_in, ("mxnet", "tensorflow", "pytorch"))


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def evaluations(path: Path) -> list[dict[str, Any]]:
    without = ("time", "seconds")
    return [{key: record[key] for key in record if key not in without} for record in records(path, "eval")]


def quality(evaluation: dict[str, Any]) -> float:
    (value,) = evaluation["qualities"].values()
    return float(value)


def logged(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert all(line.startswith(":::MLLOG ") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def losses(path: Path) -> list[float]:
    return [record["loss"] for record in records(path, "step")]


def only_run(results: Path) -> Path:
    (found,) = [path for path in results.iterdir() if not path.name.startswith(".")]
    return found


@pytest.fixture
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, Any], None]:
    # Compare an output, without ``tmp_path`` in its paths, with the golden file, which ENCORE_RECORD=1 rewrites. The
    # folder in tests/golden has the name of the test file's folder.
    def check(name: str, output: Any) -> None:
        text = output if isinstance(output, str) else _lines(_rounded(output))
        text = text.replace(str(tmp_path), "").rstrip() + "\n"
        path = Path(__file__).parent / "golden" / request.path.parent.name / name
        if "ENCORE_RECORD" in os.environ:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        assert text == path.read_text("utf-8")

    return check


def _lines(value: Any) -> str:
    # JSON with a line for each key, and for each element of a list below it.
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(each)}" for key, each in value.items()) + "\n}"
    if isinstance(value, list) and any(isinstance(each, list | dict) for each in value):
        return "[\n" + ",\n".join(json.dumps(each, ensure_ascii=False) for each in value) + "\n]"
    return json.dumps(value, ensure_ascii=False)


def _rounded(value: Any) -> Any:
    # plain data with nine digits of each number: the rest may differ from library to library.
    if isinstance(value, dict):
        return {str(key): _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value
