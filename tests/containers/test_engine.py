"""The real thing: training in containers of real engines, stopping it, breaking it; nothing may be left."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from encore import paths
from encore.containers.renderers import Container
from encore.job import Job, Mount
from encore.machine import processes
from tests.conftest import Encore, Study, only_run
from tests.containers.conftest import EngineUnderTest, make
from tests.containers.samples import RENDERERS
from tests.trainings import PATIENCE, exported, served, wait_until

# A Triton server with PyTorch in its Python backend; Debian's Python is 3.11
SERVER = """
FROM localhost/encore/standin-pytorch:latest
RUN apt-get update && apt-get install --yes --no-install-recommends libpython3.11
COPY pytriton/tritonserver /opt/tritonserver
COPY nvidia_pytriton.libs /opt/libraries
RUN cp /opt/tritonserver/python_backend_stubs/3.11/* /opt/tritonserver/backends/python/
ENV PATH=/opt/tritonserver/bin:$PATH LD_LIBRARY_PATH=/opt/libraries
"""

LONG = ("--set", "epochs=60", "--set", "quality_target=1.0")


@pytest.fixture(scope="session")
def data(docker: EngineUnderTest, encore: Encore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The small data set, made in a container
    folder = tmp_path_factory.mktemp("made") / "resnet"
    command = ("data", "prepare", "resnet", "-o", str(folder), "--runtime", "docker")
    encore(*command, environment=docker.environment, code=0)
    assert docker.left() == []
    return folder


def run_in(engine: EngineUnderTest, job: Job, user: int = 0) -> None:
    # Run a job to its end as a user of whatever number
    limits = {"nofile": 1024, "nproc": 4096}
    container = Container(
        image="localhost/encore/resnet:latest",
        name=f"encore-test-{os.getpid()}",
        user=user,
        group=user,
        caller=engine.environment,
        limits=limits,
    )
    command = RENDERERS[engine.name](job, container)
    done = subprocess.run(command.argv, env=command.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@contextmanager
def started(engine: EngineUnderTest, data: Path, results: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    # Yield a run in the background, once both ranks have made steps; ended whatever happens
    command = [sys.executable, "-m", "encore.cli.app", "run", "resnet", "2", "--system", "cpu"]
    command += ["--runtime", engine.name, "--data", str(data), "--results", str(results), *LONG, *options]
    with (results.parent / "output.txt").open("wb") as output:
        child = subprocess.Popen(
            command, cwd=paths.ROOT, env=engine.environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: [b.step >= 3 for b in beats(results)] == [True, True], "steps of both ranks")
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait(timeout=PATIENCE)


def beats(results: Path) -> list[processes.Heartbeat]:
    folders = list(results.glob("*/experiment_0/heartbeat"))
    return processes.heartbeats(folders[0]) if folders else []


def state(results: Path) -> dict[str, str]:
    file = next(results.glob("*/experiment_0/state.json"))
    return dict(json.loads(file.read_text(encoding="utf-8")))


def shape(run: Path) -> set[str]:
    # Files of a run folder, without what depends on the number of epochs and of ranks' lines
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    return {re.sub(r"step_\d+", "step_N", name) for name in names if "/checkpoint/" not in name}


def test_run_in_a_container_reaches_the_target(
    engine: EngineUnderTest, encore: Encore, data: Path, digits: Path, study: Study, tmp_path: Path
) -> None:
    # An epoch or two; that the target of the toy data set is reached is seen on the host.
    arguments = ("run", "resnet", "2", "--system", "cpu", "--set", "quality_target=0.1", "--json")
    options = ("--runtime", engine.name, "--data", str(data), "--results", str(tmp_path))
    encore(*arguments, *options, environment=engine.environment, code=0)
    inside, outside = only_run(tmp_path), study.of_ranks(2).parent
    assert shape(inside) == shape(outside)
    passports = [json.loads((run / "run.json").read_text(encoding="utf-8")) for run in (inside, outside)]
    assert passports[0].keys() == passports[1].keys()
    made_outside = json.loads((digits / "dataset.json").read_text(encoding="utf-8"))
    assert passports[0]["data"]["id"] == made_outside["id"] and passports[0]["runtime"] == engine.name
    assert passports[0]["image"]["base"] == "localhost/encore/standin-mxnet:latest"
    systems = [json.loads((run / "system.json").read_text(encoding="utf-8")) for run in (inside, outside)]
    # The stand-in pins what the host's environment pins.
    assert systems[0]["other_software_stack"] == systems[1]["other_software_stack"]
    assert systems[0]["other_software_stack"]["mxnet_version"] == "1.9.1"
    assert engine.left() == []


def test_files_belong_to_the_caller(engine: EngineUnderTest, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    folder = tmp_path / "results"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    # The image's /etc/passwd has no such user, whose name PyTorch asks for.
    write = "import getpass, pathlib, sys; pathlib.Path(sys.argv[1], 'made').mkdir(); getpass.getuser()"
    mount = Mount(folder, str(folder), False)
    command = ("python", "-c", write, str(folder))
    run_in(engine, Job(argv=command, environment={}, mounts=(mount,), ranks=1, gpus=0), user=12345)
    made = (folder / "made").stat()
    assert (made.st_uid, made.st_gid) == (12345, 12345)
    assert engine.left() == []


def resumes_from_its_checkpoint(engine: EngineUnderTest, run: Path) -> None:
    # Resume a run, see that it does not begin anew, and stop it again
    command = [sys.executable, "-m", "encore.cli.app", "run", "--resume", str(run)]
    child = subprocess.Popen(command, cwd=paths.ROOT, env=engine.environment, stdout=subprocess.DEVNULL)
    metrics = run / "experiment_0" / "metrics.jsonl"
    try:
        wait_until(lambda: resumed_steps(metrics)[1:] != [], "the resumed run's start")
    finally:
        child.terminate()
        child.wait(timeout=PATIENCE)
    assert resumed_steps(metrics)[1] > 0
    assert engine.left() == []


def resumed_steps(metrics: Path) -> list[int]:
    # A resumed run cuts the stream back to its checkpoint, and its last line may be half-written.
    text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
    records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [record["resumed_step"] for record in records if "resumed_step" in record]


def test_signal_writes_a_checkpoint_and_leaves_nothing(engine: EngineUnderTest, data: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    with started(engine, data, results) as child:
        alive = [beat.pid for beat in beats(results)]
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=PATIENCE) == 130
    assert state(results)["reason"] == "stopped by SIGTERM, a checkpoint was written"
    assert not any(Path(f"/proc/{pid}").exists() for pid in alive)
    assert engine.left() == []
    run = next(results.iterdir())
    assert list(run.glob("experiment_0/checkpoint/step_*"))
    resumes_from_its_checkpoint(engine, run)


def test_rank_that_dies_ends_the_run_and_is_named(engine: EngineUnderTest, data: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    with started(engine, data, results) as child:
        os.kill(beats(results)[1].pid, signal.SIGKILL)
        assert child.wait(timeout=PATIENCE) == 1
    assert state(results)["reason"].startswith("rank 1 was killed by SIGKILL")
    assert engine.left() == []


def test_image_is_fit_for_use(docker: EngineUnderTest) -> None:
    output = make("test-image-resnet", "ENGINE=docker", environment=docker.environment)
    assert [line.split()[0] for line in output.splitlines()] == ["OK"] * 6


@pytest.fixture(scope="module")
def trained(docker_with_pytorch: EngineUnderTest, encore: Encore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A run of NCF in the image on PyTorch's stand-in, and its data, prepared there too
    folder = tmp_path_factory.mktemp("trained")
    variables, options = docker_with_pytorch.environment, ("--runtime", "docker")
    encore("data", "prepare", "ncf", "-o", str(folder / "ncf"), *options, environment=variables, code=0)
    options += ("--data", str(folder / "ncf"), "--results", str(folder / "results"))
    # An epoch or two, as above.
    options += ("--set", "quality_target=0.1")
    encore("run", "ncf", "2", "--system", "cpu", *options, environment=variables, code=0)
    return only_run(folder / "results")


def test_pytorch_on_its_stand_in(docker_with_pytorch: EngineUnderTest, trained: Path) -> None:
    engine = docker_with_pytorch
    output = make("test-image-ncf", "ENGINE=docker", environment=engine.environment)
    assert [line.split()[0] for line in output.splitlines()] == ["OK"] * 7
    assert "compare optimizers (fused, plain on cpu, apex not compared" in output
    content = json.loads((trained / "run.json").read_text(encoding="utf-8"))
    assert content["image"]["base"] == "localhost/encore/standin-pytorch:latest"
    assert engine.left() == []


def test_trained_model_is_served_in_a_container(
    docker_with_pytorch: EngineUnderTest, encore: Encore, trained: Path, serving_python: Path, tmp_path: Path
) -> None:
    # The server in an image of one's own, as docs/serving.md says, with the binary of the wheel on the stand-in
    engine = docker_with_pytorch
    (wheel,) = serving_python.parent.parent.glob("lib/python*/site-packages")
    (tmp_path / "Dockerfile").write_text(SERVER, encoding="utf-8")
    engine.ask("build", "--tag", "own-server:1", "--file", str(tmp_path / "Dockerfile"), str(wheel))
    exported(encore, trained, tmp_path / "ncf")
    options = ("--runtime", "docker", "--image", "own-server:1", "--device", "cpu")
    served(encore, tmp_path / "ncf", *options, environment=engine.environment)
    assert engine.left() == []
