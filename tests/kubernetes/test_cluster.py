"""Runs in a cluster: submitted, followed, evicted, ended and resumed, against a small API server that runs the pods."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from encore import paths
from encore.run.follow import read_progress
from encore.run.run_folder import RunFolder
from tests.conftest import Encore
from tests.kubernetes.server import Server

SECONDS = 120.0


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., tuple[Server, dict[str, str]]]]:
    servers = []

    def start(environment: dict[str, str], held: str = "") -> tuple[Server, dict[str, str]]:
        (tmp_path / "server").mkdir()
        server = Server(tmp_path / "server", environment, held)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server, {"KUBECONFIG": str(server.kubeconfig()), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    yield start
    for server in servers:
        server.end()


def submit(encore: Encore, results: Path, variables: dict[str, str], *words: str) -> tuple[RunFolder, str]:
    results.mkdir(exist_ok=True)
    where = ("--results", str(results), "--seed", "3", "--image", "registry.example/ncf:1")
    done = encore("submit", "ncf", *words, "--kubernetes", *where, environment=variables, code=0)
    return RunFolder(next(results.glob("2*"))), done.stdout


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_workload_that_waits_is_seen_ended_and_submitted_again(
    encore: Encore, serve: Callable[..., tuple[Server, dict[str, str]]], tmp_path: Path
) -> None:
    reason = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
    server, variables = serve({}, held=reason)
    folder, said = submit(encore, tmp_path / "results", variables, "2", "--nodes", "2", "--kind", "job")
    name = folder.experiments()[0].state().job
    assert f"submitted Job {name} to default" in said and f"follow {folder.path}" in said
    owners = {key: each["metadata"].get("ownerReferences", []) for key, each in server.objects.items()}
    assert [owner["kind"] for owner in owners["services", name] + owners["configmaps", name]] == ["Job", "Job"]

    def seen() -> str:
        return encore("status", "--results", str(folder.path.parent), "--json", environment=variables, code=0).stdout

    wait_for(lambda: len(server.pods()) == 2)
    assert '"state": "queued"' in (shown := seen()) and reason in shown
    refused = encore("submit", "--resume", str(folder.path), environment=variables, code=2)
    assert "is in the cluster" in refused.stderr
    ended = encore("cancel", str(folder.path), environment=variables, code=0).stdout
    assert f"deleted Job {name}" in ended and "submit --resume" in " ".join(ended.split())
    assert not server.objects
    assert '"state": "interrupted"' in seen()
    assert "was submitted to Kubernetes" in encore("run", "--resume", str(folder.path), code=2).stderr
    encore("submit", "--resume", str(folder.path), environment=variables, code=0)
    assert ("jobs", name) in server.objects and '"state": "queued"' in seen()
    # Several nodes are a JobSet where the cluster has it; what it has not is refused.
    submit(encore, tmp_path / "more", variables, "2", "--nodes", "2")
    assert [plural for plural, _ in server.objects if plural == "jobsets"] == ["jobsets"]
    where = ("--kubernetes", "--results", str(tmp_path / "more"), "--kind", "trainjob")
    assert "no TrainJob" in encore("submit", "ncf", "1", *where, environment=variables, code=2).stderr


def test_an_evicted_run_goes_on_and_is_judged(
    encore: Encore,
    serve: Callable[..., tuple[Server, dict[str, str]]],
    tmp_path: Path,
    pytorch_python: Path,
) -> None:
    path = f"{pytorch_python.parent}{os.pathsep}{os.environ['PATH']}"
    server, variables = serve({"PATH": path, "PYTHONPATH": str(paths.ROOT), "OMP_NUM_THREADS": "1"})
    words = ("2", "--nodes", "2", "--kind", "job", "--set", "quality_target=0.2")
    folder, _ = submit(encore, tmp_path / "results", variables, *words)
    (experiment,) = folder.experiments()
    command = [sys.executable, "-m", "encore.cli.app", "follow", str(folder.path)]
    with subprocess.Popen(
        command, cwd=paths.ROOT, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True
    ) as followed:
        wait_for(lambda: read_progress(experiment.metrics).evaluated_epoch)
        # The peer of the pod that is evicted stops with it, and both are replaced.
        server.evict(sorted(server.processes)[-1])
        said, _ = followed.communicate(timeout=SECONDS)
    assert not server.problems and server.starts == 4
    assert followed.returncode == 0, said
    progress, passport = read_progress(experiment.metrics), folder.passport()
    assert (experiment.state().status, progress.outcome, progress.starts) == ("reached", "reached", 2)
    assert experiment.result.exists() and "epoch" in said
    # What the submission could not know of the cluster came from the pod.
    assert passport["data"]["name"] == "tastes" and passport["node"]["cores"] == os.cpu_count()
    assert "never a reproduction" in said


def test_a_training_that_refuses_is_not_retried(
    encore: Encore,
    serve: Callable[..., tuple[Server, dict[str, str]]],
    tmp_path: Path,
    pytorch_python: Path,
) -> None:
    path = f"{pytorch_python.parent}{os.pathsep}{os.environ['PATH']}"
    server, variables = serve({"PATH": path, "PYTHONPATH": str(paths.ROOT), "OMP_NUM_THREADS": "1"})
    folder, _ = submit(encore, tmp_path / "results", variables, "1", "--data", str(tmp_path / "nothing"))
    done = encore("follow", str(folder.path), environment=variables, code=1)
    assert server.starts == 1 and not server.problems
    assert folder.experiments()[0].state().status == "failed" and "PodFailurePolicy" in done.stdout
