"""Sample jobs and containers."""

from pathlib import Path
from typing import Any

from encore import catalogue, configuration
from encore.containers import renderers
from encore.job import Command, Job, training_job
from encore.kubernetes import manifests, settings
from encore.machine import node

RENDERERS = {
    "docker": renderers.docker,
    "podman": renderers.podman,
    "apptainer": renderers.apptainer,
    "enroot": renderers.enroot,
}
DATA = Path("/data/imagenet")
OUTPUT = Path("/results/run/experiment_0")
CALLER = {
    "HOME": "/home/anna",
    "PATH": "/usr/bin:/bin",
    "SECRET_TOKEN": "hidden",
    "PYTHONPATH": "/home/anna/lib",
}


def job(gpus: int, choice: catalogue.Choice | None = None, system: str = "dgxa100") -> Job:
    # Submitted systems first, then studies; 0 GPUs: one core
    choice = choice or catalogue.choose("resnet")
    systems = {kind: [s.system for s in catalogue.systems(choice) if s.kind == kind] for kind in ("submitted", "study")}
    names = systems["submitted"] or systems["study"]
    gpu_system = system if system in names else names[-1]
    name = gpu_system if gpus else choice.benchmark.small_data.system
    resolved = configuration.resolve(choice, catalogue.find_system(choice, name, None), 1, gpus or 1, [])
    return training_job(resolved, DATA, OUTPUT, {"NCCL_DEBUG": "WARN"}, node.cores())


def container(runtime: str, **fields: object) -> renderers.Container:
    images = {"apptainer": "/images/resnet.sif", "enroot": "/images/resnet.sqsh"}
    defaults: dict[str, object] = {
        "image": images.get(runtime, "localhost/encore/resnet:latest"),
        "name": "encore-run-0-0123abcd",
        "user": 1000,
        "group": 1000,
        "caller": CALLER,
        "limits": {"nofile": 1048576, "nproc": 32768},
    }
    return renderers.Container(**{**defaults, **fields})  # type: ignore[arg-type]


def render(runtime: str, gpus: int, **fields: object) -> Command:
    return RENDERERS[runtime](job(gpus), container(runtime, **fields))


def pod(job: Job) -> dict[str, Any]:
    # All volumes are folders on the node
    pods = manifests.Pods(settings=settings.Kubernetes(resources={"memory": "64Gi"}))
    workload, *_ = manifests.render(job, container("kubernetes"), pods, manifests.Files(output=OUTPUT))
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec
