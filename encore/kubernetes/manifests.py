"""Kubernetes manifests: an Indexed Job or a JobSet per experiment, and the files of the pods.

Pure functions. Command, environment, mounts and limits are the same as in encore/containers/renderers.py. One pod
per node. After an eviction the ranks write a checkpoint and new pods resume; a failed training is not retried.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from encore.containers.renderers import CODE, STACK_BYTES, Container, container_variables
from encore.errors import EncoreError
from encore.job import Job, Mount
from encore.kubernetes.settings import Kind, Kubernetes, Volume
from encore.launchers import ALONE, Launch, by_horovod, on_one_node

Manifest = dict[str, Any]

NODE = "node"  # Name of the container and of the replicated job
STOP_SECONDS = 120  # between SIGTERM and SIGKILL: enough for a checkpoint on a slow file system
INTERRUPTED = 130  # exit code of benchmarks/common/run/pod.py after a checkpoint
FIRST_PORT, PORTS = 20000, 10000
INDEX = "batch.kubernetes.io/job-completion-index"
FILES = "/encore/experiment"  # Folder in a pod with the input files of the experiment
POD = ("python", "-m", "benchmarks.common.run.pod")
API = {
    "job": ("batch/v1", "Job"),
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
}


@dataclass(frozen=True, kw_only=True)
class Pods:
    """Settings shared by the pods of all experiments."""

    settings: Kubernetes
    kind: Kind = "job"
    nodes: int = 1
    seconds: int | None = None  # time limit; None: none
    restarts: int = 5  # Maximum number of JobSet restarts after disruptions
    prepares: tuple[str, ...] = ()  # command that makes the toy data set before the training; empty: it is there


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files of an experiment."""

    output: Path  # Experiment folder
    content: Mapping[str, str] = field(default_factory=dict)  # text of config.json and of the header of result.txt
    secrets: frozenset[str] = frozenset()  # variables of the job that go into a Secret


def name_of(benchmark: str, output: Path) -> str:
    """Return a unique name such as ``encore-resnet-0123abcd``, short enough for pod host names (63 characters)."""
    return f"encore-{benchmark}-{hashlib.sha256(str(output).encode()).hexdigest()[:8]}"


def labels_of(output: Path) -> dict[str, str]:
    """Labels of all objects of the experiment in ``output``."""
    return {
        "app.kubernetes.io/name": "encore",
        "app.kubernetes.io/instance": output.parent.name[:63].rstrip("-_."),
        "app.kubernetes.io/component": output.name.replace("_", "-"),
    }


def launch(framework: str, pods: Pods, ranks_per_node: int, name: str, output: str, interface: str) -> Launch:
    """Launch a pod's ranks, with the rendezvous at the first pod.

    Raises:
        EncoreError: Horovod on multiple pods, which needs ssh.
    """
    cpus = pods.settings.resources.get("cpu", "")
    cores = int(cpus) if cpus.isdecimal() else None
    if by_horovod(framework):
        if pods.nodes > 1:
            raise EncoreError(
                f"{framework} uses Horovod, which needs ssh or Slurm on multiple nodes, not pods",
                expected=f"one node for {framework} on Kubernetes",
                hint="--nodes 1; an implementation in PyTorch (encore list); or Slurm, without --kubernetes",
            )
        single = on_one_node(framework, ranks_per_node, output)
        return Launch(single.name, inner=single.inner, environment=single.environment, cores=cores)
    if pods.nodes * ranks_per_node == 1:
        return Launch(ALONE.name, cores=cores)
    first = f"{name}-0.{name}" if pods.kind == "job" else f"{name}-{NODE}-0-0.{name}"
    nodes_options = (f"--nnodes={pods.nodes}", f"--master-addr={first}", f"--master-port={port(name)}")
    options = (f"--nproc-per-node={ranks_per_node}", f"--log-dir={output}/ranks", "--tee=3", "--no-python")
    variables = {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface} if interface else {}
    rendezvous = nodes_options if pods.nodes > 1 else ("--standalone",)
    return Launch("torchrun", inner=("torchrun", *rendezvous, *options), environment=variables, cores=cores)


def port(name: str) -> int:
    # Below the Linux range of ephemeral ports; different per run, because pods may share the host network
    return FIRST_PORT + zlib.crc32(name.encode()) % PORTS


def render(job: Job, container: Container, pods: Pods, files: Files) -> tuple[Manifest, ...]:
    """Return an experiment's objects: the workload, then the dependencies that are deleted with it."""
    name, settings, labels = container.name, pods.settings, labels_of(files.output)

    def manifest(api: str, kind: str, **content: Any) -> Manifest:
        meta = {"name": name, "namespace": settings.namespace, "labels": labels}
        return {"apiVersion": api, "kind": kind, "metadata": meta, **content}

    pod = {"metadata": {"labels": labels}, "spec": {**_pod(job, container, pods, files, labels), **settings.pod}}
    if settings.annotations:
        pod["metadata"]["annotations"] = dict(settings.annotations)
    spec = _job(pods, pod)
    workload = manifest(*API[pods.kind], spec=spec if pods.kind == "job" else _jobset(spec, pods))
    workload["metadata"]["labels"] = {**labels, **settings.labels}
    objects = [workload]
    if pods.kind == "job" and pods.nodes > 1:
        ports = [{"name": "rendezvous", "port": port(name)}]
        # The pods meet before they are ready.
        headless = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels, "ports": ports}
        objects.append(manifest("v1", "Service", spec=headless))
    objects.append(manifest("v1", "ConfigMap", data=dict(files.content)))
    secret = {key: job.environment[key] for key in sorted(files.secrets & set(job.environment))}
    return (*objects, *([manifest("v1", "Secret", type="Opaque", stringData=secret)] if secret else []))


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as blocks, without YAML aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def as_yaml(objects: Sequence[Manifest]) -> str:
    return str(yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120))


def _jobset(job: Manifest, pods: Pods) -> Manifest:
    # Restart all pods together after a disruption, which the Job's failure policy distinguishes from a failed training
    rules = [
        {"name": "disrupted", "action": "RestartJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
        {"name": "failed", "action": "FailJobSet"},
    ]
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": pods.restarts, "rules": rules},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}],
    }


def _job(pods: Pods, pod: Manifest) -> Manifest:
    # Evicted pods and their peers, which write a checkpoint and exit. A Job replaces pods one by one, a JobSet restarts
    # all pods. Any other failure is a failed training.
    on_disruption = "Ignore" if pods.kind == "job" else "FailJob"
    rules: list[Manifest] = [
        {"action": on_disruption, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": on_disruption, "onExitCodes": {"containerName": NODE, "operator": "In", "values": [INTERRUPTED]}},
    ]
    if pods.kind == "job":
        rules.append({"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}})
    return {
        "completionMode": "Indexed",
        "completions": pods.nodes,
        "parallelism": pods.nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",  # Prevents two pods from writing to the same folder
        "podFailurePolicy": {"rules": rules},
        **({"activeDeadlineSeconds": pods.seconds} if pods.seconds else {}),
        "template": pod,
    }


def _pod(job: Job, container: Container, pods: Pods, files: Files, labels: Mapping[str, str]) -> Manifest:
    settings, name, output = pods.settings, container.name, files.output
    data = next((mount.source for mount in job.mounts if mount.read_only), None)
    # The results folder exists on the node; the run folder may not.
    volumes = Volumes(settings.volumes, output.parent.parent, *filter(None, [data]))
    mounts = [volumes.mount(mount) for mount in job.mounts]
    files_mount = {"name": "experiment", "mountPath": FILES, "readOnly": True}
    manifest_options = ("--data", f"{data}/dataset.json") if data else ()
    prepare = (*POD, "prepare", "--files", FILES, "--output", str(output), *manifest_options)
    variables = container_variables(job, container)
    variables.pop("CUDA_VISIBLE_DEVICES", None)  # of the machine that submits
    plain = {key: value for key, value in {**variables, **job.environment}.items() if key not in files.secrets}
    rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}}
    secret = [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
        for key in sorted(files.secrets & set(job.environment))
    ]
    common = {
        "image": container.image,
        "imagePullPolicy": "IfNotPresent",
        "workingDir": CODE,
        "env": [rank, *({"name": key, "value": value} for key, value in sorted(plain.items())), *secret],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            **({"capabilities": {"drop": ["ALL"]}} if container.user else {}),
        },
    }
    limits = {**settings.resources, **({settings.gpu_resource: str(job.gpus)} if job.gpus else {})}
    run_options = ("--stack", str(STACK_BYTES), "--hang-seconds", f"{settings.hang_seconds:g}")
    pinned = ["--pinned"] if job.gpus else []
    run = (*POD, "run", "--output", str(output), *run_options, *pinned, "--", *job.argv)
    memory = [] if settings.host_ipc else [{"name": "shm", "mountPath": "/dev/shm"}]
    # Default of docker --shm-size for a single rank. With more ranks, NCCL and DALI processes also use it.
    size = {} if job.ranks > 1 else {"sizeLimit": "1Gi"}
    # The toy data set and the experiment folder may not exist yet, so the root of the volume is mounted.
    init_containers = []
    if pods.prepares and data:
        volume_root = volumes.mount(Mount(volumes.root(data), str(volumes.root(data)), False))
        init_containers.append({"name": "data", **common, "args": [*pods.prepares], "volumeMounts": [volume_root]})
    results = volumes.mount(Mount(volumes.root(output), str(volumes.root(output)), False))
    init_containers.append(
        {"name": "prepare", **common, "args": [*prepare], "volumeMounts": [files_mount, results, *mounts[:1]]}
    )
    node = {"name": NODE, **common, "args": [*run], "volumeMounts": [*mounts, *memory]}
    if limits:
        node["resources"] = {"limits": limits}
    shared = {"name": "shm", "emptyDir": {"medium": "Memory", **size}}
    term = {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": "kubernetes.io/hostname"}
    apart = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    host = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if settings.host_network else {}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # they would add variables of every service of the namespace
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_SECONDS,
        **({"subdomain": name} if pods.kind == "job" and pods.nodes > 1 else {}),
        **host,
        **({"hostIPC": True} if settings.host_ipc else {}),
        **({"affinity": {"podAntiAffinity": apart}} if pods.nodes > 1 else {}),
        "securityContext": {
            "runAsUser": container.user,
            "runAsGroup": container.group,
            **({"runAsNonRoot": True} if container.user else {}),
            "fsGroup": container.group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": init_containers,
        "containers": [node],
        "volumes": [
            *volumes.manifests(),
            {"name": "experiment", "configMap": {"name": name}},
            *([shared] if memory else []),
        ],
    }


class Volumes:
    """Pod volumes, created by mounts: the configured volume that contains the folder, or a hostPath."""

    def __init__(self, volumes: tuple[Volume, ...], *folders: Path) -> None:
        self._named = sorted(volumes, key=lambda volume: -len(volume.path.parts))  # the deepest first
        self._folders = folders
        self._written: dict[Volume, bool] = {}  # whether a mount of it is written to

    def _volume_of(self, path: Path) -> Volume:
        volume = next((candidate for candidate in self._named if path.is_relative_to(candidate.path)), None)
        return volume or Volume(
            path=next((candidate for candidate in self._folders if path.is_relative_to(candidate)), path)
        )

    def root(self, path: Path) -> Path:
        return self._volume_of(path).path

    def mount(self, mount: Mount) -> Manifest:
        volume = self._volume_of(mount.source)
        self._written[volume] = self._written.get(volume, False) or not mount.read_only
        subpath = mount.source.relative_to(volume.path)
        return {
            "name": f"volume-{[*self._written].index(volume)}",
            "mountPath": mount.target,
            **({"readOnly": True} if mount.read_only else {}),
            **({"subPath": str(subpath)} if subpath.parts else {}),
        }

    def manifests(self) -> list[Manifest]:
        volumes = []
        for number, (volume, is_writable) in enumerate(self._written.items()):
            # Kubernetes changes the ownership of writable claims (fsGroup).
            claim = {"claimName": volume.claim, **({} if is_writable else {"readOnly": True})}
            kind = {"type": "Directory"} if volume.path in self._folders else {}  # weights may be a file
            host = {"hostPath": {"path": str(volume.path), **kind}}
            volumes.append({"name": f"volume-{number}", **({"persistentVolumeClaim": claim} if volume.claim else host)})
        return volumes
