"""Runs in a Kubernetes cluster: a small API server stores the objects and runs the pods as processes."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.common.run import pod
from encore import paths
from encore.errors import EncoreError
from encore.kubernetes import api, settings
from encore.machine import node
from encore.run import run_folder, workloads
from tests.conftest import in_process
from tests.kubernetes.server import GROUPS, Server, valid, write_kubeconfig
from tests.results.result_logs import write_files


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    # Start a cluster and set KUBECONFIG; the test may set the environment of its pods, or that they stay pending
    (tmp_path / "server").mkdir()
    with Server(tmp_path / "server") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, server.server_port)))
        yield server
        server.end()


def encore(*arguments: str, code: int = 0) -> str:
    # Run a command in this process, which saves a second of imports, and return its output
    process = in_process([sys.executable, "-m", "encore.cli.app", *arguments], os.environ)
    assert process.returncode == code, process.stdout + process.stderr
    return str(process.stdout + process.stderr)


def submit(results: Path, *arguments: str) -> tuple[run_folder.RunFolder, str]:
    results.mkdir(exist_ok=True)
    options = ("--results", str(results), "--seed", "3", "--image", "registry.example/ncf:1")
    output = encore("submit", "ncf", *arguments, "--kubernetes", *options)
    return run_folder.RunFolder(next(results.glob("2*"))), output


def test_pending_run_is_shown_cancelled_and_resumed(server: Server, tmp_path: Path) -> None:
    reason = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
    server.unschedulable = reason
    folder, output = submit(tmp_path / "results", "2", "--nodes", "2", "--kind", "job")
    (experiment,) = folder.experiments()
    name, run = experiment.state().job, str(folder.path)
    assert f"submitted Job {name}" in output and f"follow {run}" in output
    owners = [server.objects[plural, name]["metadata"]["ownerReferences"] for plural in ("services", "configmaps")]
    assert [[owner["kind"] for owner in each] for each in owners] == [["Job"]] * 2 and len(server.pods()) == 2

    status = partial(encore, "status", "--results", str(folder.path.parent), "--json")
    assert '"state": "queued"' in (output := status()) and reason in output
    assert json.loads(encore("submit", "--resume", run, "--dry-run", "--json"))["items"][0]["metadata"]["name"] == name
    assert folder.metadata()["kubernetes"]["settings"]["context"] == "test"
    link = tmp_path / "linked"
    link.symlink_to(folder.path.parent)
    for path in (folder.path, link / folder.path.name, folder.path / ".." / folder.path.name):
        assert "is still in the cluster" in encore("submit", "--resume", str(path), code=2)
    output = encore("cancel", run)
    assert f"deleted Job {name}" in output and "submit --resume" in " ".join(output.split())
    assert not server.objects and '"state": "interrupted"' in status()
    assert "was submitted to Kubernetes" in encore("run", "--resume", run, code=2)
    # The resumed run starts with the head of the log, since an attempt without a checkpoint does not count.
    head = experiment.log.read_text(encoding="utf-8")
    experiment.log.write_text(head + ":::MLLOG {}\n", encoding="utf-8")
    encore("submit", "--resume", run)
    assert ("jobs", name) in server.objects and '"state": "queued"' in status()
    submitted = server.objects["configmaps", name]["data"]["result.txt"]
    assert submitted == experiment.log.read_text(encoding="utf-8")
    assert len(submitted.splitlines()) == len(head.splitlines())
    error = "(?s)--time with --resume.*the original submission"
    assert re.search(error, encore("submit", "--resume", run, "--time", "60", code=2))
    # Several nodes become a JobSet if the cluster serves it.
    submit(tmp_path / "more", "2", "--nodes", "2")
    assert "jobsets" in {plural for plural, _ in server.objects}


def test_kind_that_the_cluster_does_not_serve(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(GROUPS, "jobset.x-k8s.io/v1alpha2")
    server.unschedulable = "no GPU"
    folder, output = submit(tmp_path / "results", "2", "--nodes", "2")
    assert "submitted Job" in output and "jobs" in {plural for plural, _ in server.objects}
    jobset = ("--kubernetes", "--results", str(tmp_path / "more"), "--kind", "jobset")
    assert "no JobSet" in encore("submit", "ncf", "1", *jobset, code=2)
    with pytest.raises(EncoreError, match=r"does not serve JobSet \(jobset.x-k8s.io/v1alpha2\)"):
        workloads.connect(folder).look("jobset", "name", "")


def test_silent_server_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "CALL_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, silent.getsockname()[1])))
        with pytest.raises(EncoreError, match=r"the cluster does not answer: .*timed out"):
            api.Connection(settings.Kubernetes())


def test_results_on_the_volume_are_copied_before_a_resume(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.unschedulable = "no room"
    folder, _ = submit(tmp_path / "results", "1", "--volume", f"{tmp_path}=shared")
    (experiment,) = folder.experiments()
    workloads.settle(folder, experiment, api.Workload(state="succeeded"))
    assert (experiment.state().status, experiment.state().reason) == ("interrupted", workloads.RESULTS_THERE)
    monkeypatch.setattr(workloads, "look", lambda *arguments: api.Workload(state="succeeded"))
    assert "on the cluster's volume" in encore("submit", "--resume", str(folder.path), code=2)
    run, _, copy, _, _ = map(shlex.split, workloads.copy_commands(folder))
    spec = json.loads(next(word for word in run if word.startswith("--overrides=")).partition("=")[2])
    valid({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "encore-copy"}, **spec})
    assert spec["spec"]["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}
    assert copy[1:3] == ["--context", "test"] and copy[5:] == ["cp", f"encore-copy:{folder.path}", str(folder.path)]
    # The copied metrics decide the result, even if the cluster no longer has the workload.
    end = {"kind": "end", "time": 9.0, "outcome": "reached"}
    write_files(experiment.folder, {"metrics.jsonl": [{"kind": "start", "time": 1.0, "resumed_step": 0}, end]})
    workloads.settle(folder, experiment, api.Workload(state="gone", reason="it is no longer in the cluster"))
    state = experiment.state()
    assert (state.status, state.ended, experiment.result.exists()) == ("reached", "1970-01-01T00:00:09Z", True)


@pytest.mark.long
def test_run_on_two_nodes_reaches_its_target(server: Server, tmp_path: Path, pytorch_python: Path) -> None:
    path = f"{pytorch_python.parent}{os.pathsep}{os.environ['PATH']}"
    server.environment = {"PATH": path, "PYTHONPATH": str(paths.ROOT), "OMP_NUM_THREADS": "1"}
    # The first evaluation of any seed has a higher hit rate.
    folder, _ = submit(tmp_path / "results", "2", "--nodes", "2", "--kind", "job", "--set", "quality_target=0.001")
    output = encore("follow", str(folder.path))
    (experiment,), passport = folder.experiments(), folder.metadata()
    assert experiment.state().status == "reached" and experiment.result.exists()
    assert "epoch" in output and "not a reproduction" in output
    # Facts of the cluster that only the pod knows
    assert passport["data"]["name"] == "tastes" and passport["node"]["cores"] == node.cores()


def test_failed_training_is_reported_with_its_log(server: Server, tmp_path: Path) -> None:
    # This Python has no framework
    server.environment = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(paths.ROOT)}
    folder, _ = submit(tmp_path / "results", "1", "--data", str(tmp_path / "nothing"))
    output = encore("follow", str(folder.path), code=1)
    assert folder.experiments()[0].state().status == "failed"
    assert "PodFailurePolicy" in output and "No module named 'torch'" in output


RANK = """
import time
from pathlib import Path
from benchmarks.common.run import stopping
stopping.StopRequest()
stopping.Heartbeat(Path({!r}), 0).beat({})
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("step", "factor"), [(5, 1), (-1, 3)])
def test_pod_ends_hanging_ranks(tmp_path: Path, step: int, factor: int) -> None:
    rank = RANK.format(str(tmp_path / "heartbeat"), step)
    # A rank of an earlier pod, which came further and no longer exists
    write_files(tmp_path, {"heartbeat/rank_1": "7 pod-before 90 1.0 1.0 0"})
    options = ("-m", "benchmarks.common.run.pod", "run", "--output", str(tmp_path), "--hang-seconds", "1")
    command = [sys.executable, *options, "--", sys.executable, "-c", rank]
    process = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 128 + signal.SIGKILL
    pattern = rf"error: rank 0 on \S+ hangs: no step for (\d+) s, and it came least far \(step {step}\)"
    assert [int(seconds) >= factor for seconds in re.findall(pattern, process.stdout)] == [True]
    assert 'File "<string>", line 7' in process.stderr, "the stack of the hanging rank"


def test_pod_keeps_the_head_of_the_log_or_a_checkpointed_log(tmp_path: Path) -> None:
    files = write_files(tmp_path / "files", {"config.json": "{}", "result.txt": "head\n"})
    output, begun = tmp_path / "experiment_0", "head\nrun_start\n"
    for written, expected in (
        ({}, {"result.txt": "head\n"}),
        ({}, {"result.txt": "head\n"}),
        # Evicted after init_stop and before the first record
        ({"result.txt": begun}, {"result.txt": "head\n", "result.txt.discarded": begun}),
        ({"result.txt": begun, "checkpoint/step_8/shared": ""}, {"result.txt": begun, "result.txt.discarded": begun}),
    ):
        pod.prepare(files, write_files(output, written), None)
        assert {path.name: path.read_text(encoding="utf-8") for path in output.glob("result*")} == expected
