"""The wall between host side and container side, and the shape of the implementations."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from encore import catalogue, paths
from encore.results.published import load_published

FRAMEWORKS = {"mxnet", "torch", "tensorflow", "horovod", "nvidia"}


def imported(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def test_training_code_never_imports_the_host_side() -> None:
    for path in paths.BENCHMARKS.rglob("*.py"):
        assert "encore" not in imported(path), path


def test_host_side_imports_neither_framework_nor_benchmark() -> None:
    for path in (paths.ROOT / "encore").rglob("*.py"):
        assert not imported(path) & (FRAMEWORKS | {"benchmarks"}), path


def described_names() -> set[str]:
    """Names of benchmarks, implementations and frameworks, and of the packages that frameworks are installed by."""
    frameworks = {choice.implementation.framework for choice in catalogue.choices().values()}
    titles = {catalogue.framework(name).title for name in frameworks}
    packages = {name for each in frameworks for name in catalogue.framework(each).software[each]}
    published = {cell.benchmark for cell in load_published() if cell.benchmark}
    known = {*catalogue.benchmarks(), *catalogue.choices(), *published, *frameworks, *titles, *packages}
    return {name.lower() for name in known}


def constants(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string of a file, without docstrings and other strings that stand alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def test_host_side_names_neither_benchmark_nor_framework(tmp_path: Path) -> None:
    """What is said of one is in its TOML. results/ reads everybody's logs, and knows all benchmarks of MLPerf."""
    names = described_names()
    assert {"resnet", "resnet-pytorch", "ssd", "pytorch", "torch", "tensorflow-cpu", "mxnet"} <= names
    root = paths.ROOT / "encore"
    found = [
        f"{path.relative_to(paths.ROOT)}:{line}: {text}"
        for path in root.rglob("*.py")
        if root / "results" not in path.parents
        for line, text in constants(path)
        if text.lower() in names
    ]
    assert not found
    sample = tmp_path / "sample.py"
    sample.write_text('"""mxnet"""\nrate = {"x": "MXNet"}\n', encoding="utf-8")
    assert [text for _, text in constants(sample)] == ["x", "MXNet"]


@pytest.mark.parametrize("path", sorted(paths.BENCHMARKS.rglob("config.py")), ids=str)
def test_config_needs_the_standard_library_alone(path: Path) -> None:
    modules = {"__future__", "dataclasses", "typing", "typing_extensions"}
    if (path.parent.parent / "config.py").exists():
        # What the implementations of a benchmark have in common; the host loads it by its file.
        modules |= {"benchmarks"}
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {name for name in names if name and name.startswith("benchmarks")} == {
            f"benchmarks.{path.parent.parent.name}.config"
        }
    assert imported(path) <= modules


def test_every_implementation_has_the_same_files() -> None:
    for choice in catalogue.choices().values():
        names = {path.name for path in choice.folder.iterdir()}
        assert {"__init__.py", "train.py", "model.py", "data.py", "config.py", "bench.py"} <= names
        assert catalogue.systems(choice)
        assert (choice.folder.parent / "prepare.py").exists()
        assert (choice.folder.parent / "README.md").exists()


def test_training_main_is_short_enough_to_read() -> None:
    for path in paths.BENCHMARKS.glob("*/*/train.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        (main,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main"]
        assert main.end_lineno is not None
        assert main.end_lineno - main.lineno < 120, path
        # The loop is visible in it: forward, backward, step. What is compiled or captured as a whole, TensorFlow's
        # step and NCF's epoch, is a function above it or in steps.py.
        text = ast.unparse(main)
        assert "for epoch in" in text
        whole = ast.unparse(tree) if "train_step(" in text else text
        if "steps.train_steps(" in text:
            whole += (path.parent / "steps.py").read_text(encoding="utf-8")
        assert ".backward(" in whole or ".gradient(" in whole
        assert ".step" in whole


def test_no_file_is_a_heap() -> None:
    for path in (*(paths.ROOT / "encore").rglob("*.py"), *paths.BENCHMARKS.rglob("*.py")):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path


def test_training_code_parses_as_python_3_8() -> None:
    for path in paths.BENCHMARKS.rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
