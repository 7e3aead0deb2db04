"""Check a submission and cluster.toml against the partitions in sinfo (``encore doctor --slurm``)."""

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from encore import catalogue
from encore.containers import engines
from encore.errors import EncoreError, unknown_name
from encore.files import existing
from encore.machine import node_checks, processes
from encore.machine.preflight import Check, Level, check_data_sets
from encore.slurm import cluster as clusters
from encore.slurm import commands, queue
from encore.slurm.cluster import Cluster
from encore.slurm.script import Submission, clock, gpu_option


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    nodes: int
    is_up: bool  # neither down, drained nor in maintenance
    gpus: int | None = None  # GPUs that Slurm manages on a node; None: it manages none
    types: frozenset[str] = frozenset()  # types of these GPUs, where Slurm has names for them


@dataclass(frozen=True, kw_only=True)
class Partition:
    name: str
    is_default: bool
    state: str  # up, down, drain or inact; jobs start only in partitions that are up
    max_minutes: int | None  # None: no limit
    groups: tuple[NodeGroup, ...]

    @property
    def gpus(self) -> int | None:
        return max((group.gpus for group in self.groups if group.gpus is not None), default=None)

    def nodes(self, gpus: int = 0, kind: str = "", up: bool = False) -> int:
        """Number of nodes with at least ``gpus`` GPUs of type ``kind``. ``up``: only nodes that are currently up."""
        return sum(
            group.nodes
            for group in self.groups
            if (group.is_up or not up)
            and (self.gpus is None or not gpus or ((group.gpus or 0) >= gpus and kind in ("", *group.types)))
        )


def partitions() -> dict[str, Partition]:
    # sinfo prints one line per group of nodes.
    by_name: dict[str, Partition] = {}
    for line in commands.call("sinfo", "--noheader", "--format=%P|%a|%D|%t|%l|%G").splitlines():
        label, available, count, state, limit, generic = line.split("|")
        name, seconds = label.rstrip("*"), commands.parse_seconds(limit)
        gpus = re.findall(r"\bgpu(?::([^,():]+(?=:\d)))?:(\d+)", generic)
        group = NodeGroup(
            nodes=int(count),
            is_up=not re.match(r"(down|drain|drng|maint|fail|boot|power)", state),
            gpus=sum(int(number) for _, number in gpus) if gpus else None,
            types=frozenset(kind for kind, _ in gpus if kind),
        )
        by_name[name] = Partition(
            name=name,
            is_default=label.endswith("*"),
            state=available,
            max_minutes=None if seconds is None else int(seconds // 60),
            groups=(*(by_name[name].groups if name in by_name else ()), group),
        )
    return by_name


def unavailable_nodes(names_of: str) -> dict[str, str]:
    """Return node list -> Slurm's reason for nodes that are down or drained, optionally only in some partitions."""
    only = (f"--partition={names_of}",) if names_of else ()
    text = commands.call("sinfo", "--noheader", "--list-reasons", *only, "--format=%N|%T|%E")
    rows = [line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2]
    return {nodes: f"{state.rstrip('*~#!%$@+^-')}: {reason.strip()}" for nodes, state, reason in rows}


def choose(available: dict[str, Partition], name: str) -> tuple[Partition, ...]:
    """Return the partitions in a list such as ``debug,short``, or the default partition.

    Raises:
        EncoreError: unknown name, with the closest match.
    """
    requested = (
        name.split(",") if name else [partition.name for partition in available.values() if partition.is_default][:1]
    )
    if not requested:
        raise EncoreError(
            "no partition given, and the cluster does not have a default partition",
            expected=f"one of {', '.join(sorted(available))}",
            hint='--partition NAME, or partition = "NAME" in cluster.toml',
        )
    for partition in requested:
        if partition not in available:
            raise unknown_name("partition", partition, available)
    return tuple(available[partition] for partition in requested)


def check_partition(submission: Submission, requested: str, kind: str = "") -> Check:
    """Return whether one of the partitions can ever start the job, and whether it can now; ``kind`` is of the GPUs."""
    try:
        candidates = choose(partitions(), requested)
    except EncoreError as error:
        return Check.of(error, "partition")
    problems = {candidate.name: find_conflict(submission, candidate, kind) for candidate in candidates}
    fitting = [candidate for candidate in candidates if problems[candidate.name] is None]
    first = problems[candidates[0].name]
    if not fitting and first is not None:
        return Check.of(first, "partition")
    best = max(fitting, key=lambda partition: partition.nodes(submission.gpus_per_node, kind, up=True))
    up = best.nodes(submission.gpus_per_node, kind, up=True)
    if up < submission.nodes:
        message = f"{submission.nodes} nodes requested, {up} of {best.name} are up: the job will wait"
        return Check("WARN", "partition", message, "see why with: sinfo -R")
    return Check("OK", "partition", f"{best.name}, {up} nodes up")


def find_conflict(submission: Submission, partition: Partition, kind: str = "") -> EncoreError | None:
    name, gpus, limit = partition.name, submission.gpus_per_node, partition.max_minutes
    if partition.state != "up":
        return EncoreError(
            f"partition {name} is {partition.state}", hint="choose a different partition: --partition; see sinfo"
        )
    gpu_label = f"{kind} GPUs" if kind else "GPUs"
    if gpus and partition.gpus is not None and not partition.nodes(gpus, kind):
        return EncoreError(
            f"{gpus} {gpu_label} per node requested, nodes of {name} have {partition.gpus}",
            hint=f"--gpus-per-node {partition.gpus}" if not kind else "see the types with: sinfo --format='%P %G'",
        )
    fitting = partition.nodes(gpus, kind)
    if submission.nodes > fitting:
        return EncoreError(
            f"{submission.nodes} nodes requested, partition {name} has {fitting}"
            + (f" with {gpus} {gpu_label}" if gpus else ""),
            hint=f"--nodes {fitting}, or a different partition: sinfo"
            if fitting
            else "choose another partition: sinfo",
        )
    if submission.minutes is not None and limit is not None and submission.minutes > limit:
        return EncoreError(
            f"{clock(submission.minutes)} requested, partition {name} allows {clock(limit)}",
            hint=f"--time {limit}: the run writes checkpoints, and the job resumes after a requeue",
        )
    return None


# -- cluster.toml, from a login node ------------------------------------------------------------------------

REQUEUE = "allowed: jobs resume after the time limit and after a lost node"
REQUEUE_BY_JOB = "off by default; slurm/run.sub requests it with --requeue"
EXAMPLE = "copy slurm/cluster.example.toml to cluster.toml and change the values that differ from the defaults"


def check_cluster(file: Path | None) -> list[Check]:
    """Return all checks, or only the first failure if the other checks would be pointless."""
    try:
        cluster, path = clusters.load(file)
        commands.require()
        version = commands.call("sinfo", "--version").strip()
        available = partitions()
    except EncoreError as error:
        return [Check.of(error, "cluster")]
    file_check = Check("OK", "cluster file", str(path)) if path else Check("WARN", "cluster file", "none", EXAMPLE)
    return [
        file_check,
        Check("OK", "Slurm", version),
        *_partition(cluster, available),
        _account(cluster),
        *_mpi(cluster),
        *_folders(cluster),
        *(_python(*python) for python in cluster.python.items()),
        _runtime(cluster),
        _interface(cluster),
        Check("OK", "requeue", REQUEUE if commands.setting("JobRequeue") == "1" else REQUEUE_BY_JOB),
    ]


def _partition(cluster: Cluster, available: dict[str, Partition]) -> list[Check]:
    try:
        candidates = choose(available, cluster.partition)
    except EncoreError as error:
        return [Check.of(error, "partition")]
    checks = []
    for requested in candidates:
        limit = f"limit {requested.max_minutes} min" if requested.max_minutes else "no time limit"
        check = Check(
            "OK", "partition", f"{requested.name}: {requested.nodes(up=True)} of {requested.nodes()} nodes up, {limit}"
        )
        if requested.state != "up":
            check = Check(
                "FAIL", "partition", f"{requested.name} is {requested.state}", "choose a different partition; see sinfo"
            )
        elif not requested.nodes(up=True):
            check = Check("FAIL", "partition", f"{requested.name}: no node is up", "see why with: sinfo -R")
        checks.append(check)
    for nodes, reason in unavailable_nodes(",".join(requested.name for requested in candidates)).items():
        gates = [
            f"; the gate found {name} {rejection}"
            for name in queue.expand(nodes)
            if (rejection := node_checks.last_result(name))
        ]
        hint = "contact the administrator: scontrol show node"
        checks.append(Check("WARN", "nodes", f"{nodes} {reason}{''.join(gates)}", hint))
    return [*checks, *_gpus(cluster, candidates[0])]


def _gpus(cluster: Cluster, partition: Partition) -> list[Check]:
    gpus, kind = cluster.gpus_per_node, cluster.gpu_type
    if not gpus:
        return []
    fitting = partition.nodes(gpus, kind)
    if partition.gpus is None and cluster.gpu_option != "none":
        message = f"gpus_per_node = {gpus}, but Slurm manages no GPUs in {partition.name}"
        hint = 'configure GresTypes and Gres in slurm.conf, or set gpu_option = "none" to request whole nodes'
        return [Check("FAIL", "GPUs", message, hint)]
    if partition.gpus is not None and not fitting:
        message = f"gpus_per_node = {gpus}, nodes of {partition.name} have {partition.gpus}"
        message += f", and none {kind!r}" if kind and partition.nodes(gpus) else ""
        return [Check("FAIL", "GPUs", message, "list the GPUs of the nodes with: sinfo --format='%P %D %G'")]
    return [Check("OK", "GPUs", f"{gpus} per node, on {fitting} of {partition.nodes()} nodes")]


def _account(cluster: Cluster) -> Check:
    # Check by a submission that sbatch only tests: it asks the same rules as a real one.
    settings = {"partition": cluster.partition, "account": cluster.account, "qos": cluster.qos}
    settings |= gpu_option(cluster.gpus_per_node or 0, cluster)
    options = [f"--{name}={value}" for name, value in settings.items() if value]
    try:
        commands.call("sbatch", "--test-only", "--nodes=1", *options, *cluster.sbatch, "--wrap=true")
    except EncoreError as error:
        return Check.of(error, "submission")
    return Check("OK", "submission", "sbatch --test-only accepts the partition, account and options")


def _mpi(cluster: Cluster) -> list[Check]:
    # It prints the list as messages.
    listed = processes.output_of("srun", "--mpi=list", errors=subprocess.STDOUT)
    if cluster.mpi in re.findall(r"\b(pmix\w*|pmi2|none|openmpi)\b", listed):
        return [Check("OK", "MPI", f"srun --mpi={cluster.mpi}")]
    hint = "install Slurm's PMIx plugin; torch.distributed does not need it"
    return [Check("WARN", "MPI", f"srun does not support {cluster.mpi}; Horovod cannot start", hint)]


def _folders(cluster: Cluster) -> list[Check]:
    folders = {name: cluster.data_of(name) for name in catalogue.benchmarks()}
    checks = check_data_sets({name: folder for name, folder in folders.items() if folder is not None})
    if cluster.results is None:
        return checks
    folder = existing(cluster.results)
    may_write = os.access(folder, os.W_OK)
    check = Check("OK", "results", str(cluster.results))
    if folder != cluster.results:
        hint = f"make it, on a file system that all nodes share: mkdir -p {shlex.quote(str(cluster.results))}"
        # The first run makes it where it may.
        check = Check("WARN" if may_write else "FAIL", "results", f"{cluster.results} does not exist", hint)
    elif not may_write:
        check = Check("FAIL", "results", f"{folder} is not writable", "choose a different folder")
    return [*checks, check]


def _python(framework: str, file: Path) -> Check:
    if file.is_absolute() and file.is_file() and os.access(file, os.X_OK):
        return Check("OK", "Python", f"{framework}: {file}")
    hint = "set a path that exists on every node, such as /apps/pytorch/bin/python"
    return Check("FAIL", "Python", f"{framework}: {file} is not executable on this node", hint)


def _runtime(cluster: Cluster) -> Check:
    if cluster.runtime in ("auto", "host"):
        return Check("OK", "runtime", cluster.runtime)
    try:
        engines.connect(cluster.runtime)
    except EncoreError as error:
        # Login nodes need not have the runtime; the job checks its nodes again.
        level: Level = "FAIL" if cluster.runtime == "pyxis" else "WARN"
        return Check(level, "runtime", f"on this node: {error.found}", error.hint)
    if cluster.image.startswith("/") and not Path(cluster.image).exists():
        return Check("FAIL", "image", f"no file {cluster.image}", "encore images convert BENCHMARK --runtime enroot")
    return Check("OK", "runtime", cluster.runtime)


def _interface(cluster: Cluster) -> Check:
    name, interfaces = cluster.network_interface, sorted(path.name for path in Path("/sys/class/net").iterdir())
    if name in ("", *interfaces):
        return Check("OK", "network", name or "the interface is detected on the node")
    return Check(
        "WARN", "network", f"no interface {name} on this node, which has {', '.join(interfaces)}", "leave it out"
    )
