"""Jobs and the host runtime: exact command lines, nothing leaks in, rendering is pure."""

from __future__ import annotations

from pathlib import Path

import pytest

from encore import catalogue, launchers, paths
from encore.configuration import Configuration, resolve
from encore.containers.renderers import host
from encore.job import Job, Mount, Places, training_job
from encore.machine import node
from encore.run import supervise
from encore.run.run_folder import Experiment

RESNET = catalogue.choose("resnet")


def configured(system: str, gpus: int) -> Configuration:
    return resolve(RESNET, catalogue.find_system(RESNET, system, "v0.7"), 1, gpus, [])


def job(system: str, gpus: int) -> Job:
    mounts = (Mount(Path("/data"), "/data", True), Mount(Path("/out"), "/out", False))
    return training_job(configured(system, gpus), Places("/data", "/out"), mounts, {"NCCL_DEBUG": "INFO"}, node.cores())


TRAIN = (
    "python", "-m", "benchmarks.resnet.mxnet.train",
    "--config", "/out/config.json", "--data", "/data", "--output", "/out",
)  # fmt: skip


@pytest.mark.parametrize("gpus", [4, 8, 16])
def test_several_ranks_start_by_horovodrun(gpus: int) -> None:
    launcher = ("horovodrun", "--gloo", "-np", str(gpus), "--output-filename", "/out/ranks")
    assert job("dgxa100", gpus).argv == launcher + TRAIN
    assert job("dgxa100", gpus).gpus == gpus


def test_one_rank_needs_no_launcher() -> None:
    assert job("cpu", 1).argv == TRAIN
    assert job("cpu", 1).gpus == 0


def test_ranks_on_a_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "cores", lambda: 16)
    assert job("cpu", 4).environment["OMP_NUM_THREADS"] == "4"
    assert job("cpu", 32).environment["OMP_NUM_THREADS"] == "1"
    assert job("dgxa100", 8).environment["OMP_NUM_THREADS"] == "1"  # as submitted, whatever the cores
    assert "OMP_NUM_THREADS" not in job("a100-40gb", 1).environment


def test_host_command_takes_over_named_variables_only() -> None:
    caller = {
        "PATH": "/usr/bin",
        "HOME": "/home/me",
        "LD_PRELOAD": "evil.so",
        "NCCL_ALGO": "Tree",
        "LANG": "C",
    }
    command = host.render(job("dgxa100", 8), Path("/env/bin/python"), caller)
    submitted = {name for variables in configured("dgxa100", 8).system.environment.values() for name in variables}
    assert {n: v for n, v in command.environment.items() if n not in submitted - {"NCCL_DEBUG"}} == {
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


def test_rendering_twice_gives_the_same() -> None:
    wanted = job("dgxa100", 8)
    first = host.render(wanted, Path("/env/bin/python"), {"PATH": "/bin"})
    assert host.render(wanted, Path("/env/bin/python"), {"PATH": "/bin"}) == first
    assert wanted == job("dgxa100", 8)


def test_pytorch_starts_by_torchrun() -> None:
    launch = launchers.on_one_node("pytorch", 2, "/out")
    assert launch.inner == (
        "torchrun", "--standalone", "--nproc-per-node=2", "--log-dir=/out/ranks", "--redirects=3", "--no-python",
    )  # fmt: skip
    assert not launch.environment
    assert launchers.on_one_node("pytorch", 1, "/out").inner == ()


def built(name: str) -> str:
    return (paths.ROOT / "tests" / "samples" / "horovod" / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "controllers", "operations"),
    [
        ("mxnet", ("MPI", "Gloo"), ("MPI", "Gloo")),
        ("tensorflow", ("MPI", "Gloo"), ("MPI", "Gloo")),
        ("mpi_alone", ("MPI",), ("NCCL", "MPI")),
        ("neither", (), ()),
    ],
)
def test_what_horovod_was_built_with_is_read(
    name: str, controllers: tuple[str, ...], operations: tuple[str, ...]
) -> None:
    assert launchers.parse_check_build(built(name)) == launchers.HorovodBuild(controllers, operations)
    assert launchers.parse_check_build("a greeting\n" + built(name)) is not None
    assert launchers.parse_check_build("horovodrun: not found\n") is None


@pytest.mark.parametrize(
    ("name", "mpirun", "ranks", "expected"),
    [
        ("mxnet", True, 8, "gloo"),
        ("mpi_alone", True, 8, "mpi"),
        ("mpi_alone", False, 8, None),
        ("mpi_alone", False, 1, "mpi"),
        ("neither", True, 8, None),
    ],
)
def test_ranks_meet_by_what_their_horovod_has(name: str, mpirun: bool, ranks: int, expected: str | None) -> None:
    build = launchers.parse_check_build(built(name))
    assert launchers.controller(build, mpirun, ranks) == expected
    assert launchers.controller(None, False, ranks) == "gloo"


def test_mpirun_starts_ranks_as_in_the_submissions() -> None:
    launch = launchers.on_one_node("mxnet", 8, "/out", "mpi", as_root=True)
    assert launch.inner == (
        "mpirun", "--allow-run-as-root", "--bind-to", "none", "-np", "8", "--output-filename", "/out/ranks:nojobid",
    )  # fmt: skip
    assert launch.environment == {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    assert "--allow-run-as-root" not in launchers.on_one_node("mxnet", 8, "/out", "mpi").inner
    alone = launchers.on_one_node("mxnet", 1, "/out", "mpi")
    assert (alone.inner, alone.environment["HOROVOD_CONTROLLER"]) == ((), "mpi")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Process 1 exit with status code 9.", (1, "failed with exit code 9")),
        (
            "srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Terminated",
            (1, "was killed by SIGKILL"),
        ),
        ("srun: error: n[1-2]: tasks 0-3: Exited with exit code 2", (0, "failed with exit code 2")),
        ("slurmstepd: error: n2: task 3: Out Of Memory", (3, "was killed: its node is out of memory")),
        (
            "srun: error: task 1 launch failed: Unspecified error\nsrun: error: n1: task 0: Killed",
            (1, "could not be started: Unspecified error; see slurmd's log on its node"),
        ),
        (
            "Root Cause (first observed failure):\n[0]:\n  time : x\n  rank      : 3 (local_rank: 3)\n"
            "  exitcode  : -9 (pid: 8)\n",
            (3, "was killed by SIGKILL"),
        ),
        (
            # Rank 0 lost its connection to rank 1, and ended before torchrun looked.
            "train FAILED\nFailures:\n[1]:\n  time      : x\n  host      : n1\n  rank      : 1 (local_rank: 1)\n"
            "  exitcode  : -9 (pid: 8)\n  error_file: <N/A>\n------\nRoot Cause (first observed failure):\n[0]:\n"
            "  time      : x\n  host      : n1\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 7)\n",
            (1, "was killed by SIGKILL"),
        ),
    ],
)
def test_first_failing_rank(said: str, expected: tuple[int, str], tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "launcher.txt").write_text(
        f"Process 0 exit with status code 4\n{supervise.START}horovodrun\n{said}", encoding="utf-8"
    )
    assert supervise.first_failure(Experiment(0, tmp_path), 1) == expected
