"""Manifests, rejected submissions, and workload states."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from encore.kubernetes.api import workload_state
from tests.conftest import Encore
from tests.kubernetes.server import valid

PYTORCH = ("resnet-pytorch", "16", "--nodes", "2")
FILE = """
results = "/shared/results"
data = "/shared/data"
network_interface = "ib0"
[kubernetes]
namespace = "mlperf"
user = 1000
group = 100
host_network = true
hang_seconds = 900
resources = { "rdma/hca" = "8", cpu = "96" }
labels = { "kueue.x-k8s.io/queue-name" = "gpus" }
annotations = { "k8s.v1.cni.cncf.io/networks" = "rdma" }
pod = { nodeSelector = { pool = "h100" } }
[[kubernetes.volumes]]
path = "/shared"
claim = "shared"
"""


Submit = Callable[..., Any]


@pytest.fixture
def submit(encore: Encore) -> Submit:
    # A function for dry runs that returns the objects, or the error if it must fail
    def run(*arguments: str, code: int = 0) -> Any:
        process = encore("submit", *arguments, "--kubernetes", "--dry-run", code=code)
        return process.stderr if code else list(yaml.safe_load_all(process.stdout))

    return run


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_manifest_matches_the_golden_file(
    kind: str, submit: Submit, tmp_path: Path, recorded: Callable[[str, Any], None]
) -> None:
    (tmp_path / "cluster.toml").write_text(FILE, encoding="utf-8")
    site = ("--system", "dgxh100", "--image", "registry.example/team/resnet:1", "--cluster", f"{tmp_path}/cluster.toml")
    objects = submit(*PYTORCH, *site, "--kind", kind, "--env", "API_TOKEN=hidden", "--hang-seconds", "5")
    for content in objects:
        content.pop("data", None)  # the files of the run
        # The CRD of JobSet has no published schema, but the Job in it has
        spec = content["spec"]["replicatedJobs"][0]["template"]["spec"] if content["kind"] == "JobSet" else None
        valid({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": spec} if spec else content)
    text = yaml.safe_dump_all(objects, sort_keys=False)
    assert "hidden" not in text, "the value of the Secret is printed"
    # The caller's user name
    recorded(f"{kind}.yaml", re.sub(r"(name: (LOGNAME|USER)\n +value:) .*", r"\1 NAME", text))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet", "16", "--nodes", "2"), "mxnet uses Horovod"),
        ((*PYTORCH, "--runs", "2"), "can deadlock"),
        (("ncf", "3", "--nodes", "2"), "3 GPUs on 2 nodes"),
        (("ncf",), "no number of GPUs given"),
        (("ncf", "1", "--kind", "jobsets"), "did you mean 'jobset'"),
        (("ncf", "1", "--volume", "shared"), "/FOLDER=CLAIM"),
        (("ncf", "1", "--volume", "/shared=Not_A_Name"), "a claim name"),
        (("ncf", "1", "--notify", "true"), "--notify with --kubernetes"),
        (("ncf", "1", "--no-require-target"), "--require-target with --kubernetes"),
        (("ncf", "1", "--partition", "gpu"), "--partition with Kubernetes"),
        (("ncf", "1", "--runtime", "docker"), "--runtime with --kubernetes"),
        (("ncf", "1", "--time", "1"), "--time 1"),
    ],
)
def test_impossible_submission_is_rejected(submit: Submit, arguments: tuple[str, ...], message: str) -> None:
    assert message in " ".join(submit(*arguments, code=2).split())


def pod(number: int, **status: Any) -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-completion-index": str(number)}
    return {"metadata": {"name": f"pod-{number}", "labels": labels, "creationTimestamp": "1"}, "status": status}


def container(state: str, **details: str) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "node", "state": {state: details}}]}


@pytest.mark.parametrize(
    ("workload", "pods", "expected"),
    [
        ({}, [], ("waiting", "no pod created yet", "")),
        ({"spec": {"suspend": True}}, [], ("waiting", "suspended: not admitted by the queue", "")),
        ({}, [pod(0, **container("running")), pod(1, **container("running"))], ("running", "", "pod-0")),
        (
            {},
            [pod(0, **container("running")), pod(1, **container("waiting", reason="ImagePullBackOff", message="no"))],
            ("waiting", "ImagePullBackOff: no", "pod-0"),
        ),
        ({}, [pod(0, **container("waiting", reason="PodInitializing"))], ("waiting", "pods are starting", "pod-0")),
        (
            {"status": {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}},
            [],
            ("failed", "DeadlineExceeded", ""),
        ),
        ({"status": {"conditions": [{"type": "Completed", "status": "True"}]}}, [], ("succeeded", "", "")),
        (
            {"status": {"conditions": [{"type": "Failed", "status": "False"}]}},
            [],
            ("waiting", "no pod created yet", ""),
        ),
    ],
)
def test_state_of_a_workload(workload: dict[str, Any], pods: list[dict[str, Any]], expected: tuple[str, ...]) -> None:
    assert workload_state(workload, pods) == expected
