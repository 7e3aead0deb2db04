"""Separation of the host side from the container side, and the structure of the implementations."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from encore import catalogue, paths
from encore.cli.app import COMMANDS, LAB
from encore.cli.extensions import EXTENSIONS, load
from encore.results.published.published import load_published
from tools.architecture import imported, modules, room

FRAMEWORKS = {"mxnet", "torch", "tensorflow", "horovod", "nvidia"}
STANDARD_LIBRARY = {"__future__", "dataclasses", "typing"}


def modules_in(path: Path) -> set[str]:
    # Full names of the imported modules
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names} | {
        node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level
    }


def packages(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in modules_in(path)}


@pytest.mark.parametrize(
    ("folder", "foreign"), [(paths.BENCHMARKS, {"encore"}), (paths.ROOT / "encore", {*FRAMEWORKS, "benchmarks"})]
)
def test_neither_side_imports_the_other(folder: Path, foreign: set[str]) -> None:
    assert {path: names for path in folder.rglob("*.py") if (names := packages(path) & foreign)} == {}


def names_of_benchmarks_and_frameworks() -> set[str]:
    choices = catalogue.choices()
    frameworks = {choice.implementation.framework for choice in choices.values()}
    entries = {name: catalogue.framework(name) for name in frameworks}
    libraries = {library for name, entry in entries.items() for library in (*entry.software[name], entry.title)}
    published = {cell.benchmark for cell in load_published() if cell.benchmark}
    return {name.lower() for name in {*catalogue.benchmarks(), *choices, *published, *frameworks, *libraries}}


def string_constants(text: str) -> Iterator[tuple[int, str]]:
    # Yield line and value of the strings that are no docstrings
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_host_side_contains_no_name_of_a_benchmark_or_framework() -> None:
    # Their properties are in TOML files. encore/results reads the logs of all benchmarks of MLPerf.
    names, root = names_of_benchmarks_and_frameworks(), paths.ROOT / "encore"
    assert {"resnet", "resnet-pytorch", "ssd", "pytorch", "torch", "tensorflow-cpu", "mxnet"} <= names
    constants = [
        f"{path.relative_to(root)}:{line}: {text}"
        for path in root.rglob("*.py")
        if root / "results" not in path.parents and path.name != "printed_tables.py"
        for line, text in string_constants(path.read_text(encoding="utf-8"))
        if text.lower() in names
    ]
    assert not constants


@pytest.mark.parametrize("path", sorted(paths.BENCHMARKS.rglob("config.py")), ids=lambda folder: folder.name)
def test_config_imports_the_standard_library_only(path: Path) -> None:
    llama = {"benchmarks.llama.config_checks", "benchmarks.llama.shapes", "benchmarks.llama"}
    # Shared by the implementations of a benchmark; the host loads it by its path.
    shared = f"benchmarks.{path.parent.parent.name}.config" if (path.parent.parent / "config.py").exists() else ""
    assert modules_in(path) <= {*STANDARD_LIBRARY, "benchmarks.common.config_checks", shared, *llama}


@pytest.mark.parametrize(
    "path",
    sorted(
        [
            *paths.BENCHMARKS.glob("*/memory.py"),
            *(path.with_name("architecture.py") for path in paths.BENCHMARKS.glob("*/memory.py")),
            *paths.BENCHMARKS.glob("*/config_checks.py"),
            paths.BENCHMARKS / "llama" / "shapes.py",
        ]
    ),
    ids=str,
)
def test_memory_models_and_checks_import_the_standard_library_only(path: Path) -> None:
    assert not path.exists() or packages(path) <= {"__future__", "typing", "benchmarks"}


@pytest.mark.parametrize(
    "path", sorted(paths.BENCHMARKS.glob("*/*/train.py")), ids=lambda path: path.parent.parent.name
)
def test_bench_measures_the_training_step(path: Path) -> None:
    module = ".".join(path.relative_to(paths.ROOT).with_suffix("").parts)
    bench, train = (ast.parse(file.read_text(encoding="utf-8")) for file in (path.with_name("bench.py"), path))
    imports = [node for node in bench.body if isinstance(node, ast.ImportFrom) and node.module == module]
    assert "train_step" in {alias.name for node in imports for alias in node.names}
    assert sum("train_step" in ast.unparse(node) for node in bench.body) > 1, "imported and not used"
    functions = {node.name: ast.unparse(node) for node in train.body if isinstance(node, ast.FunctionDef)}
    assert list(functions)[-1] == "main" and {"train_step", "evaluate"} <= set(functions)
    assert re.search(r"run\.(steps|step_ranges)\(", functions["main"])
    # A normal exit destroys the interpreter under running threads, which sometimes aborts the process.
    assert path.read_text(encoding="utf-8").splitlines()[-1] == "    end_process(main)"


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in paths.BENCHMARKS.glob("*/benchmark.toml")), ids=lambda folder: folder.name
)
def test_benchmarks_do_not_import_each_other(folder: Path) -> None:
    # Shared code is in folders without benchmark.toml: common, detection, language, llama, translation ...
    others = {path.parent.name for path in paths.BENCHMARKS.glob("*/benchmark.toml")} - {folder.name}
    imports = {name for path in folder.rglob("*.py") for name in modules_in(path)}
    assert {name for name in imports if name.split(".")[0] == "benchmarks" and name.split(".")[1] in others} == set()


def test_training_code_is_valid_python_3_8() -> None:
    for path in paths.BENCHMARKS.rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))


# From the lowest layer up; "encore" stands for the modules of encore/ itself. Packages of a layer do not import each
# other.
LAYERS = (
    ("encore",),
    ("results",),
    ("results.logs",),
    ("results.scores", "results.published"),
    ("results.compliance",),
    ("results.audit",),
    ("results.compare",),
    ("results.report",),
    ("machine",),
    ("containers",),
    ("kubernetes",),
    ("slurm", "ssh"),
    ("run",),
    ("lab",),
    ("lab.scaling", "lab.submissions", "lab.serving"),
    ("lab.studies",),
    ("cli",),
)
LEVELS = {name: level for level, layer in enumerate(LAYERS) for name in layer}
MODULES = modules("encore")


def upward_imports(module: str, imports: set[str]) -> list[str]:
    # Return imports from other packages of the same layer or of higher layers
    package = room(module)
    return sorted(name for name in imports if room(name) != package and LEVELS[room(name)] >= LEVELS[package])


def test_imports_point_to_lower_layers() -> None:
    assert {room(module) for module in MODULES} == set(LEVELS)
    upward = {module: upward_imports(module, imported(module)) for module in MODULES}
    assert {module: names for module, names in upward.items() if names} == {}


def test_results_need_no_other_part_of_encore() -> None:
    # The environment of a submission is in the catalogue of systems.
    leaves = {"encore", "encore.errors", "encore.files"}
    foreign = {
        module: {name for name in imported(module) if not name.startswith("encore.results")} - leaves
        for module in MODULES
        if module.startswith("encore.results")
    }
    assert {module: names for module, names in foreign.items() if names} == {
        "encore.results.compare.explain": {"encore.catalogue"}
    }


def test_there_are_no_import_cycles() -> None:
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    TopologicalSorter({module: imported(module) - packages for module in MODULES}).prepare()


def test_core_commands_import_the_lab_only_by_the_table_of_extensions() -> None:
    lab = {f"encore.cli.{target.partition('.')[0]}" for target in LAB.values()}
    core = {f"encore.cli.{target.partition('.')[0]}" for target in COMMANDS.values()}
    foreign = {
        module: {name for name in imported(module) if name.startswith("encore.lab") or name in lab - core}
        for module in core
    }
    assert {module: names for module, names in foreign.items() if names} == {}
    for option in EXTENSIONS:
        assert option.partition(" ")[0] in COMMANDS and callable(load(option))
