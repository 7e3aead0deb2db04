"""A Python of the user's for the host runtime: what is asked of it, what is refused, and how ranks start in it."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from encore import catalogue, paths
from encore.configuration import Configuration, resolve
from encore.containers import checks, renderers, runtimes
from encore.containers.runtimes import Target
from encore.job import training_job
from encore.machine import pythons
from encore.machine.preflight import Check
from encore.run import planning
from encore.slurm.cluster import Cluster
from tests.conftest import Encore, Study, losses
from tests.machine.machines import PACKAGES, answered
from tests.trainings import train

CHOICE = catalogue.choose("resnet-pytorch")


def configured(system: str, ranks: int = 2) -> Configuration:
    return resolve(CHOICE, catalogue.find_system(CHOICE, system, "v0.7"), 1, ranks, [])


def script(folder: Path, text: str) -> Path:
    file = folder / "python"
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755 if text else 0o644)
    return file


def checked(python: Path, system: str = "cpu") -> Check:
    target = runtimes.asked(Target(python=python), CHOICE, {})
    return checks.check_host(target, configured(system))


def test_a_python_with_the_framework_serves_the_cpu_and_is_refused_for_gpus(pytorch_python: Path) -> None:
    target = runtimes.asked(Target(python=pytorch_python), CHOICE, {})
    noted = target.python_json() or {}
    assert (noted["problems"], noted["file"], "torch" in noted["packages"]) == ({}, str(pytorch_python), True)
    taken, refused = (checks.check_host(target, configured(system)) for system in ("cpu", "dgxa100"))
    assert (taken.level, refused.level, "built for CPUs" in refused.found) == ("OK", "FAIL", True)


def test_a_python_without_the_framework_is_refused_with_what_it_lacks() -> None:
    check = checked(Path(sys.executable))
    assert check.level == "FAIL" and f"{sys.executable} -m pip --python {sys.executable} install" in check.hint
    assert "cannot import nvidia.dali.plugin.pytorch (ModuleNotFoundError" in check.found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "no Python"),
        ("", "is not executable"),
        ("#!/bin/sh\necho hello\n", "is not a Python that runs: hello"),
        ("#!/bin/sh\necho 'SyntaxError: f' >&2; exit 1\n", "is not a Python that runs: SyntaxError: f"),
        ('#!/bin/sh\necho \'ENCORE FACTS {"python": "3.7.4"}\'\n', "is Python 3.7.4"),
        ("#!/no/such/interpreter\n", "does not run"),
    ],
)
def test_what_is_no_python_is_refused(tmp_path: Path, text: str | None, found: str) -> None:
    check = checked(tmp_path / "python" if text is None else script(tmp_path, text))
    assert (check.level, found in check.found, "Python 3.8 or later" in check.found) == ("FAIL", True, True), check
    assert "--python" in check.hint


@pytest.mark.parametrize(
    ("changes", "level", "found"),
    [
        ({}, "OK", "PyTorch with CUDA 12.4"),
        ({"gpus": 1}, "FAIL", "sees 1 GPUs, 2 wanted"),
        ({"cuda": ""}, "FAIL", "built for CPUs"),
        ({"problems": {"torch": "OSError: libcudart.so.12"}}, "FAIL", "cannot import torch (OSError: libcudart"),
    ],
)
def test_gpus_are_asked_of_the_python_itself(changes: dict[str, Any], level: str, found: str) -> None:
    check = checks.check_host(answered(**changes), configured("dgxa100"))
    assert (check.level, found in check.found) == (level, True), check


def test_ranks_and_launcher_are_started_by_the_file(tmp_path: Path) -> None:
    job = training_job(configured("cpu"), Path("/data"), Path("/out"), {}, 2)
    caller, python = {"PATH": "/usr/bin", "PYTHONPATH": "/apps/site"}, Path("/apps/bin/python3.12")
    given, own = (renderers.host(job, python, caller, given=each) for each in (True, False))
    assert given.argv[:3] == (str(python), "-m", "torch.distributed.run") and own.argv[0] == "torchrun"
    assert given.argv[given.argv.index("--no-python") + 1] == str(python)
    search = [each.environment["PYTHONPATH"] for each in (given, own)]
    assert search == [f"{paths.ROOT}:/apps/site", str(paths.ROOT)]


def test_the_small_set_needs_packages_that_a_framework_does_not_bring() -> None:
    (check,) = checks.check_preparation(answered(packages={"torch": "2.9", "Pillow": "11", "scipy": "1"}), CHOICE)
    assert check.level == "FAIL" and "-m pip --python /apps/bin/python install --no-deps -r" in check.hint
    assert "has no joblib, mlperf-logging, scikit-learn, threadpoolctl, by which" in check.found
    assert checks.check_preparation(answered(packages=PACKAGES), CHOICE) == []


MXNET = catalogue.choose("resnet")


def on_horovod(name: str, mpirun: bool, needed: str = "") -> list[Check]:
    table = (paths.ROOT / "tests" / "samples" / "horovod" / f"{name}.txt").read_text(encoding="utf-8")
    resolved = resolve(MXNET, catalogue.find_system(MXNET, "dgxa100", "v0.7"), 1, 8, [])
    target = answered(mpirun=mpirun, check_build=table, horovod=1, packages={"horovod": "0.28.1"})
    return checks.check_horovod(target, resolved, needed)


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
def test_a_horovod_by_which_ranks_cannot_meet_is_refused(
    name: str, mpirun: bool, needed: str, level: str, found: str
) -> None:
    (check,) = on_horovod(name, mpirun, needed)
    assert (check.level, found in check.found) == (level, True), check
    assert check.hint or level == "OK"


def test_our_own_environments_are_not_asked() -> None:
    assert checks.check_horovod(Target(), resolve(MXNET, catalogue.find_system(MXNET, "cpu", None), 1, 2, [])) == []
    assert checks.check_horovod(answered(), configured("cpu")) == []


def test_two_ranks_train_by_mpirun_in_a_python_without_gloo(
    encore: Encore, mxnet_python: Path, few_digits: Path, study: Study, tmp_path: Path
) -> None:
    # The build that it answered is what is kept of it; here the kept answer has no Gloo
    if shutil.which("mpirun") is None:
        pytest.skip("NOTHING WAS TRAINED BY MPIRUN: apt-get install openmpi-bin libopenmpi-dev")
    horovod = next(mxnet_python.parent.parent.glob("lib/python3*/site-packages/horovod"))
    table = (paths.ROOT / "tests" / "samples" / "horovod" / "mpi_alone.txt").read_text(encoding="utf-8")
    cache = tmp_path / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        runtimes.keep_build(mxnet_python, horovod.stat().st_mtime_ns, table)
        quiet = ("--env", "OMPI_MCA_mpi_yield_when_idle=1")
        by = ("--python", str(mxnet_python))
        folder = train(encore, "resnet", few_digits, tmp_path / "results", *by, *quiet, ranks=2)
    assert not list(cache.glob("*/environments"))
    passport = json.loads((folder.parent / "run.json").read_text(encoding="utf-8"))
    by, python = passport["command"], passport["python"]
    assert (by[0], passport["environment"]["HOROVOD_CONTROLLER"], python["file"]) == (
        "mpirun",
        "mpi",
        str(mxnet_python),
    )
    assert str(mxnet_python) in by and python["packages"]["mxnet"]
    assert len(list((folder / "ranks").glob("rank.*/stderr"))) == 2
    assert losses(folder / "metrics.jsonl") == losses(study.of_ranks(2) / "metrics.jsonl")


def request(**given: Any) -> planning.Request:
    return planning.Request(name=CHOICE.name, gpus=2, **given)


def test_the_command_line_comes_before_the_cluster_file() -> None:
    cluster = Cluster(runtime="docker", python={"pytorch": Path("/apps/python")})
    assert planning.choose_python(request(), cluster, CHOICE) == ("docker", Path("/apps/python"))
    named = planning.choose_python(request(python=Path("/mine/python")), cluster, CHOICE)
    assert named == ("host", Path("/mine/python"))
    with pytest.raises(planning.EncoreError, match="--python with --runtime podman"):
        planning.choose_python(request(python=Path("/mine/python"), runtime="podman"), cluster, CHOICE)


def test_an_answer_is_found_between_other_output() -> None:
    text = f'NVIDIA Release 24.06\n{pythons.python_facts.MARK}{{"python": "3.10.12", "gpus": 2}}\nbye\n'
    facts = pythons.parse(text)
    assert facts is not None and (facts.python, facts.gpus, facts.problems) == ("3.10.12", 2, {})
    assert pythons.parse("NVIDIA Release 24.06\n") is None
