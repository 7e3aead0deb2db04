"""The rooms of encore/: imports point down from one to the next, and nothing imports in a circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from encore import paths

LAYERS = (
    ("",),
    ("machine",),
    ("results",),
    ("results.logs",),
    ("results.scores", "results.published"),
    ("results.compliance",),
    ("results.audit",),
    ("results.compare",),
    ("results.report",),
    ("containers",),
    ("slurm", "ssh"),
    ("run",),
    ("lab",),
    ("lab.scaling", "lab.submissions", "lab.serving"),
    ("lab.studies",),
    ("cli",),
)
"""From the ground up, "" for the modules of encore/ itself; rooms of one layer do not import each other.

What a run needs comes first, the lab stands on it, and the command line alone is above both.
"""
HOUSES = ("results", "lab")
"""Rooms that have rooms."""
FLOOR = {room: number for number, layer in enumerate(LAYERS) for room in layer}


def name_of(path: Path) -> str:
    """Return ``encore.run.judge`` for its file, and ``encore.run`` for the package's."""
    parts = path.relative_to(paths.ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in (paths.ROOT / "encore").rglob("*.py")}
PACKAGES = {module for module, path in MODULES.items() if path.name == "__init__.py"}


def room(module: str) -> str:
    """Return the room of a module; empty for one of encore/ itself."""
    parts = module.split(".")[1:]
    if module not in PACKAGES:
        parts = parts[:-1]
    return ".".join(parts[: 2 if parts[:1] and parts[0] in HOUSES else 1])


def imported(module: str, tree: ast.Module | None = None) -> set[str]:
    """Return the modules of encore that a module needs: at its top, in a function, or by ``python -m NAME``."""
    found = set()
    for node in ast.walk(tree or ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} - PACKAGES
    # The version in encore/__init__.py is on the ground floor.
    return {name for name in found if name in MODULES and name not in (module, "encore")}


def climbs(module: str, needed: set[str]) -> list[str]:
    """Return what a module imports from its own layer's other rooms or from above."""
    here = room(module)
    return sorted(each for each in needed if room(each) != here and FLOOR[room(each)] >= FLOOR[here])


@pytest.mark.parametrize("name", sorted(FLOOR))
def test_imports_point_down(name: str) -> None:
    found = {module: climbs(module, imported(module)) for module in MODULES if room(module) == name}
    assert not {module: up for module, up in found.items() if up}


def test_every_room_has_a_layer() -> None:
    assert {room(module) for module in MODULES} == set(FLOOR)


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter({module: imported(module) - PACKAGES for module in MODULES}).prepare()


@pytest.mark.parametrize(
    ("module", "line", "up"),
    [
        ("encore.machine.node", "from encore.run import planning", ["encore.run", "encore.run.planning"]),
        (
            "encore.slurm.nodes",
            "def f():\n    from encore.ssh import hosts",
            ["encore.ssh", "encore.ssh.hosts"],
        ),
        ("encore.job", "import encore.machine.node", ["encore.machine.node"]),
        ("encore.containers.images", "run('-m', 'encore.slurm.requeue')", ["encore.slurm.requeue"]),
        ("encore.run.judge", "from encore.results.logs.run_log import read_run", []),
        ("encore.run.judge", "from encore.lab.studies import page", ["encore.lab.studies", "encore.lab.studies.page"]),
    ],
)
def test_an_arrow_that_climbs_is_seen(module: str, line: str, up: list[str]) -> None:
    assert climbs(module, imported(module, ast.parse(line))) == up
