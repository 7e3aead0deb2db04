"""The host runtime with a Python of the user: its facts, its problems, and the start of ranks with it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from encore import catalogue, files, paths
from encore.configuration import Configuration
from encore.containers import checks, renderers, runtimes
from encore.errors import EncoreError
from encore.job import training_job
from encore.run import planning
from encore.slurm.cluster import Cluster
from tests.conftest import Encore, Study, losses
from tests.machine.machines import PACKAGES, answered, check_build
from tests.trainings import resolved, train

CHOICE = catalogue.choose("resnet-pytorch")


def configured(system: str) -> Configuration:
    return resolved(CHOICE.name, system, "v0.7", 2, nodes=1)


def test_python_with_pytorch_for_cpus(pytorch_python: Path) -> None:
    target = runtimes.query_python(runtimes.Target(python=pytorch_python), CHOICE, {})
    facts = target.python_json() or {}
    assert (facts["problems"], facts["file"], "torch" in facts["packages"]) == ({}, str(pytorch_python), True)
    cpu, gpu = (checks.check_host(target, configured(system)) for system in ("cpu", "dgxa100"))
    assert (cpu.level, gpu.level, "built for CPUs" in gpu.found) == ("OK", "FAIL", True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "no Python"),
        ("", "is not executable"),
        ("#!/bin/sh\necho hello\n", "is not a working Python: hello"),
        ("#!/bin/sh\necho 'SyntaxError: f' >&2; exit 1\n", "is not a working Python: SyntaxError: f"),
        ('#!/bin/sh\necho \'ENCORE FACTS {"python": "3.7.4"}\'\n', "is Python 3.7.4"),
        ("#!/no/such/interpreter\n", "does not run"),
    ],
)
def test_file_that_is_not_a_python_is_rejected(tmp_path: Path, text: str | None, found: str) -> None:
    file = tmp_path / "python"
    if text is not None:
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755 if text else 0o644)
    check = checks.check_host(runtimes.query_python(runtimes.Target(python=file), CHOICE, {}), configured("cpu"))
    assert check.level == "FAIL" and found in check.found
    assert "Python 3.8 or later" in check.found and "--python" in check.hint, check


@pytest.mark.parametrize(
    ("changes", "level", "found"),
    [
        ({}, "OK", "PyTorch with CUDA 12.4"),
        ({"gpus": 1}, "FAIL", "sees 1 GPUs, 2 needed"),
        ({"cuda": ""}, "FAIL", "built for CPUs"),
        ({"problems": {"torch": "OSError: libcudart.so.12"}}, "FAIL", "cannot import torch (OSError: libcudart"),
    ],
)
def test_gpus_of_a_python(changes: dict[str, Any], level: str, found: str) -> None:
    check = checks.check_host(answered(**changes), configured("dgxa100"))
    assert (check.level, found in check.found) == (level, True), check


def test_launcher_and_ranks_start_with_the_given_python() -> None:
    job = training_job(configured("cpu"), Path("/data"), Path("/out"), {}, 2)
    caller, python = {"PATH": "/usr/bin", "PYTHONPATH": "/apps/site"}, Path("/apps/bin/python3.12")
    given, default = (renderers.host(job, python, caller, is_user_python=is_given) for is_given in (True, False))
    assert given.argv[:3] == (str(python), "-m", "torch.distributed.run") and default.argv[0] == "torchrun"
    facts = (given.argv[given.argv.index("--no-python") + 1], given.environment["PYTHONPATH"])
    assert facts == (str(python), f"{paths.ROOT}:/apps/site") and default.environment["PYTHONPATH"] == str(paths.ROOT)


def test_preparation_needs_packages_besides_the_framework() -> None:
    (check,) = checks.check_preparation(answered(packages={"torch": "2.9", "Pillow": "11", "scipy": "1"}), CHOICE)
    assert check.level == "FAIL" and "-m pip --python /apps/bin/python install --no-deps -r" in check.hint
    assert "has no joblib, mlperf-logging, scikit-learn, threadpoolctl, which" in check.found
    assert checks.check_preparation(answered(packages=PACKAGES), CHOICE) == []


@pytest.mark.parametrize(
    ("name", "mpirun", "needed", "level", "found"),
    [
        ("mpi_alone", True, "", "OK", "mpi: controllers MPI; operations NCCL, MPI"),
        ("mxnet", True, "", "WARN", "no NCCL"),
        ("mpi_alone", False, "", "FAIL", "built with controllers MPI; operations NCCL, MPI, and no mpirun on PATH"),
        ("neither", True, "", "FAIL", "controllers none; operations none (expected: Gloo, or MPI with mpirun)"),
        ("mpi_alone", True, "Gloo", "FAIL", "(expected: Gloo)"),
    ],
)
def test_controllers_of_horovod(name: str, mpirun: bool, needed: str, level: str, found: str) -> None:
    target = answered(mpirun=mpirun, check_build=check_build(name), horovod=1, packages={"horovod": "0.28.1"})
    (check,) = checks.check_horovod(target, resolved("resnet", "dgxa100", "v0.7", 8, nodes=1), needed)
    assert (check.level, found in check.found, check.hint != "") == (level, True, level != "OK"), check


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which("mpirun") is None,
    reason="NOTHING WAS TRAINED WITH MPIRUN: apt-get install openmpi-bin libopenmpi-dev",
)
def test_ranks_start_with_mpirun_if_horovod_has_no_gloo(
    encore: Encore, mxnet_python: Path, few_digits: Path, study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cached build report says that this Horovod has no Gloo.
    horovod = next(mxnet_python.parent.parent.glob("lib/python3*/site-packages/horovod"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runtimes.cache_build(mxnet_python, horovod.stat().st_mtime_ns, check_build("mpi_alone"))
    options = ("--python", str(mxnet_python), "--env", "OMPI_MCA_mpi_yield_when_idle=1")
    folder = train(encore, "resnet", few_digits, tmp_path / "results", *options, ranks=2)
    assert not list((tmp_path / "cache").glob("*/environments"))
    passport = files.read_json(folder.parent / "run.json")
    command, python = passport["command"], passport["python"]
    assert (command[0], passport["environment"]["HOROVOD_CONTROLLER"]) == ("mpirun", "mpi")
    assert python["file"] == str(mxnet_python) and str(mxnet_python) in command and python["packages"]["mxnet"]
    assert len(list((folder / "ranks").glob("rank.*/stderr"))) == 2
    assert losses(folder / "metrics.jsonl") == losses(study.of_ranks(2) / "metrics.jsonl")


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, ("docker", Path("/apps/python"))), ({"python": Path("/mine/python")}, ("host", Path("/mine/python")))],
)
def test_python_option_overrides_the_cluster_file(options: dict[str, Any], expected: tuple[str, Path]) -> None:
    cluster = Cluster(runtime="docker", python={"pytorch": Path("/apps/python")})
    assert planning.choose_python(planning.Request(name=CHOICE.name, gpus=2, **options), cluster, CHOICE) == expected
    request = planning.Request(name=CHOICE.name, gpus=2, python=Path("/mine/python"), runtime="podman")
    with pytest.raises(EncoreError, match="--python with --runtime podman"):
        planning.choose_python(request, Cluster(), CHOICE)
