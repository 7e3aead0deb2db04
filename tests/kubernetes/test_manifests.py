"""Manifests, rejected submissions, and workload states."""

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
    """Return a function for dry runs that returns the objects, or the error if it must fail."""

    def run(*arguments: str, code: int = 0) -> Any:
        process = encore("submit", *arguments, "--kubernetes", "--dry-run", code=code)
        return process.stderr if code else list(yaml.safe_load_all(process.stdout))

    return run


def job_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the Job that any kind of workload creates."""
    kinds = {content["kind"]: content for content in objects}
    if "Job" in kinds:
        return kinds["Job"]
    (replicated,) = kinds["JobSet"]["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": spec}


DISRUPTED_JOB, DISRUPTED_CHILD = ["Ignore", "Ignore", "FailJob"], ["FailJob", "FailJob"]


@pytest.mark.parametrize(
    ("kind", "kinds", "first_pod", "actions"),
    [
        ("job", ["Service", "ConfigMap", "Job", "Secret"], "{0}-0.{0}", DISRUPTED_JOB),
        ("jobset", ["ConfigMap", "JobSet", "Secret"], "{0}-node-0-0.{0}", DISRUPTED_CHILD),
    ],
)
def test_manifest_of_every_kind(
    submit: Submit, kind: str, kinds: list[str], first_pod: str, actions: list[str]
) -> None:
    objects = submit(*PYTORCH, "--kind", kind, "--env", "API_TOKEN=hidden")
    job = job_of(objects)
    for content in (*(content for content in objects if content["apiVersion"] == "v1"), job):
        valid(content)
    spec, pod, host = job["spec"], job["spec"]["template"]["spec"], first_pod.format(objects[0]["metadata"]["name"])
    assert f"--master-addr={host}" in pod["containers"][0]["args"] and len(host.split(".")[0]) <= 63
    assert (spec["completionMode"], spec["completions"], spec["backoffLimit"]) == ("Indexed", 2, 0)
    assert (pod["restartPolicy"], pod["automountServiceAccountToken"]) == ("Never", False)
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == actions
    # The Secret with the value is not printed.
    assert sorted(content["kind"] for content in objects) == sorted(kinds) and "hidden" not in yaml.safe_dump(objects)


def test_jobset_restarts_after_a_disruption_and_fails_otherwise(submit: Submit) -> None:
    restart, fail = submit(*PYTORCH, "--kind", "jobset")[0]["spec"]["failurePolicy"]["rules"]
    assert (restart["action"], restart["onJobFailureReasons"]) == ("RestartJobSet", ["PodFailurePolicy"])
    assert (fail["action"], "onJobFailureReasons" in fail) == ("FailJobSet", False)


def test_cluster_file_sets_fields_of_the_manifest(submit: Submit, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE, encoding="utf-8")
    image = "registry.example/team/resnet:1"
    options = (*PYTORCH, "--runs", "2", "--system", "dgxh100", "--image", image, "--cluster", str(file))
    jobs = [content for content in submit(*options) if content["kind"] == "Job"]
    assert len({job["metadata"]["name"] for job in jobs}) == 2
    job = jobs[0]
    valid(job)
    metadata, template = job["metadata"], job["spec"]["template"]
    pod = template["spec"]
    (node,) = pod["containers"]
    assert metadata["namespace"] == "mlperf" and metadata["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert template["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rdma"}
    assert node["resources"]["limits"] == {"rdma/hca": "8", "cpu": "96", "nvidia.com/gpu": "8"}
    assert (pod["hostNetwork"], pod["dnsPolicy"], pod["nodeSelector"]) == (
        True, "ClusterFirstWithHostNet", {"pool": "h100"},
    )  # fmt: skip
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == (1000, 100)
    # The claim has both folders, mounted by their paths in it; the data set is read-only.
    assert [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume] == [
        {"claimName": "shared"}
    ]
    mount = next(mount for mount in node["volumeMounts"] if mount["mountPath"] == "/shared/data/resnet")
    assert (mount["readOnly"], mount["subPath"]) == (True, "data/resnet")
    assert [container["image"] for container in (node, *pod["initContainers"])] == [image] * 2
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "=ib0"} in node["env"]
    arguments = [node["args"], job_of(submit(*options, "--hang-seconds", "5"))["spec"]["template"]["spec"]]
    arguments[1] = arguments[1]["containers"][0]["args"]
    assert [words[words.index("--hang-seconds") + 1] for words in arguments] == ["900", "5"]


def test_unknown_key_in_the_cluster_file_is_rejected(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("[kubernetes]\nnamspace = 'a'\n", encoding="utf-8")
    assert "kubernetes.namespace" in submit("ncf", "1", "--cluster", str(tmp_path / "cluster.toml"), code=2)


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
