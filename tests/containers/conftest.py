"""Container engines for the tests: a Docker daemon in temporary folders, and a Podman with temporary storage.

They are started where ENCORE_ENGINE_TESTS is set, as in `.ci/run`; tests then fail if an engine is missing.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from encore import paths
from tests.results.result_logs import write_files

START_SECONDS = 180


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine with the images of MXNet's stand-in and of resnet, and the variables by which its client reaches it."""

    name: str
    environment: dict[str, str]

    def run(self, *arguments: str) -> str:
        return output_of([self.name, *arguments], self.environment)

    def make(self, *arguments: str) -> str:
        return output_of(["make", "--no-print-directory", *arguments, f"ENGINE={self.name}"], self.environment)

    def remains(self) -> list[str]:
        # Containers, running or not, and volumes
        return self.run("ps", "--all", "--quiet").split() + self.run("volume", "ls", "--quiet").split()


def _require(*programs: str) -> None:
    if not os.environ.get("ENCORE_ENGINE_TESTS"):
        pytest.skip("NO CONTAINER ENGINE: set ENCORE_ENGINE_TESTS=1 to start one, as root")
    missing = [program for program in programs if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        pytest.fail(f"engine tests need root and {missing or 'nothing else'}; run tests/containers/install_engines.sh")


def output_of(command: list[str], environment: dict[str, str]) -> str:
    result = subprocess.run(command, cwd=paths.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="session")
def engine_folder() -> Iterator[Path]:
    # A folder with a path short enough for a socket
    folder = Path(tempfile.mkdtemp(prefix="encore-"))
    yield folder
    # Unmount the file systems of an engine before the folder is deleted.
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text(encoding="ascii").splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(str(folder))), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def docker(engine_folder: Path, request: pytest.FixtureRequest) -> Iterator[EngineUnderTest]:
    # A Docker daemon with both images, built by `make`
    _require("dockerd", "docker", "debootstrap")
    socket = f"unix://{engine_folder}/docker.sock"
    engine = EngineUnderTest("docker", {**os.environ, "DOCKER_HOST": socket})
    folders = ["--data-root", f"{engine_folder}/data", "--exec-root", f"{engine_folder}/exec"]
    command = ["dockerd", *folders, "--pidfile", f"{engine_folder}/pid", "--host", socket]
    with (engine_folder / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_for(daemon, engine, engine_folder / "dockerd.log")
        # The image of the stand-in contains the Horovod wheel of this environment.
        request.getfixturevalue("mxnet_python")
        engine.make("standin")
        engine.make("build-resnet", "BASE=standin")
        yield engine
    finally:
        daemon.terminate()
        daemon.wait(timeout=180)


@pytest.fixture(scope="session")
def docker_with_pytorch(docker: EngineUnderTest) -> EngineUnderTest:
    # The Docker daemon with PyTorch's stand-in and the image of ncf
    docker.make("standin", "FRAMEWORK=pytorch")
    docker.make("build-ncf", "BASE=standin")
    return docker


def _wait_for(daemon: subprocess.Popen[bytes], engine: EngineUnderTest, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while subprocess.run(["docker", "info"], env=engine.environment, capture_output=True, check=False).returncode:
        if daemon.poll() is not None or time.monotonic() > deadline:
            pytest.fail("dockerd does not start: " + log.read_text(encoding="utf-8", errors="replace")[-2000:])
        time.sleep(0.5)


@pytest.fixture(scope="session")
def podman(docker: EngineUnderTest, engine_folder: Path) -> EngineUnderTest:
    # A Podman that loads the stand-in from Docker and builds the image of resnet
    _require("podman", "runc")
    folder = engine_folder / "podman"
    # Debian's Podman on a machine without CAP_SYS_RESOURCE or with hybrid cgroups: docs/containers.md.
    limits = 'default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]'
    write_files(folder, {
        "containers.conf": f'[containers]\n{limits}\n[engine]\nruntime = "runc"\n',
        "storage.conf": f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n',
    })  # fmt: skip
    files = {"CONTAINERS_CONF": f"{folder}/containers.conf", "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf"}
    engine = EngineUnderTest("podman", {**os.environ, **files})
    archive = engine_folder / "standin.tar"
    docker.run("save", "--output", str(archive), "localhost/encore/standin-mxnet:latest")
    engine.run("load", "--input", str(archive))
    archive.unlink()
    engine.make("build-resnet", "BASE=standin")
    return engine


@pytest.fixture(params=["docker", pytest.param("podman", marks=pytest.mark.long)])
def engine(request: pytest.FixtureRequest) -> EngineUnderTest:
    engine_under_test: EngineUnderTest = request.getfixturevalue(request.param)
    return engine_under_test
