"""Submitted runs in Kubernetes: state, outcome, and results."""

import contextlib
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from encore import data as data_sets
from encore import files
from encore.errors import EncoreError
from encore.job import Mount
from encore.kubernetes import manifests
from encore.kubernetes.api import Connection, Workload
from encore.kubernetes.settings import Kind, Kubernetes
from encore.machine.node import Gpu, Node
from encore.run import follow, hints, planning, run_folder, run_metadata
from encore.run.run_folder import Experiment, RunFolder
from encore.slurm import queue

# Workload states as Slurm job states
QUEUED = {"waiting": "PENDING", "running": "RUNNING", "succeeded": "COMPLETED", "failed": "FAILED", "gone": "CANCELLED"}
GONE_SECONDS, POLL_SECONDS = manifests.STOP_SECONDS + 60.0, 0.5
RESULTS_THERE = "it has ended; its results are on the cluster's volume, and encore follow says how to copy them"


def is_in_pods(folder: RunFolder) -> bool:
    """Return whether a run was submitted to Kubernetes; a damaged one was not, as far as anybody can see."""
    with contextlib.suppress(OSError, EncoreError, AttributeError):
        return bool(files.read_json(folder.path / "run.json").get("kubernetes"))
    return False


def settings_of(folder: RunFolder) -> tuple[Kubernetes, Kind]:
    kubernetes = folder.metadata()["kubernetes"]
    if kubernetes["kind"] not in manifests.API:
        raise EncoreError(
            f"the kind of this run ({kubernetes['kind']}) is no longer supported",
            hint=f"kubectl get {kubernetes['kind']}",
        )
    return Kubernetes.model_validate(kubernetes["settings"]), kubernetes["kind"]


def connect(folder: RunFolder) -> Connection:
    return Connection(settings_of(folder)[0])


def pod_folder(folder: RunFolder, experiment: Experiment) -> Path:
    """Return an experiment's folder as mounted in the pods, independent of local links."""
    return Path(folder.metadata()["kubernetes"]["folder"]) / experiment.folder.name


def name_of(folder: RunFolder, experiment: Experiment) -> str:
    return manifests.name_of(folder.metadata()["name"], pod_folder(folder, experiment))


def look(connection: Connection, folder: RunFolder, experiment: Experiment) -> Workload:
    return connection.look(settings_of(folder)[1], name_of(folder, experiment), _marks(folder, experiment))


def settle(folder: RunFolder, experiment: Experiment, workload: Workload) -> None:
    """Update an experiment's state from its workload and folder; publish the log once finished."""
    state, progress = experiment.state(), follow.read_progress(experiment.metrics)
    if state.status in run_folder.FINISHED:
        return
    outcome, now = progress.outcome, files.utc_now()
    if outcome in run_folder.FINISHED and workload.state in ("succeeded", "gone"):
        records = follow.Tail(experiment.metrics).read()
        started, finished = (_utc(record["time"]) for record in (records[0], records[-1]))
        new = replace(state, status=outcome, reason="", started=started, ended=finished)
    elif workload.state == "failed":
        new = replace(state, status="failed", reason=workload.reason, ended=state.ended or now)
    elif workload.state == "succeeded":
        new = replace(state, status="interrupted", reason=RESULTS_THERE, ended=state.ended or now)
    elif workload.state == "gone":
        how = "a checkpoint was written" if outcome == "interrupted" else "it was deleted"
        new = replace(state, status="interrupted", reason=f"{workload.reason}: {how}", ended=state.ended or now)
    elif workload.state == "running" or state.status == "running":
        new = replace(state, status="running", reason="", started=state.started or now, ended="")
    else:
        new = replace(state, status="prepared", reason="", ended="")
    if new != state:
        experiment.set_state(new)
    if new.status in run_folder.FINISHED:
        experiment.publish_log()
        _note(folder, experiment, progress)


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime(files.UTC_FORMAT)


def _note(folder: RunFolder, experiment: Experiment, progress: follow.Progress) -> None:
    # Add facts that were unknown at submission: node, data set, and the report of rank 0
    plan = planning.plan_of(folder, in_pods=True)
    content = folder.metadata()
    with contextlib.suppress(EncoreError):
        manifest = data_sets.read_passport(experiment.folder)
        content["data"] = run_metadata.data_facts(manifest, content["data"]["folder"])
        content["submission"] = run_metadata.submission_of(plan.configuration, content["data"])
    with contextlib.suppress(EncoreError, KeyError, TypeError):
        node = files.read_json(experiment.folder / "node.json")
        gpus = tuple(Gpu(**gpu) for gpu in node.pop("gpus"))
        machine = Node(operating_system="", gpus=gpus, **node)
        content["node"] = machine
        system = run_metadata.system_description(plan.configuration, machine, {})
        files.write_json(folder.path / "system.json", system)
    run_folder.write_metadata(folder.path, content)
    folder.note_ranks(experiment.number, run_metadata.redact(progress.environment), progress.reported)


def jobs_of(folders: Sequence[RunFolder]) -> tuple[list[queue.Job], str]:
    """Update the states of Kubernetes runs. Return their workloads as queue jobs, and an error message."""
    jobs, note = [], ""
    connections: dict[tuple[str, str], Connection] = {}
    for folder in folders:
        try:
            if not is_in_pods(folder):
                continue
            unfinished = [experiment for experiment in folder.experiments() if not experiment.has_finished]
            if unfinished:
                settings, _ = settings_of(folder)
                key = (settings.context, settings.namespace)
                connection = connections.get(key) or connections.setdefault(key, Connection(settings))
                jobs += [_as_job(connection, folder, experiment) for experiment in unfinished]
        except EncoreError as error:
            note = f"{folder.path.name}: {error.found}"
    return jobs, note


def _as_job(connection: Connection, folder: RunFolder, experiment: Experiment) -> queue.Job:
    workload, name = look(connection, folder, experiment), name_of(folder, experiment)
    with contextlib.suppress(OSError):  # run by a different user
        settle(folder, experiment, workload)
    created = workload.created or datetime.now(timezone.utc)
    return queue.Job(
        name=name,
        number=name,
        state=QUEUED[workload.state],
        nodes=folder.metadata()["nodes"],
        seconds=time.time() - created.timestamp(),
        submitted=created.isoformat(),
        user=queue.this_user(),
        reason=workload.reason,
        title=name,
        partition=settings_of(folder)[0].namespace,
    )


def cancel(folder: RunFolder) -> list[str]:
    """Delete a run's unfinished workloads. Return messages about the outcome and how to resume."""
    connection, done = connect(folder), []
    _, kind = settings_of(folder)
    for experiment in folder.experiments():
        if experiment.has_finished:
            continue
        name = name_of(folder, experiment)
        settle(folder, experiment, look(connection, folder, experiment))
        if not experiment.has_finished and connection.delete(kind, name):
            done.append(f"deleted {manifests.API[kind][1]} {name}; the ranks write a checkpoint if they have started")
    if not done:
        raise EncoreError(f"{folder.path.name} has no active workload in the cluster", hint=hints.inspect(folder.path))
    return [*done, f"resume with: {hints.resume(folder.path)}"]


def wait_for_end(connection: Connection, folder: RunFolder, experiment: Experiment) -> None:
    """Wait until an experiment's workload has been removed; EncoreError on timeout."""
    until = time.monotonic() + GONE_SECONDS
    while look(connection, folder, experiment).state != "gone":
        if time.monotonic() > until:
            name = name_of(folder, experiment)
            raise EncoreError(
                f"{name} is still in the cluster", hint=f"see why: kubectl get all -l {_marks(folder, experiment)}"
            )
        time.sleep(POLL_SECONDS)


def _marks(folder: RunFolder, experiment: Experiment) -> str:
    return ",".join(f"{key}={value}" for key, value in manifests.labels_of(pod_folder(folder, experiment)).items())


def records(lines: Iterator[str]) -> Iterator[dict[str, Any] | str]:
    """Parse a pod's log: yield metrics records as dictionaries and other lines unchanged."""
    for line in lines:
        record = next(files.json_objects([line]), {})
        yield record if "kind" in record else line


def copy_commands(folder: RunFolder) -> list[str]:
    """Return commands that copy a run from its volume to this machine, through a temporary pod."""
    settings, _ = settings_of(folder)
    there = Path(folder.metadata()["kubernetes"]["folder"])
    results, name, image = there.parent, "encore-copy", folder.metadata()["image"]["name"]
    volumes = manifests.Volumes(settings.volumes, results)
    root = volumes.root(results)
    mount = volumes.mount(Mount(root, str(root), False))
    user = {
        "runAsUser": folder.metadata()["kubernetes"]["user"],
        "runAsGroup": folder.metadata()["kubernetes"]["group"],
    }
    container = {"name": name, "image": image, "command": ["sleep", "3600"], "volumeMounts": [mount]}
    spec = {"containers": [container], "volumes": volumes.manifests(), "securityContext": user, **settings.pod}
    context = ("--context", settings.context) if settings.context else ()
    kubectl = ("kubectl", *context, "--namespace", settings.namespace)
    overrides = f"--overrides={json.dumps({'spec': spec})}"
    return [
        shlex.join((*kubectl, "run", name, f"--image={image}", "--restart=Never", overrides)),
        shlex.join((*kubectl, "wait", "--for=condition=Ready", f"pod/{name}", "--timeout=10m")),
        shlex.join((*kubectl, "cp", f"{name}:{there}", str(folder.path))),
        shlex.join((*kubectl, "delete", "pod", name)),
        hints.follow(folder.path),
    ]
