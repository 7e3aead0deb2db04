"""Packages of encore/: imports point to lower layers, and there are no import cycles."""

import ast
from graphlib import TopologicalSorter

import pytest

from tools.architecture import imported, modules, room

# From the lowest layer up; "encore" stands for the modules of encore/ itself. Packages of a layer do not import each
# other.
LAYERS = (
    ("encore",),
    ("machine",),
    ("results",),
    ("results.logs",),
    ("results.scores", "results.published"),
    ("results.compliance",),
    ("results.audit",),
    ("results.compare",),
    ("results.report",),
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


def test_there_are_no_import_cycles() -> None:
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    TopologicalSorter({module: imported(module) - packages for module in MODULES}).prepare()


@pytest.mark.parametrize(
    ("module", "line", "upward"),
    [
        ("encore.machine.node", "from encore.run import planning", ["encore.run", "encore.run.planning"]),
        (
            "encore.slurm.step",
            "def f():\n    from encore.ssh import hosts",
            ["encore.ssh", "encore.ssh.hosts"],
        ),
        ("encore.job", "import encore.machine.node", ["encore.machine.node"]),
        ("encore.containers.images", "run('-m', 'encore.slurm.queue')", ["encore.slurm.queue"]),
        ("encore.run.judge", "from encore.results.logs.run_log import read_run", []),
        (
            "encore.run.judge",
            "from encore.lab.studies import answers",
            ["encore.lab.studies", "encore.lab.studies.answers"],
        ),
    ],
)
def test_upward_import_is_detected(module: str, line: str, upward: list[str]) -> None:
    assert upward_imports(module, imported(module, ast.parse(line))) == upward
