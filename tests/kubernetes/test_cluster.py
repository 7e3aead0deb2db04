"""Runs in a cluster: submitted, followed, evicted, ended and resumed, against a small API server that runs the pods."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.run import pod
from encore import paths
from encore.errors import EncoreError
from encore.kubernetes import api
from encore.kubernetes.api import Workload
from encore.kubernetes.settings import Kubernetes
from encore.machine import node
from encore.run import workloads
from encore.run.follow import read_progress
from encore.run.run_folder import RunFolder
from tests.conftest import in_process
from tests.kubernetes.server import Server, kubeconfig, valid

SECONDS = 120.0
Serve = Callable[..., Server]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    # Starts a cluster whose pods have this environment, and names it to the commands
    servers = []

    def start(environment: dict[str, str], held: str = "") -> Server:
        (tmp_path / "server").mkdir()
        server = Server(tmp_path / "server", environment, held)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig()))
        return server

    yield start
    for server in servers:
        server.end()


def encore(*words: str, code: int = 0) -> str:
    # What a command printed, in this process: each of its own would take a second to import what this one has
    done = in_process([sys.executable, "-m", "encore.cli.app", *words], os.environ)
    assert done.returncode == code, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


def submit(results: Path, *words: str) -> tuple[RunFolder, str]:
    results.mkdir(exist_ok=True)
    where = ("--results", str(results), "--seed", "3", "--image", "registry.example/ncf:1")
    said = encore("submit", "ncf", *words, "--kubernetes", *where)
    return RunFolder(next(results.glob("2*"))), said


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_workload_that_waits_is_seen_ended_and_submitted_again(serve: Serve, tmp_path: Path) -> None:
    reason = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
    server = serve({}, held=reason)
    folder, said = submit(tmp_path / "results", "2", "--nodes", "2", "--kind", "job")
    name = folder.experiments()[0].state().job
    assert f"submitted Job {name}" in said and f"follow {folder.path}" in said
    owners = {key: each["metadata"].get("ownerReferences", []) for key, each in server.objects.items()}
    assert [owner["kind"] for owner in owners["services", name] + owners["configmaps", name]] == ["Job", "Job"]

    def seen() -> str:
        return encore("status", "--results", str(folder.path.parent), "--json")

    wait_for(lambda: len(server.pods()) == 2)
    assert '"state": "queued"' in (shown := seen()) and reason in shown
    dry = encore("submit", "--resume", str(folder.path), "--dry-run", "--json")
    assert json.loads(dry)["items"][0]["metadata"]["name"] == name
    # However the path is written, and whatever context is the current one by now
    assert folder.passport()["kubernetes"]["settings"]["context"] == "test"
    link = tmp_path / "linked"
    link.symlink_to(folder.path.parent)
    for path in (link / folder.path.name, folder.path / ".." / folder.path.name):
        assert "is in the cluster" in encore("submit", "--resume", str(path), code=2)
    assert "is in the cluster" in encore("submit", "--resume", str(folder.path), code=2)
    ended = encore("cancel", str(folder.path))
    assert f"deleted Job {name}" in ended and "submit --resume" in " ".join(ended.split())
    assert not server.objects
    assert '"state": "interrupted"' in seen()
    assert "was submitted to Kubernetes" in encore("run", "--resume", str(folder.path), code=2)
    # A try without a checkpoint leaves a log, of which the next one must have nothing.
    (experiment,) = folder.experiments()
    head = experiment.log.read_text(encoding="utf-8")
    experiment.log.write_text(head + ":::MLLOG {}\n", encoding="utf-8")
    encore("submit", "--resume", str(folder.path))
    assert ("jobs", name) in server.objects and '"state": "queued"' in seen()
    sent = server.objects["configmaps", name]["data"]["result.txt"]
    assert sent == experiment.log.read_text(encoding="utf-8") and len(sent.splitlines()) == len(head.splitlines())
    wrong = encore("submit", "--resume", str(folder.path), "--time", "60", code=2)
    assert "--time with --resume" in wrong and "submitted with" in wrong
    # Several nodes are a JobSet where the cluster has it; what it has not is refused.
    submit(tmp_path / "more", "2", "--nodes", "2")
    assert [plural for plural, _ in server.objects if plural == "jobsets"] == ["jobsets"]
    where = ("--kubernetes", "--results", str(tmp_path / "more"), "--kind", "trainjob")
    assert "no TrainJob" in encore("submit", "ncf", "1", *where, code=2)
    with pytest.raises(EncoreError, match=r"has no TrainJob \(trainer.kubeflow.org/v1alpha1\)"):
        workloads.connect(folder).look("trainjob", name, "")


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # From the first call on, which asks what the cluster serves
    monkeypatch.setattr(api, "CALL_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cluster = {"server": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig(cluster)), encoding="utf-8")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        began = time.monotonic()
        with pytest.raises(EncoreError, match=r"the cluster does not answer: .*timed out"):
            api.Connection(Kubernetes())
        assert time.monotonic() - began < 10


def test_results_that_are_on_the_volume_alone_are_copied(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve({}, held="no room")
    folder, _ = submit(tmp_path / "results", "1", "--volume", f"{tmp_path}=shared")
    (experiment,) = folder.experiments()
    workloads.settle(folder, experiment, Workload(state="succeeded"))
    assert (experiment.state().status, experiment.state().reason) == ("interrupted", workloads.RESULTS_THERE)
    with monkeypatch.context() as patch:
        patch.setattr(workloads, "look", lambda *given: Workload(state="succeeded"))
        assert "on the cluster's volume" in encore("submit", "--resume", str(folder.path), code=2)
    run, _, copy, _, _ = map(shlex.split, workloads.copying(folder))
    spec = next(word for word in run if word.startswith("--overrides=")).partition("=")[2]
    valid({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "encore-copy"}, **json.loads(spec)})
    assert json.loads(spec)["spec"]["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}
    assert copy[1:3] == ["--context", "test"] and copy[5:] == ["cp", f"encore-copy:{folder.path}", str(folder.path)]
    # What is copied counts, whatever the cluster still knows.
    record = '{"kind": "start", "time": 1.0, "resumed_step": 0}\n{"kind": "end", "time": 9.0, "outcome": "reached"}\n'
    experiment.metrics.write_text(record, encoding="utf-8")
    workloads.settle(folder, experiment, Workload(state="gone", reason="it is no longer in the cluster"))
    assert (experiment.state().status, experiment.result.exists()) == ("reached", True)
    assert experiment.state().ended == "1970-01-01T00:00:09Z"


def test_an_evicted_run_goes_on_and_is_judged(serve: Serve, tmp_path: Path, pytorch_python: Path) -> None:
    path = f"{pytorch_python.parent}{os.pathsep}{os.environ['PATH']}"
    server = serve({"PATH": path, "PYTHONPATH": str(paths.ROOT), "OMP_NUM_THREADS": "1"})
    words = ("--nodes", "2", "--kind", "job", "--set", "quality_target=0.03")
    folder, _ = submit(tmp_path / "results", "2", *words)
    (experiment,) = folder.experiments()

    def evict() -> None:
        wait_for(lambda: read_progress(experiment.metrics).step)
        # The peer of the pod that is evicted stops with it, and both are replaced.
        server.evict(max(server.processes))

    with ThreadPoolExecutor() as pool:
        evicted = pool.submit(evict)
        said = encore("follow", str(folder.path))
        evicted.result()
    assert not server.problems and server.starts == 4
    progress, passport = read_progress(experiment.metrics), folder.passport()
    assert (experiment.state().status, progress.outcome, progress.starts) == ("reached", "reached", 2)
    assert experiment.result.exists() and "epoch" in said
    # What the submission could not know of the cluster came from the pod.
    assert passport["data"]["name"] == "tastes" and passport["node"]["cores"] == node.cores()
    assert "never a reproduction" in said


def test_a_training_that_fails_is_not_retried(serve: Serve, tmp_path: Path) -> None:
    # This Python has no framework.
    server = serve({"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(paths.ROOT)})
    folder, _ = submit(tmp_path / "results", "1", "--data", str(tmp_path / "nothing"))
    said = encore("follow", str(folder.path), code=1)
    assert server.starts == 1 and not server.problems
    assert folder.experiments()[0].state().status == "failed" and "PodFailurePolicy" in said
    assert "No module named 'torch'" in said


RANK = """
import time
from pathlib import Path
from benchmarks.common.run import stopping
stopping.StopRequest()
stopping.Heartbeat(Path({!r}), 0).beat({})
time.sleep(600)
"""


@pytest.mark.parametrize(("step", "waits"), [(5, 1.0), (-1, 3.0)])
def test_a_pod_ends_ranks_that_hang(tmp_path: Path, step: int, waits: float) -> None:
    rank = RANK.format(str(tmp_path / "heartbeat"), step)
    watched = ("-m", "benchmarks.common.run.pod", "run", "--output", str(tmp_path), "--hang-seconds", "1")
    # An earlier pod's rank, which came further and is gone.
    (tmp_path / "heartbeat").mkdir()
    (tmp_path / "heartbeat" / "rank_1").write_text("7 pod-before 90 1.0 1.0", encoding="ascii")
    began = time.monotonic()
    command = [sys.executable, *watched, "--", sys.executable, "-c", rank]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGKILL and time.monotonic() - began > waits
    assert re.search(
        rf"error: rank 0 on \S+ hangs: no step for \d s, and it came least far \(step {step}\)", done.stdout
    )
    assert 'File "<string>", line 7' in done.stderr, "the stack of what hangs"


def test_a_pod_keeps_the_head_of_a_log_alone(tmp_path: Path) -> None:
    files, output = tmp_path / "files", tmp_path / "experiment_0"
    for folder in (files, output):
        folder.mkdir()
    for name, text in (("config.json", "{}"), ("result.txt", "head\n")):
        (files / name).write_text(text, encoding="utf-8")
    pod.prepare(files, output, None)
    pod.prepare(files, output, None)
    assert not list(output.glob("*.discarded"))
    # Evicted behind init_stop, before its first record
    (output / "result.txt").write_text("head\nrun_start\n", encoding="utf-8")
    pod.prepare(files, output, None)
    assert (output / "result.txt").read_text(encoding="utf-8") == "head\n"
    assert (output / "result.txt.discarded").read_text(encoding="utf-8").endswith("run_start\n")
    (output / "checkpoint" / "step_8").mkdir(parents=True)
    (output / "result.txt").write_text("head\nrun_start\n", encoding="utf-8")
    pod.prepare(files, output, None)
    assert (output / "result.txt").read_text(encoding="utf-8") == "head\nrun_start\n"
