"""The wall between host side and container side, and the shape of the implementations."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from encore import catalogue, paths
from encore.results.published.published import load_published

FRAMEWORKS = {"mxnet", "torch", "tensorflow", "horovod", "nvidia"}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(
    ("folder", "foreign"), [(paths.BENCHMARKS, {"encore"}), (paths.ROOT / "encore", {*FRAMEWORKS, "benchmarks"})]
)
def test_neither_side_imports_the_other(folder: Path, foreign: set[str]) -> None:
    assert {path: found for path in folder.rglob("*.py") if (found := imported(path) & foreign)} == {}


def described_names() -> set[str]:
    # Names of benchmarks, implementations and frameworks, and of the packages that frameworks are installed by
    frameworks = {choice.implementation.framework for choice in catalogue.choices().values()}
    titles = {catalogue.framework(name).title for name in frameworks}
    packages = {name for each in frameworks for name in catalogue.framework(each).software[each]}
    published = {cell.benchmark for cell in load_published() if cell.benchmark}
    known = {*catalogue.benchmarks(), *catalogue.choices(), *published, *frameworks, *titles, *packages}
    return {name.lower() for name in known}


def constants(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def test_host_side_names_neither_benchmark_nor_framework(tmp_path: Path) -> None:
    # What is said of one is in its TOML. results/ reads everybody's logs, and knows all benchmarks of MLPerf. So do the
    # tables that a study printed.
    names = described_names()
    assert {"resnet", "resnet-pytorch", "ssd", "pytorch", "torch", "tensorflow-cpu", "mxnet"} <= names
    root = paths.ROOT / "encore"
    found = [
        f"{path.relative_to(paths.ROOT)}:{line}: {text}"
        for path in root.rglob("*.py")
        if root / "results" not in path.parents and path.name != "printed_tables.py"
        for line, text in constants(path)
        if text.lower() in names
    ]
    assert not found
    sample = tmp_path / "sample.py"
    sample.write_text('"""mxnet"""\nrate = {"x": "MXNet"}\n', encoding="utf-8")
    assert [text for _, text in constants(sample)] == ["x", "MXNet"]


@pytest.mark.parametrize("path", sorted(paths.BENCHMARKS.rglob("config.py")), ids=str)
def test_config_needs_the_standard_library_alone(path: Path) -> None:
    modules = {"__future__", "dataclasses", "typing", "benchmarks"}
    llama = {"benchmarks.llama.config_checks", "benchmarks.llama.shapes", "benchmarks.llama"}
    allowed = {"benchmarks.common.config_checks", *llama}
    if (path.parent.parent / "config.py").exists():
        # What the implementations of a benchmark have in common; the host loads it by its file.
        allowed |= {f"benchmarks.{path.parent.parent.name}.config"}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in names if name and name.startswith("benchmarks")} <= allowed
    assert imported(path) <= modules
    assert imported(paths.BENCHMARKS / "common" / "config_checks.py") <= {"__future__", "typing"}
    assert imported(paths.BENCHMARKS / "llama" / "config_checks.py") <= {"typing", "benchmarks"}
    assert imported(paths.BENCHMARKS / "llama" / "shapes.py") <= {"typing"}


@pytest.mark.parametrize("path", sorted(paths.BENCHMARKS.glob("*/memory.py")), ids=str)
def test_memory_model_needs_the_standard_library_alone(path: Path) -> None:
    assert imported(path) <= {"__future__", "typing", "benchmarks"}
    sizes = path.parent / "architecture.py"
    assert not sizes.exists() or imported(sizes) <= {"__future__", "typing", "benchmarks"}


@pytest.mark.parametrize("choice", catalogue.choices().values(), ids=lambda choice: choice.name)
def test_every_implementation_has_the_same_files(choice: catalogue.Choice) -> None:
    own = ("__init__", "train", "model", "data", "config", "bench", "export", "selftest")
    wanted = [choice.folder / f"{name}.py" for name in own]
    wanted += [choice.folder.parent / name for name in ("prepare.py", "events.py", "README.md")]
    assert [path for path in wanted if not path.exists()] == []


@pytest.mark.parametrize(
    "path", sorted(paths.BENCHMARKS.glob("*/*/train.py")), ids=lambda path: path.parent.parent.name
)
def test_bench_measures_the_step_that_trains(path: Path) -> None:
    bench = ast.parse((path.parent / "bench.py").read_text(encoding="utf-8"))
    module = ".".join(path.relative_to(paths.ROOT).with_suffix("").parts)
    sources = [each for each in bench.body if isinstance(each, ast.ImportFrom) and each.module == module]
    assert "train_step" in {alias.name for each in sources for alias in each.names}
    assert sum("train_step" in ast.unparse(node) for node in bench.body) > 1, "imported and not used"
    # What is trained is visible: a loop over the steps, one of which goes forward and backward.
    train = {
        node.name: ast.unparse(node)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert list(train)[-1] == "main" and {"train_step", "evaluate"} <= set(train)
    assert re.search(r"run\.(steps|step_ranges)\(", train["main"])
    # A plain exit takes the interpreter apart under threads that still run, which aborts one process in some hundreds.
    assert path.read_text(encoding="utf-8").splitlines()[-1] == "    end_process(main)"


def test_training_code_parses_as_python_3_8() -> None:
    for path in paths.BENCHMARKS.rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
