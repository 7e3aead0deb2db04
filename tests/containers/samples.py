"""Jobs and containers that several tests render."""

from pathlib import Path
from typing import Any

from encore import catalogue, configuration
from encore.catalogue import Choice
from encore.containers import renderers
from encore.containers.renderers import Container
from encore.job import Command, Job, training_job
from encore.kubernetes import manifests
from encore.kubernetes.manifests import Files, Pods
from encore.kubernetes.settings import Kubernetes
from encore.machine import node

RENDERERS = {
    "docker": renderers.docker,
    "podman": renderers.podman,
    "apptainer": renderers.apptainer,
    "enroot": renderers.enroot,
}
DATA = Path("/data/imagenet")
OUTPUT = Path("/results/run/experiment_0")
# Kinds of systems to take a sample of: a benchmark that MLPerf has not has studies alone
ON_GPUS = ("submitted", "study")
CALLER = {
    "HOME": "/home/anna",
    "PATH": "/usr/bin:/bin",
    "SECRET_TOKEN": "hidden",
    "PYTHONPATH": "/home/anna/lib",
}


def job(gpus: int, choice: Choice | None = None, system: str = "dgxa100") -> Job:
    # A benchmark's job on this many GPUs, or on one core for 0
    chosen = choice or catalogue.choose("resnet")
    of_kind = {kind: [each.system for each in catalogue.systems(chosen) if each.kind == kind] for kind in ON_GPUS}
    there = next(systems for systems in of_kind.values() if systems)
    of_gpus = system if system in there else there[-1]
    name = of_gpus if gpus else chosen.benchmark.small_data.system
    resolved = configuration.resolve(chosen, catalogue.find_system(chosen, name, None), 1, gpus or 1, [])
    return training_job(resolved, DATA, OUTPUT, {"NCCL_DEBUG": "WARN"}, node.cores())


def container(runtime: str, **facts: object) -> Container:
    # A container of the user 1000 in which nothing is special
    image = {"apptainer": "/images/resnet.sif", "enroot": "/images/resnet.sqsh"}
    known: dict[str, object] = {
        "image": image.get(runtime, "localhost/encore/resnet:latest"),
        "name": "encore-run-0-0123abcd",
        "user": 1000,
        "group": 1000,
        "caller": CALLER,
        "limits": {"nofile": 1048576, "nproc": 32768},
    }
    return Container(**{**known, **facts})  # type: ignore[arg-type]


def rendered(runtime: str, gpus: int, **facts: object) -> Command:
    # A job of this many GPUs on a runtime
    return RENDERERS[runtime](job(gpus), container(runtime, **facts))


def pod(job: Job) -> dict[str, Any]:
    # The pod of a job, where every volume is the node's own folder
    pods = Pods(settings=Kubernetes(resources={"memory": "64Gi"}))
    workload, *_ = manifests.render(job, container("kubernetes"), pods, Files(output=OUTPUT))
    found: dict[str, Any] = workload["spec"]["template"]["spec"]
    return found
