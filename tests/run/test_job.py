"""Command lines and environments of jobs on one node, and the controller of Horovod."""

from pathlib import Path
from typing import Any

import pytest

from encore import catalogue, configuration, launchers, paths
from encore.containers import renderers
from encore.job import Job, training_job
from encore.machine import node

RESNET = catalogue.choose("resnet")


def configured(system: str, gpus: int) -> configuration.Configuration:
    return configuration.resolve(RESNET, catalogue.find_system(RESNET, system, "v0.7"), 1, gpus, [])


def job(system: str, gpus: int) -> Job:
    variables = {"NCCL_DEBUG": "INFO"}
    return training_job(configured(system, gpus), Path("/data"), Path("/out"), variables, node.cores())


TRAIN = (
    "python", "-m", "benchmarks.resnet.mxnet.train",
    "--config", "/out/config.json", "--data", "/data", "--output", "/out",
)  # fmt: skip


@pytest.mark.parametrize(
    ("system", "ranks", "gpus", "threads"),
    [
        ("dgxa100", 8, 8, "1"),  # as submitted, on any number of cores
        ("a100-40gb", 1, 1, None),
        ("cpu", 1, 0, "16"),
        ("cpu", 4, 0, "4"),
        ("cpu", 32, 0, "1"),
    ],
)
def test_ranks_of_one_node(
    system: str, ranks: int, gpus: int, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "cores", lambda: 16)
    training = job(system, ranks)
    launcher = ("horovodrun", "--gloo", "-np", str(ranks), "--output-filename", "/out/ranks") if ranks > 1 else ()
    assert (training.argv, training.ranks, training.gpus) == (launcher + TRAIN, ranks, gpus)
    assert training.environment.get("OMP_NUM_THREADS") == threads


def test_host_command_passes_only_named_variables() -> None:
    caller = {
        "PATH": "/usr/bin",
        "HOME": "/home/me",
        "LD_PRELOAD": "evil.so",
        "NCCL_ALGO": "Tree",
        "LANG": "C",
    }
    command = renderers.host(job("dgxa100", 8), Path("/env/bin/python"), caller)
    submitted = {name for variables in configured("dgxa100", 8).system.environment.values() for name in variables}
    others = {name: value for name, value in command.environment.items() if name not in submitted - {"NCCL_DEBUG"}}
    assert others == {
        "HOME": "/home/me",
        "LANG": "C",
        "LOGNAME": "encore",
        "USER": "encore",
        "PATH": "/env/bin:/usr/bin",
        "PYTHONPATH": str(paths.ROOT),
        "PYTHONUNBUFFERED": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "NCCL_DEBUG": "INFO",
    }
    assert command.argv == job("dgxa100", 8).argv


GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
MPI = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
TO_FILES = "--bind-to none -np 8 --output-filename /out/ranks:nojobid"


@pytest.mark.parametrize(
    ("framework", "ranks", "controller", "as_root", "expected", "variables"),
    [
        ("pytorch", 2, "gloo", True, "torchrun --standalone --nproc-per-node=2 --log-dir=/out/ranks --redirects=3"
         " --no-python", {}),
        ("pytorch", 1, "gloo", False, "", {}),
        ("mxnet", 1, "gloo", False, "", GLOO),
        ("mxnet", 1, "mpi", False, "", MPI),
        ("mxnet", 8, "mpi", False, f"mpirun {TO_FILES}", MPI),
        ("tensorflow", 8, "mpi", True, f"mpirun --allow-run-as-root {TO_FILES}", MPI),
    ],
)  # fmt: skip
def test_launchers_of_one_node(
    framework: str, ranks: int, controller: Any, as_root: bool, expected: str, variables: dict[str, str]
) -> None:
    launch = launchers.on_one_node(framework, ranks, "/out", controller, as_root)
    assert (" ".join(launch.inner), launch.environment) == (expected, variables)


def check_build(name: str) -> str:
    return (paths.ROOT / "tests" / "samples" / "horovod" / f"{name}.txt").read_text(encoding="utf-8")


BUILDS = {
    "mxnet": (("MPI", "Gloo"), ("MPI", "Gloo")),
    "tensorflow": (("MPI", "Gloo"), ("MPI", "Gloo")),
    "mpi_alone": (("MPI",), ("NCCL", "MPI")),
    "neither": ((), ()),
}


@pytest.mark.parametrize(
    ("name", "mpirun", "ranks", "expected"),
    [
        ("mxnet", True, 8, "gloo"),
        ("tensorflow", False, 8, "gloo"),
        ("mpi_alone", True, 8, "mpi"),
        ("mpi_alone", False, 8, None),
        ("mpi_alone", False, 1, "mpi"),
        ("neither", True, 8, None),
    ],
)
def test_controller_depends_on_the_build_of_horovod(name: str, mpirun: bool, ranks: int, expected: str | None) -> None:
    build = launchers.parse_check_build("a greeting\n" + check_build(name))
    assert build == launchers.HorovodBuild(*BUILDS[name])
    assert launchers.controller(build, mpirun, ranks) == expected
    assert launchers.controller(launchers.parse_check_build("horovodrun: not found\n"), False, ranks) == "gloo"
