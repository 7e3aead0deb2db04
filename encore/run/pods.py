"""Submission of runs to Kubernetes: options, manifests, and workloads."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from encore import data as data_sets
from encore.containers import building
from encore.containers.renderers import Container
from encore.containers.runtimes import Target
from encore.errors import EncoreError, unknown_name
from encore.job import Command, Job, Mount
from encore.kubernetes import manifests
from encore.kubernetes.api import Connection
from encore.kubernetes.manifests import Files, Manifest, Pods
from encore.kubernetes.settings import KINDS, Kind, Kubernetes, Volume
from encore.machine import preflight
from encore.machine.node import Gpu, Node
from encore.run import hints, planning, run_folder, run_metadata, runner, workloads
from encore.run.planning import Plan, Request
from encore.run.run_folder import ExperimentState, RunFolder
from encore.run.submission import LEAST_MINUTES, MAX_NODES, MOST_MINUTES, dummy_allocation
from encore.slurm import cluster as clusters
from encore.slurm import script

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"  # Kueue label. Kueue starts a workload when all of its pods fit.
UNSEEN = "(Kubernetes)"  # Placeholder at submission; a pod reports the actual node


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``encore submit --kubernetes`` in addition to the run. None: value of cluster.toml."""

    kind: str | None = None
    nodes: int | None = None
    volumes: tuple[Volume, ...] = ()
    minutes: int | None = None
    hang_seconds: float | None = None


def prepare(request: Request, options: Options) -> tuple[Plan, script.Estimate]:
    """Resolve all choices without contacting the cluster. ``auto`` means Job until the cluster was queried."""
    cluster, file = clusters.load(request.cluster)
    settings = cluster.kubernetes
    kind = options.kind or settings.kind
    if kind not in KINDS:
        raise unknown_name("kind", kind, KINDS)
    nodes = 1 if options.nodes is None else options.nodes
    _refuse(request, settings, cluster, nodes, options.minutes)
    hang_seconds = settings.hang_seconds if options.hang_seconds is None else options.hang_seconds
    changes = {"volumes": (*options.volumes, *settings.volumes), "hang_seconds": hang_seconds}
    settings = settings.model_copy(update=changes)
    per_node = cast("int", request.gpus) // nodes
    pod_request = replace(request, gpus=None, runtime="host", cluster=file, drop_caches=False)
    plan = planning.make_plan(pod_request, allocation=dummy_allocation(nodes, per_node, 0))
    choice, small = plan.configuration.choice, plan.configuration.system.kind == "small"
    makes = small and request.data is None
    data = plan.results / "toy" / choice.benchmark.name if makes else plan.data
    prepares = data_sets.prepare_command("python", choice.benchmark.name, data, data_sets.Preparation())
    estimate = script.estimate(plan.configuration, 1, options.minutes)
    pods = Pods(
        settings=settings,
        kind=cast("Kind", "job" if kind == "auto" else kind),
        nodes=nodes,
        seconds=estimate.minutes * 60 if estimate.minutes else None,
        restarts=cluster.max_requeues,
        prepares=tuple(prepares) if makes else (),
    )
    image = request.image or cluster.image or building.image_name(choice)
    if image.startswith(("/", ".")):
        name = "an image in a registry that the nodes can pull from"
        raise EncoreError(f"image {image}", expected=name, hint="--image HOST/TEAM/NAME:TAG")
    target = Target(runtime="kubernetes", image=image)
    return replace(plan, allocation=None, data=data, makes_small_data=False, target=target, pods=pods), estimate


def _refuse(request: Request, settings: Kubernetes, cluster: clusters.Cluster, nodes: int, minutes: int | None) -> None:
    gpus = request.gpus
    if gpus is None:
        raise EncoreError("no number of GPUs given", expected=f"encore submit {request.name} GPUS --kubernetes")
    if not 1 <= nodes <= MAX_NODES:
        raise EncoreError(f"--nodes {nodes}", expected=f"1 to {MAX_NODES}")
    if gpus % nodes or gpus < 1:
        raise EncoreError(
            f"{gpus} GPUs on {nodes} nodes", expected="the same number on every node", hint=f"a multiple of {nodes}"
        )
    if minutes is not None and not LEAST_MINUTES <= minutes <= MOST_MINUTES:
        raise EncoreError(f"--time {minutes}", expected=f"{LEAST_MINUTES} to {MOST_MINUTES} minutes")
    unsupported = {
        "--runtime": request.runtime,
        "--python": request.python,
        "--hosts": request.hosts,
        "--drop-caches": request.drop_caches,
    }
    for option, value in unsupported.items():
        if value:
            raise EncoreError(
                f"{option} with --kubernetes", expected="only --image: pods run in containers", hint="leave it out"
            )
    if request.system is None and cluster.gpus_per_node:
        raise EncoreError(
            "no system given; the GPUs of the nodes cannot be detected here",
            hint=f"--system dgxa100, or another system from: encore list {request.name}",
        )
    if request.runs > 1 and nodes > 1 and QUEUE_LABEL not in settings.labels:
        raise EncoreError(
            f"--runs {request.runs} on {nodes} nodes: the runs are separate workloads, which can "
            "deadlock while they wait for nodes",
            expected="Kueue, which starts a workload only if all pods fit: "
            f"{QUEUE_LABEL} = QUEUE in kubernetes.labels of cluster.toml",
            hint="or --runs 1, one run at a time",
        )


def pods_of(plan: Plan) -> Pods:
    assert plan.pods is not None
    return plan.pods


def objects(plan: Plan, output: Path, content: dict[str, str]) -> tuple[Manifest, ...]:
    """Return the manifests of the experiment with folder ``output``."""
    pods = pods_of(plan)
    job, settings = _with_shards(runner.job_of(plan, output)), pods.settings
    container = Container(
        image=plan.target.image,
        name=manifests.name_of(plan.configuration.choice.name, output),
        user=os.getuid() if settings.user is None else settings.user,
        group=os.getgid() if settings.group is None else settings.group,
        caller=os.environ,
    )
    secrets = frozenset(name for name, value in job.environment.items() if run_metadata.is_secret(name, value))
    return manifests.render(job, container, pods, Files(output=output, content=content, secrets=secrets))


def _with_shards(job: Job) -> Job:
    # Shards named by an index of weights may exist only on the cluster's volume, so mount their folder.
    ends = (".index", ".safetensors.index.json")
    parents = [mount.source.parent for mount in job.mounts if mount.read_only and mount.source.name.endswith(ends)]
    mounts = [mount for mount in job.mounts if not (mount.read_only and mount.source.parent in parents)]
    return replace(job, mounts=(*mounts, *(Mount(folder, str(folder), True) for folder in dict.fromkeys(parents))))


def preview(plan: Plan, folder: RunFolder | None = None) -> list[Manifest]:
    """Return a submission's manifests without secret values. TIME replaces a new run's timestamp."""
    rendered: list[Manifest] = []
    path = Path(folder.metadata()["kubernetes"]["folder"]) if folder else plan.results / f"TIME-{plan.label}"
    for number, seed in enumerate(plan.seeds):
        config = {**plan.configuration.plain(), "seed": seed}
        # The head of the log has the time of the submission.
        content = {"config.json": json.dumps(config, indent=2) + "\n", "result.txt": ""}
        rendered += objects(plan, path / f"experiment_{number}", content)
    for secret in (secret for secret in rendered if secret["kind"] == "Secret"):
        secret["stringData"] = dict.fromkeys(secret["stringData"], run_metadata.REDACTED)
    return rendered


def unknown_node(plan: Plan) -> Node:
    gpu = Gpu(index=0, name=f"GPU {UNSEEN}", memory_gib=0, driver="", compute_capability=None)
    gpus = (gpu,) if plan.configuration.get("device") == "gpu" else ()
    return Node(
        hostname="", operating_system="", kernel="", cpu=f"CPU {UNSEEN}", sockets=None, cores=0, memory_gib=0, gpus=gpus
    )


def checks(plan: Plan) -> list[preflight.Check]:
    """Check from this machine whether nodes can pull the image and whether results and data are on a volume."""
    data = plan.data
    results: list[preflight.Check] = []
    if plan.target.image.startswith("localhost/"):
        hint = f"make push-{plan.configuration.choice.name} REGISTRY=HOST/TEAM, then --image with the printed name"
        results.append(preflight.Check("WARN", "image", f"{plan.target.image} exists on this machine only", hint))
    for name, folder in (("data", data), ("results", plan.results)):
        if not any(folder.is_relative_to(volume.path) for volume in pods_of(plan).settings.volumes):
            hint = "--volume FOLDER=CLAIM, or kubernetes.volumes in cluster.toml"
            results.append(
                preflight.Check("WARN", name, f"{folder} must exist on every node, because it is not on a volume", hint)
            )
    if (data / data_sets.PASSPORT).exists():
        results.append(preflight.check_data_set(plan.configuration, data)[0])
    return results


def connect(plan: Plan) -> Connection:
    return Connection(pods_of(plan).settings)


def select_kind(plan: Plan, kind: str, connection: Connection) -> Plan:
    """Select a workload kind that the cluster supports; ``auto`` prefers JobSet for several nodes."""
    pods = pods_of(plan)
    if kind == "auto":
        several = pods.nodes > 1 and connection.serves("jobset")
        return replace(plan, pods=replace(pods, kind="jobset" if several else "job"))
    if not connection.serves(pods.kind):
        raise EncoreError(
            f"the cluster has no {manifests.API[pods.kind][1]} ({manifests.API[pods.kind][0]})",
            expected="its controller, installed by the cluster administrator",
            hint="--kind job, which every cluster supports",
        )
    return plan


def create(plan: Plan, context: str = "") -> RunFolder:
    """Create the run folder on this machine. The manifests carry the files that the pods need.

    ``context`` is the kubeconfig context of the submission. It is stored because the current context may change.
    """
    pods, machine, seeds = pods_of(plan), unknown_node(plan), list(plan.seeds)
    data_folder = str(plan.data)
    data_set: run_metadata.DataFacts = {
        "id": "",
        "name": "a data set of the cluster",
        "folder": data_folder,
        "counts": {},
    }
    if (plan.data / data_sets.PASSPORT).exists():
        manifest = data_sets.check_data(plan.data, plan.configuration.choice.benchmark.name)
        data_set = run_metadata.data_facts(manifest, data_folder)

    def content(path: Path) -> dict[str, Any]:
        job = runner.job_of(plan, path / "experiment_0")
        command = Command(argv=job.argv, environment=job.environment, working_directory=path, runtime="kubernetes")
        target = (plan.target.runtime, plan.target.as_json())
        return {
            **run_metadata.describe(plan.configuration, command, data_set, machine, seeds, *target),
            "drop_caches": False,
            "extra_environment": run_metadata.redact(plan.extra_environment),
            "kubernetes": {
                "folder": str(path),
                "settings": {**pods.settings.model_dump(mode="json"), "context": context},
                "kind": pods.kind,
                "seconds": pods.seconds,
                "prepares": list(pods.prepares),
                "user": os.getuid() if pods.settings.user is None else pods.settings.user,
                "group": os.getgid() if pods.settings.group is None else pods.settings.group,
            },
        }

    system = run_metadata.system_description(plan.configuration, machine, {})
    folder = run_folder.create(plan.results, plan.label, content, system, plan.configuration.plain(), seeds)
    for experiment in folder.experiments():
        run_metadata.write_log_header(experiment.log, plan.configuration, machine, False)
        experiment.set_state(ExperimentState(status="prepared", job=workloads.name_of(folder, experiment)))
    return folder


def submit(plan: Plan, folder: RunFolder, connection: Connection) -> list[str]:
    """Send the unfinished experiments; return their workloads, such as ``Job encore-ncf-0123abcd``."""
    sent, kind = [], manifests.API[pods_of(plan).kind][1]
    for experiment in folder.experiments():
        if experiment.has_finished:
            continue
        content = {experiment.config.name: experiment.config.read_text(encoding="utf-8")}
        # Header of the log. A run that resumes from a checkpoint keeps its log on the volume.
        content[experiment.log.name] = "" if experiment.has_checkpoint else experiment.log.read_text(encoding="utf-8")
        connection.create(objects(plan, workloads.pod_folder(folder, experiment), content))
        sent.append(f"{kind} {workloads.name_of(folder, experiment)}")
    return sent


def open_plan(path: Path) -> tuple[Plan, RunFolder]:
    """Return the folder and plan for a run that was submitted to Kubernetes."""
    folder = run_folder.open_run(path)
    folder.check_whole()
    return planning.plan_of(folder, in_pods=True), folder


def clear(plan: Plan, folder: RunFolder, connection: Connection) -> None:
    """Delete a stopped run's workloads before it is submitted again. Checkpoints are kept.

    Raises:
        EncoreError: a workload is still active, or all experiments have finished.
    """
    unfinished = []
    for experiment in folder.experiments():
        workload = workloads.look(connection, folder, experiment)
        workloads.settle(folder, experiment, workload)
        if experiment.has_finished:
            continue
        if workload.state in ("waiting", "running"):
            raise EncoreError(
                f"{workloads.name_of(folder, experiment)} of {folder.path.name} is still in the cluster",
                expected="a run without an active workload",
                hint=f"watch it: {hints.follow(folder.path)}; or end it: {hints.cancel(folder.path)}",
            )
        if workload.state == "succeeded":
            raise EncoreError(
                f"{folder.path.name} has ended, and its results are on the cluster's volume",
                expected="an unfinished run",
                hint=f"for the copy commands: {hints.follow(folder.path)}",
            )
        unfinished.append(experiment)
    if not unfinished:
        raise EncoreError(
            f"{folder.path.name} has finished: nothing left to run", hint=f"see it: {hints.follow(folder.path)}"
        )
    for experiment in unfinished:
        connection.delete(pods_of(plan).kind, workloads.name_of(folder, experiment))
        workloads.wait_for_end(connection, folder, experiment)
        if not experiment.has_checkpoint:
            runner.clear_remains(experiment)
            run_metadata.write_log_header(experiment.log, plan.configuration, unknown_node(plan), False)
        experiment.set_state(replace(experiment.state(), status="prepared", reason="", ended=""))
