"""Manifests of a run: valid by Kubernetes' schemas, what each kind says, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from encore.kubernetes.api import judged
from encore.kubernetes.settings import Kubernetes
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


def submitted(encore: Encore, *words: str, code: int = 0) -> Any:
    done = encore("submit", *words, "--kubernetes", "--dry-run", code=code)
    return list(yaml.safe_load_all(done.stdout)) if code == 0 else done.stderr


@pytest.fixture
def cluster_file(tmp_path: Path) -> str:
    (tmp_path / "cluster.toml").write_text(FILE, encoding="utf-8")
    return str(tmp_path / "cluster.toml")


def job_in(objects: list[dict[str, Any]]) -> dict[str, Any]:
    # The Job that a workload of any kind makes
    by_kind = {each["kind"]: each for each in objects}
    if "Job" in by_kind:
        return by_kind["Job"]
    runtime = by_kind["TrainingRuntime"]["spec"]["template"] if "TrainingRuntime" in by_kind else by_kind["JobSet"]
    (replicated,) = runtime["spec"]["replicatedJobs"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "job"},
        "spec": replicated["template"]["spec"],
    }


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_every_kind_is_valid_and_meets_at_its_first_pod(encore: Encore, kind: str) -> None:
    objects = submitted(encore, *PYTORCH, "--kind", kind, "--env", "API_TOKEN=hidden")
    for each in (*(each for each in objects if each["apiVersion"] == "v1"), job_in(objects)):
        valid(each)
    spec, name = job_in(objects)["spec"], objects[0]["metadata"]["name"]
    pod = spec["template"]["spec"]
    first = f"{name}-0.{name}" if kind == "job" else f"{name}-node-0-0.{name}"
    assert f"--master-addr={first}" in pod["containers"][0]["args"] and len(first.split(".")[0]) <= 63
    assert (spec["completionMode"], spec["completions"], spec["backoffLimit"]) == ("Indexed", 2, 0)
    assert (pod["restartPolicy"], pod["automountServiceAccountToken"]) == ("Never", False)
    assert {each["name"]: each for each in pod["volumes"]}["shm"]["emptyDir"] == {"medium": "Memory"}
    # A secret's value is in a Secret alone, and not on the screen.
    assert "hidden" not in yaml.safe_dump(objects) and objects[-1]["kind"] == "Secret"
    kinds = [each["kind"] for each in objects]
    assert ("Service" in kinds) == (kind == "job") and ("TrainingRuntime" in kinds) == (kind == "trainjob")


def test_what_follows_a_disruption_and_a_failure(encore: Encore) -> None:
    alone = job_in(submitted(encore, *PYTORCH))["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in alone] == ["Ignore", "Ignore", "FailJob"]
    objects = submitted(encore, *PYTORCH, "--kind", "jobset")
    assert [rule["action"] for rule in job_in(objects)["spec"]["podFailurePolicy"]["rules"]] == ["FailJob", "FailJob"]
    again, fails = objects[0]["spec"]["failurePolicy"]["rules"]
    assert (again["action"], again["onJobFailureReasons"]) == ("RestartJobSet", ["PodFailurePolicy"])
    assert (fails["action"], "onJobFailureReasons" in fails) == ("FailJobSet", False)


def test_the_cluster_file_is_in_the_manifest(encore: Encore, cluster_file: str) -> None:
    words = (*PYTORCH, "--runs", "2", "--system", "dgxh100", "--image", "registry.example/team/resnet:1")
    objects = submitted(encore, *words, "--cluster", cluster_file)
    jobs = [each for each in objects if each["kind"] == "Job"]
    assert len({each["metadata"]["name"] for each in jobs}) == 2
    job = jobs[0]
    valid(job)
    pod = job["spec"]["template"]["spec"]
    (node,) = pod["containers"]
    assert job["metadata"]["namespace"] == "mlperf" and job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert job["spec"]["template"]["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rdma"}
    assert node["resources"]["limits"] == {"rdma/hca": "8", "cpu": "96", "nvidia.com/gpu": "8"}
    assert (pod["hostNetwork"], pod["dnsPolicy"], pod["nodeSelector"]) == (
        True,
        "ClusterFirstWithHostNet",
        {"pool": "h100"},
    )
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == (1000, 100)
    # One claim for both folders, each with its own part of it; the data is read alone.
    assert next(each.get("persistentVolumeClaim") for each in pod["volumes"]) == {"claimName": "shared"}
    seen = {each["mountPath"]: each for each in node["volumeMounts"]}
    assert seen["/shared/data/resnet"]["readOnly"] and seen["/shared/data/resnet"]["subPath"] == "data/resnet"
    assert [each["image"] for each in (node, *pod["initContainers"])] == ["registry.example/team/resnet:1"] * 2
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "=ib0"} in node["env"]
    assert node["args"][node["args"].index("--hang-seconds") + 1] == "900"
    asked = job_in(submitted(encore, *words, "--cluster", cluster_file, "--hang-seconds", "5"))
    assert "5" in asked["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("resnet", "16", "--nodes", "2"), "mxnet trains by Horovod"),
        ((*PYTORCH, "--runs", "2"), "would wait for ever"),
        (("ncf", "3", "--nodes", "2"), "3 GPUs on 2 nodes"),
        (("ncf",), "no number of GPUs given"),
        (("ncf", "1", "--kind", "jobsets"), "did you mean 'jobset'"),
        (("ncf", "1", "--volume", "shared"), "/FOLDER=CLAIM"),
        (("ncf", "1", "--volume", "/shared=Not_A_Name"), "a claim's name"),
        (("ncf", "1", "--notify", "true"), "--notify with --kubernetes"),
        (("ncf", "1", "--no-require-target"), "--require-target with --kubernetes"),
        (("ncf", "1", "--partition", "gpu"), "--partition with Kubernetes"),
        (("ncf", "1", "--runtime", "docker"), "--runtime with --kubernetes"),
        (("ncf", "1", "--time", "1"), "--time 1"),
    ],
)
def test_what_cannot_be_is_refused(encore: Encore, words: tuple[str, ...], message: str) -> None:
    assert message in " ".join(submitted(encore, *words, code=2).split())


def pod(number: int, **status: Any) -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-completion-index": str(number)}
    return {"metadata": {"name": f"pod-{number}", "labels": labels, "creationTimestamp": "1"}, "status": status}


def container(state: str, **more: str) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "node", "state": {state: more}}]}


@pytest.mark.parametrize(
    ("workload", "pods", "expected"),
    [
        ({}, [], ("waiting", "it has no pod yet", "")),
        ({"spec": {"suspend": True}}, [], ("waiting", "suspended: its queue has not admitted it", "")),
        ({}, [pod(0, **container("running")), pod(1, **container("running"))], ("running", "", "pod-0")),
        (
            {},
            [pod(0, **container("running")), pod(1, **container("waiting", reason="ImagePullBackOff", message="no"))],
            ("waiting", "ImagePullBackOff: no", "pod-0"),
        ),
        ({}, [pod(0, **container("waiting", reason="PodInitializing"))], ("waiting", "its pods start", "pod-0")),
        (
            {"status": {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}},
            [],
            ("failed", "DeadlineExceeded", ""),
        ),
        ({"status": {"conditions": [{"type": "Completed", "status": "True"}]}}, [], ("succeeded", "", "")),
        ({"status": {"conditions": [{"type": "Failed", "status": "False"}]}}, [], ("waiting", "it has no pod yet", "")),
    ],
)
def test_state_of_a_workload(workload: dict[str, Any], pods: list[dict[str, Any]], expected: tuple[str, ...]) -> None:
    assert judged(workload, pods) == expected


def test_an_unknown_key_of_the_cluster_file_is_refused(encore: Encore, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[kubernetes]\nnamspace = 'a'\n", encoding="utf-8")
    said = submitted(encore, "ncf", "1", "--cluster", str(tmp_path / "c.toml"), code=2)
    assert "kubernetes.namespace" in said and Kubernetes().namespace == "default"
