"""Errors of container engines: one line with the problem and one with the hint.

The fake engines print messages of Docker 20.10 and 28 and of Podman 4.3; those about GPUs are from their sources.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from encore import catalogue, environment
from encore.cli.app import main
from encore.containers import building, checks, engines, images, runtimes
from encore.errors import EncoreError
from encore.machine import python_probe
from encore.run import planning
from tests.command_line import run_encore
from tests.machine import machines
from tests.machine.machines import write_program
from tests.results.result_logs import write_files
from tests.trainings import resolved

Answers = dict[str, tuple[str, str, int]]  # Output, error output and exit code of each subcommand
Run = Callable[..., subprocess.CompletedProcess[str]]

INFO = {"docker": {"SecurityOptions": [], "Runtimes": {"runc": {}}}, "podman": {"host": {"security": {}}}}
PROGRAM = """
import json, sys
answers, words = json.load(open(sys.argv[1])), " ".join(sys.argv[2:])
output, errors, code = next((answers[name] for name in answers if words.startswith(name)), ("", "", 0))
print(output)
print(errors, file=sys.stderr)
sys.exit(code)
"""
IMAGE = (json.dumps([{"Id": "sha256:0123456789abcdef0123", "Config": {"Labels": {}}}]), "", 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The only folder on PATH
    path = tmp_path / "bin"
    path.mkdir()
    for name, value in {"PATH": path, "HOME": tmp_path, "XDG_CACHE_HOME": tmp_path / "cache", "COLUMNS": 200}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("ENCORE_CLUSTER")
    return path


def fake_engine(folder: Path, name: str, answers: Answers) -> None:
    information = (json.dumps(INFO.get(name, {})), "", 0)
    file = write_files(folder, {f"{name}.json": {"info": information, **answers}}) / f"{name}.json"
    write_program(folder / name, f"exec {sys.executable} -c '{PROGRAM}' {file} \"$@\"\n")


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    # Runs the command line with the fake engines only
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["encore", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        return subprocess.CompletedProcess((), int(caught.value.code or 0), *capsys.readouterr())

    return call


RUN = ("run", "resnet", "2", "--system", "cpu")
BUILD = ("images", "build", "resnet")
PREPARE = ("data", "prepare", "resnet", "/tmp", "-o", "/nonexistent/out", "--runtime", "docker")
NO_IMAGE = ("[]", "Error: No such image: x", 1)
NO_SERVER = json.dumps({"ServerErrors": ["Cannot connect to the Docker daemon at unix:///var/run/docker.sock."]})
DENIED = "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock"
DOWN = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
NO_SUBUIDS = 'cannot find UID/GID for user anna: no subuid ranges found for user "anna" in /etc/subuid'
NOT_PULLED = "nvcr.io/nvidia/mxnet:24.06-py3 could not be pulled"
FULL = "write /var/lib/docker/tmp/GetImageBlob123: no space left on device"
OFFLINE = "Get https://nvcr.io/v2/: dial tcp: lookup nvcr.io: no such host"
CASES = [
    # Engine, its answers, the command, and parts of the error and of the hint
    ("", {}, (*RUN, "--runtime", "docker"), "docker: no docker on PATH", "apt-get install docker.io"),
    ("", {}, BUILD, "no docker on PATH", "--runtime podman or host"),
    ("", {}, PREPARE, "no docker on PATH", "apt-get install docker.io"),
    ("docker", {"info": ("", DENIED, 1)}, (*RUN, "--runtime", "docker"), "no permission on", "--groups docker"),
    ("docker", {"info": ("", DOWN, 1)}, BUILD, "the engine is not running", "systemctl start docker"),
    (
        "docker",
        {"info": (NO_SERVER, "", 0)},
        (*RUN, "--runtime", "docker"),
        "the engine is not running",
        "start docker",
    ),
    (
        "podman",
        {"info": ("", NO_SUBUIDS, 1)},
        BUILD,
        "no subordinate IDs for rootless containers",
        "usermod --add-subuids",
    ),
    ("docker", {"image inspect": NO_IMAGE}, (*RUN, "--runtime", "docker"), "docker has no image", "make build-resnet"),
    (
        "podman",
        {"image inspect": ("[]", "Error: localhost/encore/resnet:latest: image not known", 125)},
        (*RUN, "--runtime", "podman"),
        "podman has no image localhost/encore/resnet",
        "make build-resnet ENGINE=podman",
    ),
    ("apptainer", {}, (*RUN, "--runtime", "apptainer"), "no image file", "images convert resnet --runtime apptainer"),
    ("docker", {"image inspect": NO_IMAGE}, (*BUILD, "--base", "standin"), "the CPU base", "make standin"),
    ("docker", {"image inspect": NO_IMAGE, "pull": ("", OFFLINE, 1)}, BUILD, NOT_PULLED, "check network and proxy"),
    (
        "docker",
        {"image inspect": NO_IMAGE, "pull": ("", "unauthorized: authentication required", 1)},
        BUILD,
        NOT_PULLED,
        "docker login nvcr.io",
    ),
    ("docker", {"image inspect": NO_IMAGE, "pull": ("", FULL, 1)}, BUILD, "disk is full", "docker system prune"),
    ("docker", {}, (*RUN, "--image=--privileged"), "'--privileged' is not an image", "--image NAME"),
    ("docker", {}, (*RUN, "--image", "a\nb", "--runtime", "docker"), r"'a\nb' is not an image", "--image NAME"),
]


@pytest.mark.parametrize(("name", "answers", "command", "message", "hint"), CASES)
def test_engine_errors_have_a_hint(
    folder: Path,
    tmp_path: Path,
    name: str,
    answers: Answers,
    command: tuple[str, ...],
    message: str,
    hint: str,
) -> None:
    if name:
        fake_engine(folder, name, answers)
    results = ("--results", str(tmp_path / "r")) if command[0] == "run" else ()
    error = run_encore(*command, *results).exception
    assert isinstance(error, EncoreError) and message in error.found and hint in error.hint, error
    assert not (tmp_path / "r").exists()


def test_changed_digest_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lock = tmp_path / "images.lock"
    images.record("nvcr.io/nvidia/mxnet:24.06-py3", "sha256:aa", lock)
    monkeypatch.setattr(images.check_lock, "__defaults__", (lock,))
    entry = [{"Id": "sha256:1", "RepoDigests": ["nvcr.io/nvidia/mxnet@sha256:bb"], "Config": {}}]
    fake_engine(folder, "docker", {"image inspect": (json.dumps(entry), "", 0)})
    with pytest.raises(EncoreError, match=r"(?s)different digest.*expected: sha256:aa.*encore images build --accept"):
        building.pull(engines.Engine(name="docker", program="docker"), images.find_release("mxnet"), lambda line: None)


def test_small_disk_is_reported_before_the_pull(tmp_path: Path) -> None:
    with pytest.raises(EncoreError, match=r"(?s)GiB free in.*docker system prune"):
        building.check_space(engines.Engine(name="docker", program="docker", data=tmp_path), 1e9)


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_missing_gpu_toolkit_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake_engine(folder, name, {"image inspect": IMAGE})
    monkeypatch.setattr(engines, "_has_cdi", lambda: False)
    machine = machines.machine("NVIDIA A100-SXM4-40GB", memory_gib=40.0, capability="8.0")
    target = runtimes.choose(name, catalogue.choose("resnet"), machine, "gpu")
    results = checks.check(target, resolved("resnet", "dgxa100", None, 1, nodes=1), machine, [])
    hints = {check.name: check.hint for check in results if check.level == "FAIL"}
    assert hints == {"GPU toolkit": engines.NO_TOOLKIT}
    message = 'docker: Error: could not select device driver "" with capabilities: [[gpu]].'
    assert engines.explain(message, "docker").found == "docker: the engine cannot pass GPUs to containers"


def test_auto_selects_the_engine_that_has_the_image(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine(folder, "docker", {"image inspect": NO_IMAGE})
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}/usr/bin")
        assert "host: no container engine has an image of resnet" in run(*RUN, "--dry-run").stdout
    fake_engine(folder, "podman", {"image inspect": IMAGE})
    assert re.search("(?s)podman: podman has the image.*podman run --rm", run(*RUN, "--dry-run").stdout)


def answer(build: str, **changes: object) -> tuple[str, str, int]:
    # Output of the program that reports the versions in an image
    facts = {"python": "3.10.12", "problems": {}, "packages": {"horovod": "0.28.1"}, "cuda": "12.4", "gpus": 8}
    content = {**facts, "mpirun": True, "horovod": 1, "check_build": machines.check_build(build), **changes}
    return f"== NVIDIA MXNet ==\n{python_probe.MARK}{json.dumps(content)}", "", 0


def test_versions_in_an_image_are_cached_and_select_the_launcher(folder: Path, tmp_path: Path) -> None:
    fake_engine(folder, "docker", {"image inspect": IMAGE, "run": answer("mpi_alone")})
    request = planning.Request(name="resnet", gpus=2, system="cpu", runtime="docker", data=tmp_path)
    unknown = planning.query_python(planning.make_plan(request), start=False)
    plan = planning.query_python(unknown)
    assert [p.launch("/out").name for p in (unknown, plan)] == ["horovodrun", "mpirun"]
    horovod, known = ({check.name: check for check in planning.checks(p)}["Horovod"] for p in (unknown, plan))
    assert ("assuming Gloo" in horovod.found, known.level) == (True, "OK")
    fake_engine(folder, "docker", {"image inspect": IMAGE, "run": ("", "the image was run again", 1)})
    assert planning.query_python(planning.make_plan(request), start=False).target.python_info == plan.target.python_info
    other = json.dumps([{"Id": "sha256:4567", "Config": {"Labels": {}}}])
    fake_engine(folder, "docker", {"image inspect": (other, "", 0), "run": answer("mxnet")})
    assert planning.query_python(planning.make_plan(request)).launch("/out").name == "horovodrun"


@pytest.mark.parametrize(
    ("answers", "name", "message"),
    [
        (answer("neither"), "Horovod", "was built with controllers none; operations none"),
        (answer("mpi_alone", mpirun=False), "Horovod", "no mpirun on PATH"),
        (answer("mxnet", problems={"horovod.mxnet": "ImportError: x"}), "image", "cannot import horovod.mxnet (Imp"),
    ],
)
def test_unsuitable_image_is_refused_before_training(
    folder: Path, run: Run, tmp_path: Path, answers: tuple[str, str, int], name: str, message: str
) -> None:
    fake_engine(folder, "docker", {"image inspect": IMAGE, "run": answers})
    result = run(*RUN, "--runtime", "docker", "--results", str(tmp_path / "r"))
    assert re.fullmatch(rf"error: {name}: .*{re.escape(message)}.*\n  hint: .*\n", result.stderr), result.stderr
    assert (result.returncode, (tmp_path / "r").exists()) == (2, False)


def test_packages_of_an_image_are_those_of_python_and_of_the_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_files(tmp_path, {"packages.txt": "libnccl2=2.21.5-1+cuda12.4\nutil=1:2.3\npytest=0.1-2\n"})
    monkeypatch.setattr(python_probe, "SYSTEM_PACKAGES", folder / "packages.txt")
    packages = python_probe.packages()
    assert [packages[name] for name in ("libnccl2", "util", "pytest")] == ["2.21.5", "2.3", pytest.__version__]
    assert environment.software("mxnet", packages)["nccl_version"] == "2.21.5"
