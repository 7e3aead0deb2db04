"""Real engines for the tests: a Docker engine of their own, and a Podman with a store of its own.

They run where ENCORE_ENGINE_TESTS is set, as `.ci/run` does, and then fail loudly if no engine can be had.
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

START_SECONDS = 180


@dataclass(frozen=True)
class EngineUnderTest:
    # An engine with the images of MXNet's stand-in and of resnet, and what reaches it

    name: str
    environment: dict[str, str]

    def ask(self, *arguments: str) -> str:
        # The output of a command of the engine's client
        command = [self.name, *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def left(self) -> list[str]:
        # Containers and volumes that there are, running or not
        return self.ask("ps", "--all", "--quiet").split() + self.ask("volume", "ls", "--quiet").split()


def _required() -> bool:
    return bool(os.environ.get("ENCORE_ENGINE_TESTS"))


def _refuse(reason: str) -> None:
    # Fail where engine tests were asked for, skip and say why elsewhere
    if _required():
        pytest.fail(f"no container engine: {reason}")
    pytest.skip(f"NO CONTAINER ENGINE: {reason}")


def _need(*programs: str) -> None:
    if not _required():
        _refuse("set ENCORE_ENGINE_TESTS=1 to start one, as root (about 10 minutes the first time)")
    missing = [program for program in programs if shutil.which(program) is None]
    if os.geteuid() != 0:
        _refuse("an engine of the tests' own needs root")
    if missing:
        _refuse(f"{', '.join(missing)} missing; run tests/containers/install_engines.sh")


def make(*arguments: str, environment: dict[str, str]) -> str:
    # The output of a make target, which must succeed
    command = ["make", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=paths.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def engine_folder() -> Iterator[Path]:
    # A folder for engines, with a path short enough for a socket
    folder = Path(tempfile.mkdtemp(prefix="encore-"))
    yield folder
    # What an engine leaves mounted is not ours to delete.
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text(encoding="ascii").splitlines()]
    for mount in sorted((m for m in mounted if m.startswith(str(folder))), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def docker(engine_folder: Path, request: pytest.FixtureRequest) -> Iterator[EngineUnderTest]:
    # A Docker engine with both images, built by `make` as a user would
    _need("dockerd", "docker", "debootstrap")
    socket = f"unix://{engine_folder}/docker.sock"
    engine = EngineUnderTest("docker", {**os.environ, "DOCKER_HOST": socket})
    places = ["--data-root", f"{engine_folder}/data", "--exec-root", f"{engine_folder}/exec"]
    command = ["dockerd", *places, "--pidfile", f"{engine_folder}/pid", "--host", socket]
    with (engine_folder / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_for(daemon, engine, engine_folder / "dockerd.log")
        # The stand-in takes Horovod's wheel from the environment that other tests need in any case.
        request.getfixturevalue("mxnet_python")
        make("standin", "ENGINE=docker", environment=engine.environment)
        make("build-resnet", "BASE=standin", "ENGINE=docker", environment=engine.environment)
        yield engine
    finally:
        daemon.terminate()
        daemon.wait(timeout=180)


@pytest.fixture(scope="session")
def docker_with_pytorch(docker: EngineUnderTest) -> EngineUnderTest:
    # The Docker engine with PyTorch's stand-in and the image of ncf
    make("standin", "FRAMEWORK=pytorch", "ENGINE=docker", environment=docker.environment)
    make("build-ncf", "BASE=standin", "ENGINE=docker", environment=docker.environment)
    return docker


def _wait_for(daemon: subprocess.Popen[bytes], engine: EngineUnderTest, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while subprocess.run(["docker", "info"], env=engine.environment, capture_output=True, check=False).returncode:
        if daemon.poll() is not None or time.monotonic() > until:
            pytest.fail("dockerd does not start: " + log.read_text(encoding="utf-8", errors="replace")[-2000:])
        time.sleep(0.5)


@pytest.fixture(scope="session")
def podman(docker: EngineUnderTest, engine_folder: Path) -> EngineUnderTest:
    # A Podman whose base comes from Docker, and whose benchmark image it builds itself
    _need("podman", "runc")
    folder = engine_folder / "podman"
    folder.mkdir()
    # Debian's Podman on a machine without CAP_SYS_RESOURCE or with hybrid cgroups: docs/containers.md.
    limits = 'default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]'
    settings = f'[containers]\n{limits}\n[engine]\nruntime = "runc"\n'
    (folder / "containers.conf").write_text(settings, encoding="utf-8")
    store = f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    (folder / "storage.conf").write_text(store, encoding="utf-8")
    variables = {
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
    }
    engine = EngineUnderTest("podman", {**os.environ, **variables})
    archive = engine_folder / "standin.tar"
    docker.ask("save", "--output", str(archive), "localhost/encore/standin-mxnet:latest")
    engine.ask("load", "--input", str(archive))
    archive.unlink()
    make("build-resnet", "BASE=standin", "ENGINE=podman", environment=engine.environment)
    return engine


@pytest.fixture(params=["docker", "podman"])
def engine(request: pytest.FixtureRequest) -> EngineUnderTest:
    # Each engine in turn
    found: EngineUnderTest = request.getfixturevalue(request.param)
    return found
