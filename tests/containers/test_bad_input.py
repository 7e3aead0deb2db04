"""What users of containers get wrong: one line that names it, and one with the hint.

Fake engines print what the real ones print in each trouble; what they print was taken from Docker 20.10 and 28
and Podman 4.3 where it could be provoked here, and from their sources' messages for GPUs.
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
from typer.testing import CliRunner

from encore import catalogue, configuration, environment, paths
from encore.cli.app import app, main
from encore.containers import building, checks, engines, images, runtimes
from encore.containers.engines import Engine
from encore.errors import EncoreError
from encore.machine import python_facts
from encore.run import planning
from tests.machine import machines

Ran = subprocess.CompletedProcess[str]
FakeEngine = Callable[..., None]

INFO = {"docker": {"SecurityOptions": [], "Runtimes": {"runc": {}}}, "podman": {"host": {"security": {}}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # A folder for fake engines, which is all that PATH holds besides the system's tools
    path = tmp_path / "bin"
    path.mkdir()
    return path


@pytest.fixture
def engine(folder: Path) -> FakeEngine:
    # Makes a fake engine: what it prints for a subcommand, on which stream, and its exit code

    def make(name: str, answers: dict[str, tuple[str, str, int]]) -> None:
        known = {"info": (json.dumps(INFO.get(name, {})), "", 0), **answers}
        (folder / f"{name}.json").write_text(json.dumps(known), encoding="utf-8")
        script = folder / name
        script.write_text(
            f"#!{sys.executable}\n"
            "import json, sys\n"
            f"known = json.load(open({str(folder / name) + '.json'!r}))\n"
            "words = ' '.join(sys.argv[1:])\n"
            "answer = next((known[k] for k in known if words.startswith(k)), ['', '', 0])\n"
            "print(answer[0]); print(answer[1], file=sys.stderr); sys.exit(answer[2])\n",
            encoding="utf-8",
        )
        script.chmod(0o755)

    return make


@pytest.fixture
def run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    # Runs the command line with nothing but the fakes as engines
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.delenv("ENCORE_CLUSTER")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def call(*arguments: str, **variables: str) -> Ran:
        # Any engine of this machine is in the same folders as its other tools, so they are left out.
        for name, value in {"PATH": str(folder), "HOME": str(tmp_path), "COLUMNS": "200", **variables}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["encore", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ran((), int(ended.value.code or 0), *capsys.readouterr())

    return call


RUN = ("run", "resnet", "2", "--system", "cpu")
BUILD = ("images", "build", "resnet")
NO_IMAGE = ("[]", "Error: No such image: x", 1)
ITSELF = json.dumps({"ServerErrors": ["Cannot connect to the Docker daemon at unix:///var/run/docker.sock."]})
DENIED = "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock"
DOWN = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
NO_NUMBERS = 'cannot find UID/GID for user anna: no subuid ranges found for user "anna" in /etc/subuid'
NOT_PULLED = "nvcr.io/nvidia/mxnet:24.06-py3 is not pulled"
FULL = "write /var/lib/docker/tmp/GetImageBlob123: no space left on device"
OFFLINE = "Get https://nvcr.io/v2/: dial tcp: lookup nvcr.io: no such host"
TROUBLE = [
    # The engine that is there, what it answers, the command, and the two lines that are printed.
    ("", {}, (*RUN, "--runtime", "docker"), "docker: no docker on PATH", "apt-get install docker.io"),
    ("", {}, BUILD, "no docker on PATH", "--runtime podman or host"),
    ("docker", {"info": ("", DENIED, 1)}, (*RUN, "--runtime", "docker"), "no permission on", "--groups docker"),
    ("docker", {"info": ("", DOWN, 1)}, BUILD, "the engine does not run", "systemctl start docker"),
    ("docker", {"info": (ITSELF, "", 0)}, (*RUN, "--runtime", "docker"), "the engine does not run", "start docker"),
    ("podman", {"info": ("", NO_NUMBERS, 1)}, BUILD, "no numbers for rootless containers", "usermod --add-subuids"),
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
]


@pytest.mark.parametrize(("name", "answers", "command", "found", "hint"), TROUBLE)
def test_trouble_is_named_with_a_hint(
    engine: FakeEngine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, answers: dict[str, tuple[str, str, int]], command: tuple[str, ...], found: str, hint: str,
) -> None:  # fmt: skip
    if name:
        engine(name, answers)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("ENCORE_CLUSTER")
    results = ("--results", str(tmp_path / "r")) if command[0] == "run" else ()
    error = CliRunner().invoke(app, [*command, *results]).exception
    assert isinstance(error, EncoreError)
    assert (found in error.found, hint in error.hint) == (True, True), (error.found, error.hint)
    assert not (tmp_path / "r").exists()


def test_digest_changed(
    engine: FakeEngine, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = tmp_path / "images.lock"
    images.record("nvcr.io/nvidia/mxnet:24.06-py3", "sha256:aa", lock)
    monkeypatch.setattr(images.hold_to_lock, "__defaults__", (lock,))
    facts = [{"Id": "sha256:1", "RepoDigests": ["nvcr.io/nvidia/mxnet@sha256:bb"], "Config": {}}]
    engine("docker", {"image inspect": (json.dumps(facts), "", 0)})
    used = Engine(name="docker", program=str(tmp_path / "bin" / "docker"))
    with pytest.raises(EncoreError, match=r"(?s)another digest.*expected: sha256:aa.*encore images build --accept"):
        building.pull(used, images.find_release("mxnet"), lambda line: None)


def test_little_space_is_reported_before_the_pull(tmp_path: Path) -> None:
    with pytest.raises(EncoreError, match=r"(?s)GiB free in.*docker system prune"):
        building.check_space(Engine(name="docker", program="docker", data=tmp_path), 1e9)


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_gpu_toolkit_missing(engine: FakeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    image = [{"Id": "sha256:0123456789abcdef0123", "Config": {"Labels": {}}}]
    engine(name, {"image inspect": (json.dumps(image), "", 0)})
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(engines, "_has_cdi", lambda: False)
    choice = catalogue.choose("resnet")
    resolved = configuration.resolve(choice, catalogue.find_system(choice, "dgxa100", None), 1, 1, [])
    machine = machines.machine("NVIDIA A100-SXM4-40GB", memory_gib=40.0, capability="8.0")
    target = runtimes.choose(name, choice, machine, "gpu")
    failed = [c for c in checks.check(target, resolved, machine, []) if c.level == "FAIL"]
    assert [check.name for check in failed] == ["GPU toolkit"] and "NVIDIA Container Toolkit" in failed[0].hint


def test_gpus_that_the_engine_refuses_at_the_start() -> None:
    message = 'docker: Error: could not select device driver "" with capabilities: [[gpu]].'
    assert engines.explain(message, "docker").found == "docker: the engine cannot hand GPUs to containers"


def test_folder_that_engines_would_take_apart() -> None:
    found = checks.check_folders([Path("/data/a:b"), Path("/data/a b"), Path("/data/a,b")])
    assert [f"{check.level} {check.found.split()[0]}" for check in found] == ["FAIL /data/a:b", "FAIL /data/a,b"]


def test_auto_takes_the_engine_that_has_the_image(engine: FakeEngine, run: Callable[..., Ran], tmp_path: Path) -> None:
    image = [{"Id": "sha256:0123456789abcdef0123", "Config": {"Labels": {}}}]
    engine("docker", {"image inspect": NO_IMAGE})
    done = run(*RUN, "--dry-run", PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert "host: no container engine has an image of resnet" in done.stdout, done.stderr
    engine("podman", {"image inspect": (json.dumps(image), "", 0)})
    done = run(*RUN, "--dry-run")
    assert "podman: podman has the image" in done.stdout and "podman run --rm" in done.stdout, done.stderr


def answer(build: str, **changes: object) -> str:
    # What the program that is asked of an image prints in it
    table = (paths.ROOT / "tests" / "samples" / "horovod" / f"{build}.txt").read_text(encoding="utf-8")
    facts = {"python": "3.10.12", "problems": {}, "packages": {"horovod": "0.28.1"}, "cuda": "12.4", "gpus": 8}
    return "== NVIDIA MXNet ==\n" + python_facts.MARK + json.dumps(
        {**facts, "mpirun": True, "horovod": 1, "check_build": table, **changes}
    )  # fmt: skip


def test_an_image_is_asked_once_and_its_ranks_meet_by_what_it_has(
    engine: FakeEngine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    image = json.dumps([{"Id": "sha256:0123", "Config": {"Labels": {}}}])
    engine("docker", {"image inspect": (image, "", 0), "run": (answer("mpi_alone"), "", 0)})
    request = planning.Request(name="resnet", gpus=2, system="cpu", runtime="docker", data=tmp_path)
    unasked = planning.asked(planning.make_plan(request), start=False)
    assert unasked.launch("/out").name == "horovodrun"
    assert "Gloo is assumed" in {each.name: each.found for each in planning.checks(unasked)}["Horovod"]
    plan = planning.asked(unasked)
    assert plan.launch("/out").name == "mpirun"
    assert {each.name: each.level for each in planning.checks(plan)}["Horovod"] == "OK"
    engine("docker", {"image inspect": (image, "", 0), "run": ("", "the engine was asked again", 1)})
    assert planning.asked(planning.make_plan(request), start=False).target.facts == plan.target.facts
    again = json.dumps([{"Id": "sha256:4567", "Config": {"Labels": {}}}])
    engine("docker", {"image inspect": (again, "", 0), "run": (answer("mxnet"), "", 0)})
    assert planning.asked(planning.make_plan(request)).launch("/out").name == "horovodrun"


@pytest.mark.parametrize(
    ("printed", "name", "found"),
    [
        (answer("neither"), "Horovod", "was built with controllers none; operations none"),
        (answer("mpi_alone", mpirun=False), "Horovod", "no mpirun on PATH"),
        (answer("mxnet", problems={"horovod.mxnet": "ImportError: x"}), "image", "cannot import horovod.mxnet (Imp"),
    ],
)
def test_an_image_without_what_ranks_need_is_refused_before_training(
    engine: FakeEngine, run: Callable[..., Ran], tmp_path: Path, printed: str, name: str, found: str
) -> None:
    image = json.dumps([{"Id": "sha256:0123456789abcdef0123", "Config": {"Labels": {}}}])
    engine("docker", {"image inspect": (image, "", 0), "run": (printed, "", 0)})
    done = run(*RUN, "--runtime", "docker", "--results", str(tmp_path / "r"), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert re.fullmatch(rf"error: {name}: .*{re.escape(found)}.*\n  hint: .*\n", done.stderr), done.stderr
    assert (done.returncode, (tmp_path / "r").exists()) == (2, False)


def test_data_can_be_prepared_in_a_container(run: Callable[..., Ran], tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare = ("data", "prepare", "resnet", str(tmp_path), "-o", str(out))
    done = run(*prepare, "--runtime", "docker", "--dry-run")
    mounts = re.findall("type=bind,source=(\\S+),target=(\\S+)", done.stdout)
    assert mounts == [(f"{out}", f"{out}"), (f"{tmp_path}", f"{tmp_path},readonly")], done.stderr
    refused = run(*prepare, "--runtime", "docker")
    assert re.fullmatch(r"error: no docker on PATH\n  hint: .*apt-get install docker\.io.*\n", refused.stderr)
    assert (refused.returncode, out.exists()) == (2, False)


def test_names_of_containers_differ_between_results_folders() -> None:
    run = "20261120T101500Z-resnet-mxnet-cpu/experiment_0"
    first, second = (runtimes.container_name(Path(results, run)) for results in ("/a", "/b"))
    assert first != second and first.startswith("encore-20261120T101500Z-resnet-mxnet-cpu-0-")


def test_packages_of_an_image_are_pythons_and_the_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "system-packages.txt"
    manifest.write_text("libnccl2=2.21.5-1+cuda12.4\nutil=1:2.3\npytest=0.1-2\n", encoding="utf-8")
    monkeypatch.setattr(python_facts, "SYSTEM_PACKAGES", manifest)
    found = python_facts.packages()
    versions = (found["libnccl2"], found["util"], found["pytest"], environment.software("mxnet", found)["nccl_version"])
    assert versions == ("2.21.5", "2.3", pytest.__version__, "2.21.5")
