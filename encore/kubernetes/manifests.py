"""An experiment as Kubernetes' objects: an Indexed Job, a JobSet or a TrainJob, and what its pods read.

Pure functions, next to those of encore/containers/renderers.py: the same argv, environment, mounts and limits. One pod
a node. An eviction ends the ranks with a checkpoint, and new pods go on from it; a training that failed is not retried.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from encore.containers.renderers import CODE, STACK_BYTES, Container, inside_of
from encore.errors import EncoreError
from encore.job import Job, Mount
from encore.kubernetes.settings import Kind, Kubernetes, Volume
from encore.launchers import ALONE, Launch, by_horovod, on_one_node

Manifest = dict[str, Any]

NODE = "node"  # the container and the replicated job, as Kubeflow's trainer names them
STOP_SECONDS = 120  # between SIGTERM and SIGKILL: enough for a checkpoint on a slow file system
INTERRUPTED = 130  # exit code of benchmarks/common/run/pod.py after a checkpoint
FIRST_PORT, PORTS = 20000, 10000
INDEX = "batch.kubernetes.io/job-completion-index"
FILES = "/encore/experiment"  # where a pod finds the files of its experiment, to be put into its folder
POD = ("python", "-m", "benchmarks.common.run.pod")
API = {
    "job": ("batch/v1", "Job"),
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
}


@dataclass(frozen=True, kw_only=True)
class Pods:
    """What the pods of all experiments of a run have in common."""

    settings: Kubernetes
    kind: Kind = "job"
    nodes: int = 1
    seconds: int | None = None  # time limit; None: none
    restarts: int = 5  # how often a JobSet starts again after a disruption
    prepares: tuple[str, ...] = ()  # command that makes the toy data set before the training; empty: it is there


@dataclass(frozen=True, kw_only=True)
class Files:
    """What is an experiment's own."""

    output: Path  # its folder
    content: Mapping[str, str] = field(default_factory=dict)  # text of config.json and of the head of result.txt
    secrets: frozenset[str] = frozenset()  # variables of the job that go into a Secret


def name_of(benchmark: str, output: Path) -> str:
    """Return ``encore-resnet-0123abcd``: unique, and short enough for the host names of its pods (63 characters)."""
    return f"encore-{benchmark}-{hashlib.sha256(str(output).encode()).hexdigest()[:8]}"


def marks_of(output: Path) -> dict[str, str]:
    """Return the labels of all that belongs to the experiment whose folder is ``output``."""
    return {
        "app.kubernetes.io/name": "encore",
        "app.kubernetes.io/instance": output.parent.name[:63].rstrip("-_."),
        "app.kubernetes.io/component": output.name.replace("_", "-"),
    }


def launch(framework: str, pods: Pods, ranks_per_node: int, name: str, output: str, interface: str) -> Launch:
    """Return all ranks of a pod by the framework's launcher; pods meet at the first one's name.

    Raises:
        EncoreError: Horovod on several pods: none of its launchers reaches another pod without ssh.
    """
    cpus = pods.settings.resources.get("cpu", "")
    cores = int(cpus) if cpus.isdecimal() else None
    if by_horovod(framework):
        if pods.nodes > 1:
            raise EncoreError(
                f"{framework} trains by Horovod, whose launchers reach other nodes by ssh or Slurm, not pods",
                expected=f"one node for {framework} on Kubernetes",
                hint="--nodes 1; an implementation in PyTorch (encore list); or Slurm, without --kubernetes",
            )
        one = on_one_node(framework, ranks_per_node, output)
        return Launch(one.name, inner=one.inner, environment=one.environment, cores=cores)
    if pods.nodes * ranks_per_node == 1:
        return Launch(ALONE.name, cores=cores)
    first = f"{name}-0.{name}" if pods.kind == "job" else f"{name}-{NODE}-0-0.{name}"
    meeting = (f"--nnodes={pods.nodes}", f"--master-addr={first}", f"--master-port={port(name)}")
    options = (f"--nproc-per-node={ranks_per_node}", f"--log-dir={output}/ranks", "--tee=3", "--no-python")
    talks = {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface} if interface else {}
    where = meeting if pods.nodes > 1 else ("--standalone",)
    return Launch("torchrun", inner=("torchrun", *where, *options), environment=talks, cores=cores)


def port(name: str) -> int:
    # Below the ports that Linux gives to outgoing connections, and each run's own where pods share the nodes' network
    return FIRST_PORT + zlib.crc32(name.encode()) % PORTS


def render(job: Job, container: Container, pods: Pods, files: Files) -> tuple[Manifest, ...]:
    """Return the objects of one experiment: the workload first, then what it needs, which goes with it."""
    name, settings, marks = container.name, pods.settings, marks_of(files.output)

    def named(api: str, kind: str, **content: Any) -> Manifest:
        meta = {"name": name, "namespace": settings.namespace, "labels": marks}
        return {"apiVersion": api, "kind": kind, "metadata": meta, **content}

    pod = {"metadata": {"labels": marks}, "spec": {**_pod(job, container, pods, files, marks), **settings.pod}}
    if settings.annotations:
        pod["metadata"]["annotations"] = dict(settings.annotations)
    workload = named(*API[pods.kind], spec=_spec(_job(pods, pod), pods, name))
    workload["metadata"]["labels"] = {**marks, **settings.labels}
    found = [workload]
    if pods.kind == "trainjob":
        template = {
            "template": {"spec": _jobset(_job(pods, pod), pods, "trainer")},
            "mlPolicy": {"numNodes": pods.nodes},
        }
        found.append(named(API["trainjob"][0], "TrainingRuntime", spec=template))
    if pods.kind == "job" and pods.nodes > 1:
        ports = [{"name": "rendezvous", "port": port(name)}]
        # The pods meet before they are ready.
        headless = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": marks, "ports": ports}
        found.append(named("v1", "Service", spec=headless))
    found.append(named("v1", "ConfigMap", data=dict(files.content)))
    secret = {key: job.environment[key] for key in sorted(files.secrets & set(job.environment))}
    return (*found, *([named("v1", "Secret", type="Opaque", stringData=secret)] if secret else []))


class _Plain(yaml.SafeDumper):
    """Writes a text of several lines as a block, and what occurs twice twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)


def as_yaml(objects: Sequence[Manifest]) -> str:
    return str(yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=120))


def _spec(job: Manifest, pods: Pods, name: str) -> Manifest:
    if pods.kind == "job":
        return job
    if pods.kind == "jobset":
        return _jobset(job, pods)
    return {"runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}}


def _jobset(job: Manifest, pods: Pods, step: str = "") -> Manifest:
    # All pods start again together: after a disruption, which the Job's failure policy tells from a failed training
    labels = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": step}}} if step else {}
    rules = [
        {"name": "disrupted", "action": "RestartJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
        {"name": "failed", "action": "FailJobSet"},
    ]
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": pods.restarts, "rules": rules},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {**labels, "spec": job}}],
    }


def _job(pods: Pods, pod: Manifest) -> Manifest:
    # An evicted pod, and its peers, which stop with a checkpoint then. Of a Job they are replaced one by one, of a
    # JobSet all together; any other end is the training's.
    again = "Ignore" if pods.kind == "job" else "FailJob"
    rules: list[Manifest] = [
        {"action": again, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": again, "onExitCodes": {"containerName": NODE, "operator": "In", "values": [INTERRUPTED]}},
    ]
    if pods.kind == "job":
        rules.append({"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}})
    return {
        "completionMode": "Indexed",
        "completions": pods.nodes,
        "parallelism": pods.nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",  # never two pods that write to one folder
        "podFailurePolicy": {"rules": rules},
        **({"activeDeadlineSeconds": pods.seconds} if pods.seconds else {}),
        "template": pod,
    }


def _pod(job: Job, container: Container, pods: Pods, files: Files, marks: Mapping[str, str]) -> Manifest:
    settings, name, output = pods.settings, container.name, files.output
    data = next((each.source for each in job.mounts if each.read_only), None)
    # The results of a run are below a folder that is there.
    volumes = Volumes(settings.volumes, output.parent.parent, *filter(None, [data]))
    mounts = [volumes.mount(each) for each in job.mounts]
    first = {"name": "experiment", "mountPath": FILES, "readOnly": True}
    passport = ("--data", f"{data}/dataset.json") if data else ()
    prepared = (*POD, "prepare", "--files", FILES, "--output", str(output), *passport)
    inside = inside_of(job, container)
    inside.pop("CUDA_VISIBLE_DEVICES", None)  # of the machine that submits
    plain = {key: value for key, value in {**inside, **job.environment}.items() if key not in files.secrets}
    number = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}}
    secret = [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
        for key in sorted(files.secrets & set(job.environment))
    ]
    same = {
        "image": container.image,
        "imagePullPolicy": "IfNotPresent",
        "workingDir": CODE,
        "env": [number, *({"name": key, "value": value} for key, value in sorted(plain.items())), *secret],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            **({"capabilities": {"drop": ["ALL"]}} if container.user else {}),
        },
    }
    limits = {**settings.resources, **({settings.gpu_resource: str(job.gpus)} if job.gpus else {})}
    limited = ("--stack", str(STACK_BYTES), "--hang-seconds", f"{settings.hang_seconds:g}")
    pinned = ["--pinned"] if job.gpus else []
    watched = (*POD, "run", "--output", str(output), *limited, *pinned, "--", *job.argv)
    memory = [] if settings.host_ipc else [{"name": "shm", "mountPath": "/dev/shm"}]
    # What docker's --shm-size is for a single rank; several talk through it, NCCL as well as DALI's processes.
    size = {} if job.ranks > 1 else {"sizeLimit": "1Gi"}
    # Neither the toy data set nor the experiment's folder is there before: a volume is mounted whole to make them.
    starts = []
    if pods.prepares and data:
        whole = volumes.mount(Mount(volumes.root(data), str(volumes.root(data)), False))
        starts.append({"name": "data", **same, "args": [*pods.prepares], "volumeMounts": [whole]})
    results = volumes.mount(Mount(volumes.root(output), str(volumes.root(output)), False))
    starts.append({"name": "prepare", **same, "args": [*prepared], "volumeMounts": [first, results, *mounts[:1]]})
    container_of = {"name": NODE, **same, "args": [*watched], "volumeMounts": [*mounts, *memory]}
    if limits:
        container_of["resources"] = {"limits": limits}
    shared = {"name": "shm", "emptyDir": {"medium": "Memory", **size}}
    host = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if settings.host_network else {}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # they would add variables of every service of the namespace
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_SECONDS,
        **({"subdomain": name} if pods.kind == "job" and pods.nodes > 1 else {}),
        **host,
        **({"hostIPC": True} if settings.host_ipc else {}),
        **({"affinity": _apart(marks)} if pods.nodes > 1 else {}),
        "securityContext": {
            "runAsUser": container.user,
            "runAsGroup": container.group,
            **({"runAsNonRoot": True} if container.user else {}),
            "fsGroup": container.group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": starts,
        "containers": [container_of],
        "volumes": [
            *volumes.listed(),
            {"name": "experiment", "configMap": {"name": name}},
            *([shared] if memory else []),
        ],
    }


def _apart(marks: Mapping[str, str]) -> Manifest:
    term = {"labelSelector": {"matchLabels": dict(marks)}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


class Volumes:
    """The volumes of a pod, as its mounts ask for them: the named one that holds a folder, else the node's folder."""

    def __init__(self, named: tuple[Volume, ...], *folders: Path) -> None:
        self._named = sorted(named, key=lambda each: -len(each.path.parts))  # the deepest first
        self._folders = folders
        self._written: dict[Volume, bool] = {}  # whether a mount of it is written to

    def _holding(self, path: Path) -> Volume:
        found = next((each for each in self._named if path.is_relative_to(each.path)), None)
        return found or Volume(path=next((each for each in self._folders if path.is_relative_to(each)), path))

    def root(self, path: Path) -> Path:
        return self._holding(path).path

    def mount(self, mount: Mount) -> Manifest:
        found = self._holding(mount.source)
        self._written[found] = self._written.get(found, False) or not mount.read_only
        inner = mount.source.relative_to(found.path)
        return {
            "name": f"volume-{[*self._written].index(found)}",
            "mountPath": mount.target,
            **({"readOnly": True} if mount.read_only else {}),
            **({"subPath": str(inner)} if inner.parts else {}),
        }

    def listed(self) -> list[Manifest]:
        found = []
        for number, (each, written) in enumerate(self._written.items()):
            # A cluster changes the owner of a claim that may be written to.
            claim = {"claimName": each.claim, **({} if written else {"readOnly": True})}
            kind = {"type": "Directory"} if each.path in self._folders else {}  # weights may be a file
            host = {"hostPath": {"path": str(each.path), **kind}}
            found.append({"name": f"volume-{number}", **({"persistentVolumeClaim": claim} if each.claim else host)})
        return found
