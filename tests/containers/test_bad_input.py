"""What users of containers get wrong: one line that names it, and one with the remedy.

Fake engines print what the real ones print in each trouble; what they print was taken from Docker 20.10 and 28
and Podman 4.3 where it could be provoked here, and from their sources' messages for GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from encore import catalogue, environment, paths
from encore.containers import checks, runtimes
from encore.containers.renderers.container import Container
from encore.machine import node, python_facts
from encore.machine.node import parse_nvidia_smi
from encore.run import planning

Ran = subprocess.CompletedProcess[str]
FakeEngine = Callable[..., None]

INFO = {"docker": {"SecurityOptions": [], "Runtimes": {"runc": {}}}, "podman": {"host": {"security": {}}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for fake engines, which is all that PATH holds besides the system's tools."""
    path = tmp_path / "bin"
    path.mkdir()
    return path


@pytest.fixture
def engine(folder: Path) -> FakeEngine:
    """Makes a fake engine: what it prints for a subcommand, on which stream, and its exit code."""

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
def run(folder: Path, tmp_path: Path) -> Callable[..., Ran]:
    """Runs the command line with nothing but the fakes as engines."""

    def call(*arguments: str, **variables: str) -> Ran:
        # Any engine of this machine is in the same folders as its other tools, so they are left out.
        environment = {"PATH": str(folder), "HOME": str(tmp_path), "COLUMNS": "200", **variables}
        command = [sys.executable, "-m", "encore.cli.app", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=paths.ROOT, env=environment, check=False)

    return call


def fails_with(done: Ran, found: str, remedy: str) -> None:
    assert done.returncode in (1, 2), done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "  do this: "))]
    assert len(lines) == 2, done.stderr
    assert found in lines[0]
    assert remedy in lines[1]
    assert "Traceback" not in done.stderr


RUN = ("run", "resnet", "2", "--system", "cpu")


def test_no_engine(run: Callable[..., Ran], tmp_path: Path) -> None:
    done = run(*RUN, "--runtime", "docker", "--results", str(tmp_path / "r"))
    fails_with(done, "docker: no docker on PATH", "apt-get install docker.io")
    fails_with(run("images", "build", "resnet"), "no docker on PATH", "--runtime podman or host")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("name", "message", "found", "remedy"),
    [
        (
            "docker",
            "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock",
            "no permission on the engine's socket",
            "usermod --append --groups docker",
        ),
        (
            "docker",
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
            "the engine does not run",
            "systemctl start docker",
        ),
        (
            "podman",
            'cannot find UID/GID for user anna: no subuid ranges found for user "anna" in /etc/subuid',
            "no numbers for rootless containers",
            "usermod --add-subuids",
        ),
    ],
)
def test_engine_that_does_not_answer(
    engine: FakeEngine, run: Callable[..., Ran], name: str, message: str, found: str, remedy: str
) -> None:
    engine(name, {"info": ("", message, 1)})
    fails_with(run(*RUN, "--runtime", name), found, remedy)
    fails_with(run("images", "build", "resnet"), found, remedy)


def test_docker_that_answers_for_itself_alone(engine: FakeEngine, run: Callable[..., Ran]) -> None:
    facts = {"ServerErrors": ["Cannot connect to the Docker daemon at unix:///var/run/docker.sock."]}
    engine("docker", {"info": (json.dumps(facts), "", 0)})
    fails_with(run(*RUN, "--runtime", "docker"), "the engine does not run", "systemctl start docker")


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_image_not_built(engine: FakeEngine, run: Callable[..., Ran], name: str) -> None:
    engine(name, {"image inspect": ("[]", "Error: localhost/encore/resnet:latest: image not known", 125)})
    fails_with(run(*RUN, "--runtime", name), f"{name} has no image localhost/encore/resnet", "make build-resnet")


def test_image_file_not_made(engine: FakeEngine, run: Callable[..., Ran]) -> None:
    engine("apptainer", {})
    done = run(*RUN, "--runtime", "apptainer")
    fails_with(done, "no image file", "encore images convert resnet --to apptainer")


def test_standin_not_built(engine: FakeEngine, run: Callable[..., Ran]) -> None:
    engine("docker", {"image inspect": ("[]", "Error: No such image: x", 1)})
    fails_with(run("images", "build", "resnet", "--base", "standin"), "the CPU base", "make standin")


def test_base_that_cannot_be_pulled(engine: FakeEngine, run: Callable[..., Ran]) -> None:
    missing = ("[]", "Error: No such image: x", 1)
    for message, remedy in (
        ("Get https://nvcr.io/v2/: dial tcp: lookup nvcr.io: no such host", "check network and proxy"),
        ("unauthorized: authentication required", "docker login nvcr.io"),
    ):
        engine("docker", {"image inspect": missing, "pull": ("", message, 1)})
        fails_with(run("images", "build", "resnet"), "nvcr.io/nvidia/mxnet:24.06-py3 is not pulled", remedy)


def test_digest_changed(
    engine: FakeEngine, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from encore.containers import building, images
    from encore.containers.engines import Engine
    from encore.errors import EncoreError

    lock = tmp_path / "images.lock"
    images.record("nvcr.io/nvidia/mxnet:24.06-py3", "sha256:aa", lock)
    monkeypatch.setattr(images.hold_to_lock, "__defaults__", (lock,))
    facts = [{"Id": "sha256:1", "RepoDigests": ["nvcr.io/nvidia/mxnet@sha256:bb"], "Config": {}}]
    engine("docker", {"image inspect": (json.dumps(facts), "", 0)})
    used = Engine(name="docker", program=str(tmp_path / "bin" / "docker"))
    with pytest.raises(EncoreError, match="another digest") as error:
        building.pull(used, images.find_release("mxnet"), lambda line: None)
    assert "sha256:aa" in error.value.expected
    assert "encore images pin --accept" in error.value.remedy


def test_no_space(engine: FakeEngine, run: Callable[..., Ran]) -> None:
    missing = ("[]", "Error: No such image: x", 1)
    full = ("", "write /var/lib/docker/tmp/GetImageBlob123: no space left on device", 1)
    engine("docker", {"image inspect": missing, "pull": full})
    fails_with(run("images", "build", "resnet"), "the engine's disk is full", "docker system prune")


def test_little_space_is_reported_before_the_pull(tmp_path: Path) -> None:
    from encore.containers import building
    from encore.containers.engines import Engine
    from encore.errors import EncoreError

    with pytest.raises(EncoreError, match="GiB free in") as error:
        building.check_space(Engine(name="docker", program="docker", data=tmp_path), 1e9)
    assert "docker system prune" in error.value.remedy


GPU_MACHINE = "0, NVIDIA A100-SXM4-40GB, 40960, 550.54.15, 8.0"


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_gpu_toolkit_missing(engine: FakeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from encore import configuration
    from encore.containers import engines

    image = [{"Id": "sha256:0123456789abcdef0123", "Config": {"Labels": {}}}]
    engine(name, {"image inspect": (json.dumps(image), "", 0)})
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(engines, "_has_cdi", lambda: False)
    choice = catalogue.choose("resnet")
    resolved = configuration.resolve(choice, catalogue.find_system(choice, "dgxa100", None), 1, 1, [])
    machine = node.Node(
        hostname="h",
        operating_system="os",
        kernel="k",
        cpu="cpu",
        sockets=1,
        cores=8,
        memory_gib=64.0,
        gpus=parse_nvidia_smi(GPU_MACHINE),
    )
    target = runtimes.choose(name, choice, machine, "gpu")
    failed = [c for c in checks.check(target, resolved, machine, []) if c.level == "FAIL"]
    assert [check.name for check in failed] == ["GPU toolkit"]
    assert "NVIDIA Container Toolkit" in failed[0].remedy


def test_gpus_that_the_engine_refuses_at_the_start() -> None:
    from encore.containers import engines

    message = 'docker: Error: could not select device driver "" with capabilities: [[gpu]].'
    error = engines.explain(message, "docker")
    assert error.found == "docker: the engine cannot hand GPUs to containers"


def test_unknown_runtime_and_engine(run: Callable[..., Ran]) -> None:
    done = run(*RUN, "--runtime", "dokcer")
    assert done.returncode == 2 and "did you mean 'docker'?" in done.stderr
    refused = run("images", "build", "resnet", "--engine", "enroot")
    assert refused.returncode == 2 and "enroot does not build images" in refused.stderr


def test_push_without_registry_or_image(engine: FakeEngine, run: Callable[..., Ran]) -> None:
    engine("docker", {"image inspect": ("[]", "Error: No such image: x", 1)})
    fails_with(run("images", "push", "resnet"), "no registry given", "REGISTRY=")
    done = run("images", "push", "resnet", "--registry", "registry.example/team")
    fails_with(done, "docker has no image", "make build-resnet")


def test_folder_that_engines_would_take_apart() -> None:
    folders = [Path("/data/a:b"), Path("/data/a b"), Path("/data/a,b")]
    found = checks.check_folders(folders)
    assert [check.found.split()[0] for check in found] == ["/data/a:b", "/data/a,b"]
    assert {check.level for check in found} == {"FAIL"}


def test_auto_is_host_where_no_image_is_built(engine: FakeEngine, run: Callable[..., Ran], tmp_path: Path) -> None:
    engine("docker", {"image inspect": ("[]", "Error: No such image: x", 1)})
    done = run(*RUN, "--dry-run", PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert "host: no container engine has an image of resnet" in done.stdout


def test_auto_takes_the_engine_that_has_the_image(engine: FakeEngine, run: Callable[..., Ran]) -> None:
    image = [{"Id": "sha256:0123456789abcdef0123", "Config": {"Labels": {}}}]
    engine("docker", {"image inspect": ("[]", "Error: No such image: x", 1)})
    engine("podman", {"image inspect": (json.dumps(image), "", 0)})
    done = run(*RUN, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "podman: podman has the image" in done.stdout
    assert "podman run --rm" in done.stdout


MANIFESTS = (
    "== NVIDIA MXNet ==\n\nmxnet==1.9.1\nhorovod==0.28.1\nnumpy==1.23.5\nnvidia-dali-cuda120==1.37.1\n"
    "libnccl2=2.21.5-1+cuda12.4\nopenssl=3.0.2-0ubuntu1\nutil=1:2.3\n"
)


def test_an_image_has_the_same_versions_as_an_environment_and_is_asked_once(
    engine: FakeEngine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mxnet_python: Path
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    image = json.dumps([{"Id": "sha256:0123", "Config": {"Labels": {}}}])
    engine("docker", {"image inspect": (image, "", 0), "run": (MANIFESTS, "", 0)})
    choice = catalogue.choose("resnet")
    target = runtimes.choose("docker", choice, node.this_node(), "cpu")
    inside = environment.software("mxnet", runtimes.packages(target))
    assert inside == {
        "mxnet_version": "1.9.1",
        "horovod_version": "0.28.1",
        "dali_version": "1.37.1",
        "nccl_version": "2.21.5",
        "numpy_version": "1.23.5",
    }
    assert inside.keys() == environment.software("mxnet", environment.packages(mxnet_python)).keys()
    (folder / "docker").unlink()
    assert environment.software("mxnet", runtimes.packages(target)) == inside


def answer(build: str, **changes: object) -> str:
    """Return what the program that is asked of an image prints in it."""
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
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"error: {name}: " in done.stderr
    assert found in done.stderr
    assert "  do this: " in done.stderr
    assert not (tmp_path / "r").exists()


def test_an_image_without_manifests_has_no_known_versions(
    engine: FakeEngine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    image = json.dumps([{"Id": "sha256:0123", "Config": {"Labels": {}}}])
    engine("docker", {"image inspect": (image, "", 0), "run": ("", "cat: no such file", 1)})
    target = runtimes.choose("docker", catalogue.choose("resnet"), node.this_node(), "cpu")
    versions = environment.software("mxnet", runtimes.packages(target))
    assert "mxnet_version" in versions and set(versions.values()) == {""}
    assert not (tmp_path / "cache").exists()


def test_dry_run_shows_the_command_without_any_engine(run: Callable[..., Ran]) -> None:
    for runtime in ("docker", "podman", "apptainer", "enroot"):
        done = run(*RUN, "--runtime", runtime, "--dry-run")
        assert done.returncode == 0, done.stderr
        assert f"{runtime} {'start' if runtime == 'enroot' else 'run'} " in done.stdout


def test_data_can_be_prepared_in_a_container(run: Callable[..., Ran], tmp_path: Path) -> None:
    prepare = ("data", "prepare", "resnet", "--from", str(tmp_path), "--to", str(tmp_path / "out"))
    done = run(*prepare, "--runtime", "docker", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"source={tmp_path},target={tmp_path},readonly" in done.stdout
    assert f"source={tmp_path / 'out'},target={tmp_path / 'out'} " in done.stdout
    fails_with(run(*prepare, "--runtime", "docker"), "no docker on PATH", "apt-get install docker.io")
    assert not (tmp_path / "out").exists()


def test_names_of_containers_differ_between_results_folders() -> None:
    first = runtimes.container_name(Path("/a/20261120T101500Z-resnet-mxnet-cpu/experiment_0"))
    second = runtimes.container_name(Path("/b/20261120T101500Z-resnet-mxnet-cpu/experiment_0"))
    assert first != second
    assert first.startswith("encore-20261120T101500Z-resnet-mxnet-cpu-0-")
    assert Container(image="i", name=first, user=1, group=1, caller={}).name == first
