"""The rooms of encore/: imports point down from one to the next, and nothing imports in a circle."""

import ast
from graphlib import TopologicalSorter

import pytest

from tools.architecture import imported, modules, room

# From the ground up, "encore" for the modules of encore/ itself; rooms of one layer do not import each other. What a
# run needs comes first, the lab stands on it, and the command line alone is above both.
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
FLOOR = {room: number for number, layer in enumerate(LAYERS) for room in layer}
MODULES = modules("encore")


def climbs(module: str, needed: set[str]) -> list[str]:
    # What a module imports from its own layer's other rooms or from above
    here = room(module)
    return sorted(each for each in needed if room(each) != here and FLOOR[room(each)] >= FLOOR[here])


@pytest.mark.parametrize("name", sorted(FLOOR))
def test_imports_point_down(name: str) -> None:
    found = {module: climbs(module, imported(module)) for module in MODULES if room(module) == name}
    assert not {module: up for module, up in found.items() if up}


def test_every_room_has_a_layer() -> None:
    assert {room(module) for module in MODULES} == set(FLOOR)


def test_no_module_imports_itself_by_way_of_others() -> None:
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    TopologicalSorter({module: imported(module) - packages for module in MODULES}).prepare()


@pytest.mark.parametrize(
    ("module", "line", "up"),
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
def test_an_arrow_that_climbs_is_seen(module: str, line: str, up: list[str]) -> None:
    assert climbs(module, imported(module, ast.parse(line))) == up
