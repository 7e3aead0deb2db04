"""Training in containers of real engines: results, interrupts and failures; no container or volume may remain."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from encore.containers.renderers import Container
from encore.job import Job, Mount
from encore.machine import processes
from tests.conftest import Encore, ToyRun, only_run
from tests.containers.conftest import EngineUnderTest
from tests.containers.samples import RENDERERS
from tests.trainings import PATIENCE, exported, in_background, served, wait_until

# A Triton server with PyTorch in its Python backend; Debian's Python is 3.11
SERVER = """
FROM localhost/encore/standin-pytorch:latest
RUN apt-get update && apt-get install --yes --no-install-recommends libpython3.11
COPY pytriton/tritonserver /opt/tritonserver
COPY nvidia_pytriton.libs /opt/libraries
RUN cp /opt/tritonserver/python_backend_stubs/3.11/* /opt/tritonserver/backends/python/
ENV PATH=/opt/tritonserver/bin:$PATH LD_LIBRARY_PATH=/opt/libraries
"""

UNREACHABLE = ("--set", "epochs=60", "--set", "quality_target=1.0")


@pytest.fixture(scope="session")
def data(docker: EngineUnderTest, encore: Encore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The toy data set, prepared in a container
    folder = tmp_path_factory.mktemp("data") / "resnet"
    command = ("data", "prepare", "resnet", "-o", str(folder), "--runtime", "docker")
    encore(*command, environment=docker.environment, code=0)
    assert docker.remains() == []
    return folder


@contextmanager
def running(engine: EngineUnderTest, data: Path, results: Path) -> Iterator[subprocess.Popen[str]]:
    # Yield a run in the background after three steps of both ranks; it is stopped at the end
    options = ("--runtime", engine.name, "--data", str(data), "--results", str(results), *UNREACHABLE)
    child = in_background("run", "resnet", "2", "--system", "cpu", *options, environment=engine.environment)
    try:
        wait_until(lambda: [beat.step >= 3 for beat in heartbeats(results)] == [True, True], "steps of both ranks")
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait(timeout=PATIENCE)


def heartbeats(results: Path) -> list[processes.Heartbeat]:
    folders = list(results.glob("*/experiment_0/heartbeat"))
    return processes.heartbeats(folders[0]) if folders else []


def reason(results: Path) -> str:
    return str(json.loads(next(results.glob("*/experiment_0/state.json")).read_text(encoding="utf-8"))["reason"])


def files(run: Path) -> set[str]:
    # Names in a run folder, without the numbers of steps and without checkpoints
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    return {re.sub(r"step_\d+", "step_N", name) for name in names if "/checkpoint/" not in name}


def test_run_in_a_container_writes_what_a_run_on_the_host_writes(
    engine: EngineUnderTest, encore: Encore, data: Path, toy_run: Callable[[str], ToyRun], tmp_path: Path
) -> None:
    # One or two epochs: the run on the host has shown that the target of the toy data set is reached.
    command = ("run", "resnet", "2", "--system", "cpu", "--set", "quality_target=0.1", "--json")
    options = ("--runtime", engine.name, "--data", str(data), "--results", str(tmp_path))
    encore(*command, *options, environment=engine.environment, code=0)
    runs = (only_run(tmp_path), toy_run("resnet").folder)
    assert files(runs[0]) == files(runs[1])
    passports, systems = (
        [json.loads((run / f"{name}.json").read_text(encoding="utf-8")) for run in runs] for name in ("run", "system")
    )
    assert passports[0].keys() == passports[1].keys()
    image = (passports[0]["data"]["id"], passports[0]["runtime"], passports[0]["image"]["base"])
    assert image == (passports[1]["data"]["id"], engine.name, "localhost/encore/standin-mxnet:latest")
    # The stand-in has the versions that the environment of the host has.
    assert systems[0]["other_software_stack"] == systems[1]["other_software_stack"]
    assert systems[0]["other_software_stack"]["mxnet_version"] == "1.9.1" and engine.remains() == []


def test_interrupt_writes_a_checkpoint_and_removes_the_container(
    engine: EngineUnderTest, data: Path, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    with running(engine, data, results) as child:
        pids = [beat.pid for beat in heartbeats(results)]
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=PATIENCE) == 130
    assert reason(results) == "stopped by SIGTERM, a checkpoint was written"
    assert list(results.glob("*/experiment_0/checkpoint/step_*"))
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids) and engine.remains() == []


@pytest.mark.long
def test_killed_rank_ends_the_run_and_is_named(engine: EngineUnderTest, data: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    with running(engine, data, results) as child:
        os.kill(heartbeats(results)[1].pid, signal.SIGKILL)
        assert child.wait(timeout=PATIENCE) == 1
    assert reason(results).startswith("rank 1 was killed by SIGKILL")
    assert engine.remains() == []


@pytest.mark.long
def test_files_belong_to_the_caller(engine: EngineUnderTest, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    folder = tmp_path / "results"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    # /etc/passwd of the image has no such user, and PyTorch calls getpass.getuser().
    program = "import getpass, pathlib, sys; pathlib.Path(sys.argv[1], 'new').mkdir(); getpass.getuser()"
    command = ("python", "-c", program, str(folder))
    job = Job(argv=command, environment={}, mounts=(Mount(folder, str(folder), False),), ranks=1, gpus=0)
    container = Container(
        image="localhost/encore/resnet:latest",
        name=f"encore-test-{os.getpid()}",
        user=12345,
        group=12345,
        caller=engine.environment,
        limits={"nofile": 1024, "nproc": 4096},
    )
    rendered = RENDERERS[engine.name](job, container)
    result = subprocess.run(rendered.argv, env=rendered.environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    status = (folder / "new").stat()
    assert (status.st_uid, status.st_gid, engine.remains()) == (12345, 12345, [])


@pytest.fixture(scope="module")
def ncf_run(docker_with_pytorch: EngineUnderTest, encore: Encore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A run of NCF in the image on PyTorch's stand-in, on data that were prepared there
    folder, variables = tmp_path_factory.mktemp("ncf"), docker_with_pytorch.environment
    data = ("--runtime", "docker", "-o", str(folder / "data"))
    encore("data", "prepare", "ncf", *data, environment=variables, code=0)
    options = ("--runtime", "docker", "--data", str(folder / "data"), "--results", str(folder / "results"))
    command = ("run", "ncf", "2", "--system", "cpu", "--set", "quality_target=0.1")
    encore(*command, *options, environment=variables, code=0)
    return only_run(folder / "results")


@pytest.mark.long
def test_training_and_checks_in_the_pytorch_image(docker_with_pytorch: EngineUnderTest, ncf_run: Path) -> None:
    output = docker_with_pytorch.make("test-image-ncf")
    assert [line.split()[0] for line in output.splitlines()] == ["OK"] * 7
    assert "compare optimizers (fused, plain on cpu, apex not compared" in output
    content = json.loads((ncf_run / "run.json").read_text(encoding="utf-8"))
    assert content["image"]["base"] == "localhost/encore/standin-pytorch:latest"
    assert docker_with_pytorch.remains() == []


@pytest.mark.long
def test_trained_model_is_served_in_a_container(
    docker_with_pytorch: EngineUnderTest, encore: Encore, ncf_run: Path, serving_python: Path, tmp_path: Path
) -> None:
    # An image of the user as in docs/serving.md, with the server of the wheel on the stand-in
    (packages,) = serving_python.parent.parent.glob("lib/python*/site-packages")
    (tmp_path / "Dockerfile").write_text(SERVER, encoding="utf-8")
    docker_with_pytorch.run("build", "--tag", "own-server:1", "--file", str(tmp_path / "Dockerfile"), str(packages))
    exported(encore, ncf_run, tmp_path / "ncf")
    options = ("--runtime", "docker", "--image", "own-server:1", "--device", "cpu")
    served(encore, tmp_path / "ncf", *options, environment=docker_with_pytorch.environment)
    assert docker_with_pytorch.remains() == []
