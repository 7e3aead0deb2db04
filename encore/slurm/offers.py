"""What the cluster offers, as sinfo reports it, against a submission and against cluster.toml (``doctor --slurm``)."""

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from encore import catalogue, names
from encore.containers import engines
from encore.errors import EncoreError
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
    state: str  # up, down, drain or inact: only one that is up starts jobs
    max_minutes: int | None  # None: no limit
    groups: tuple[NodeGroup, ...]

    @property
    def gpus(self) -> int | None:
        return max((group.gpus for group in self.groups if group.gpus is not None), default=None)

    def nodes(self, gpus: int = 0, kind: str = "", up: bool = False) -> int:
        """Return how many nodes have this many GPUs, of a type where one is given; ``up``: those that are up now."""
        return sum(
            group.nodes
            for group in self.groups
            if (group.is_up or not up)
            and (self.gpus is None or not gpus or ((group.gpus or 0) >= gpus and kind in ("", *group.types)))
        )


def partitions() -> dict[str, Partition]:
    # Each line of sinfo is a group of nodes.
    found: dict[str, Partition] = {}
    for line in commands.call("sinfo", "--noheader", "--format=%P|%a|%D|%t|%l|%G").splitlines():
        label, available, count, state, limit, generic = line.split("|")
        name, seconds = label.rstrip("*"), commands.seconds_of(limit)
        gpus = re.findall(r"\bgpu(?::([^,():]+(?=:\d)))?:(\d+)", generic)
        group = NodeGroup(
            nodes=int(count),
            is_up=not re.match(r"(down|drain|drng|maint|fail|boot|power)", state),
            gpus=sum(int(number) for _, number in gpus) if gpus else None,
            types=frozenset(kind for kind, _ in gpus if kind),
        )
        found[name] = Partition(
            name=name,
            is_default=label.endswith("*"),
            state=available,
            max_minutes=None if seconds is None else int(seconds // 60),
            groups=(*(found[name].groups if name in found else ()), group),
        )
    return found


def unusable(names_of: str) -> dict[str, str]:
    """Return Slurm's reason for each list of nodes that are down or drained; of partitions where some are named."""
    only = (f"--partition={names_of}",) if names_of else ()
    text = commands.call("sinfo", "--noheader", "--list-reasons", *only, "--format=%N|%T|%E")
    rows = [line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2]
    return {nodes: f"{state.rstrip('*~#!%$@+^-')}: {reason.strip()}" for nodes, state, reason in rows}


def choose(known: dict[str, Partition], name: str) -> tuple[Partition, ...]:
    """Return the partitions that were named, ``debug,short``, else the default; EncoreError offers the nearest name."""
    chosen = name.split(",") if name else [each.name for each in known.values() if each.is_default][:1]
    if not chosen:
        raise EncoreError(
            "no partition given, and this cluster has no default",
            expected=f"one of {', '.join(sorted(known))}",
            hint='--partition NAME, or partition = "NAME" in cluster.toml',
        )
    for each in chosen:
        if each not in known:
            raise names.unknown("partition", each, known)
    return tuple(known[each] for each in chosen)


def check_partition(submission: Submission, wanted: str, kind: str = "") -> Check:
    """Return whether one of the partitions can ever start the job, and whether it can now; ``kind`` is of the GPUs."""
    try:
        candidates = choose(partitions(), wanted)
    except EncoreError as error:
        return Check.of(error, "partition")
    problems = {each.name: impossible(submission, each, kind) for each in candidates}
    fitting = [each for each in candidates if problems[each.name] is None]
    first = problems[candidates[0].name]
    if not fitting and first is not None:
        return Check.of(first, "partition")
    best = max(fitting, key=lambda partition: partition.nodes(submission.gpus_per_node, kind, up=True))
    up = best.nodes(submission.gpus_per_node, kind, up=True)
    if up < submission.nodes:
        found = f"{submission.nodes} nodes asked for, {up} of {best.name} are up: the job waits for the others"
        return Check("WARN", "partition", found, "see why with: sinfo -R")
    return Check("OK", "partition", f"{best.name}, {up} nodes up")


def impossible(submission: Submission, partition: Partition, kind: str = "") -> EncoreError | None:
    name, gpus, limit = partition.name, submission.gpus_per_node, partition.max_minutes
    if partition.state != "up":
        return EncoreError(f"partition {name} is {partition.state}", hint="another partition: --partition; see sinfo")
    what = f"{kind} GPUs" if kind else "GPUs"
    if gpus and partition.gpus is not None and not partition.nodes(gpus, kind):
        return EncoreError(
            f"{gpus} {what} a node asked for, a node of {name} has {partition.gpus}",
            hint=f"--gpus-per-node {partition.gpus}" if not kind else "see the types with: sinfo --format='%P %G'",
        )
    fitting = partition.nodes(gpus, kind)
    if submission.nodes > fitting:
        return EncoreError(
            f"{submission.nodes} nodes asked for, partition {name} has {fitting}"
            + (f" with {gpus} {what}" if gpus else ""),
            hint=f"--nodes {fitting}, or another partition: sinfo" if fitting else "another partition: sinfo",
        )
    if submission.minutes is not None and limit is not None and submission.minutes > limit:
        return EncoreError(
            f"{clock(submission.minutes)} asked for, partition {name} allows {clock(limit)}",
            hint=f"--time {limit}: the run writes checkpoints, and the job resumes after a requeue",
        )
    return None


# -- cluster.toml, from a login node ------------------------------------------------------------------------

EXAMPLE = "copy slurm/cluster.example.toml to cluster.toml and fill in what differs from the defaults"


def check_cluster(file: Path | None) -> list[Check]:
    """Return every check; the first failed ones make the others pointless, and are returned alone."""
    try:
        cluster, found = clusters.load(file)
        commands.require()
        version = commands.call("sinfo", "--version").strip()
        known = partitions()
    except EncoreError as error:
        return [Check.of(error, "cluster")]
    where = Check("OK", "cluster file", str(found)) if found else Check("WARN", "cluster file", "none", EXAMPLE)
    return [
        where,
        Check("OK", "Slurm", version),
        *_partition(cluster, known),
        _account(cluster),
        *_mpi(cluster),
        *_folders(cluster),
        *(_python(*named) for named in cluster.python.items()),
        _runtime(cluster),
        _interface(cluster),
        _requeue(),
    ]


def _partition(cluster: Cluster, known: dict[str, Partition]) -> list[Check]:
    try:
        chosen = choose(known, cluster.partition)
    except EncoreError as error:
        return [Check.of(error, "partition")]
    checks = []
    for each in chosen:
        limit = f"{each.max_minutes} min at most" if each.max_minutes else "no time limit"
        found = Check("OK", "partition", f"{each.name}: {each.nodes(up=True)} of {each.nodes()} nodes up, {limit}")
        if each.state != "up":
            found = Check("FAIL", "partition", f"{each.name} is {each.state}", "name another; see sinfo")
        elif not each.nodes(up=True):
            found = Check("FAIL", "partition", f"{each.name}: no node is up", "see why with: sinfo -R")
        checks.append(found)
    for nodes, reason in unusable(",".join(each.name for each in chosen)).items():
        gates = [f"; the gate found {name} {seen}" for name in queue.expand(nodes) if (seen := node_checks.kept(name))]
        hint = "ask who runs the cluster: scontrol show node"
        checks.append(Check("WARN", "nodes", f"{nodes} {reason}{''.join(gates)}", hint))
    return [*checks, *_gpus(cluster, chosen[0])]


def _gpus(cluster: Cluster, partition: Partition) -> list[Check]:
    wanted, kind = cluster.gpus_per_node, cluster.gpu_type
    if not wanted:
        return []
    fitting = partition.nodes(wanted, kind)
    if partition.gpus is None and cluster.gpu_option != "none":
        found = f"gpus_per_node = {wanted}, but Slurm manages no GPUs in {partition.name}"
        hint = 'configure GresTypes and Gres in slurm.conf, or set gpu_option = "none" to request whole nodes'
        return [Check("FAIL", "GPUs", found, hint)]
    if partition.gpus is not None and not fitting:
        found = f"gpus_per_node = {wanted}, a node of {partition.name} has {partition.gpus}"
        found += f", and none {kind!r}" if kind and partition.nodes(wanted) else ""
        return [Check("FAIL", "GPUs", found, "see the nodes' GPUs and their types with: sinfo --format='%P %D %G'")]
    return [Check("OK", "GPUs", f"{wanted} a node, on {fitting} of {partition.nodes()} nodes")]


def _account(cluster: Cluster) -> Check:
    # Check by a submission that sbatch only tests: it asks the same rules as a real one.
    given = {"partition": cluster.partition, "account": cluster.account, "qos": cluster.qos}
    given |= gpu_option(cluster.gpus_per_node or 0, cluster)
    options = [f"--{name}={value}" for name, value in given.items() if value]
    try:
        commands.call("sbatch", "--test-only", "--nodes=1", *options, *cluster.sbatch, "--wrap=true")
    except EncoreError as error:
        return Check.of(error, "submission")
    return Check("OK", "submission", "sbatch --test-only takes the partition, the account and the options")


def _mpi(cluster: Cluster) -> list[Check]:
    # It prints the list as messages.
    listed = processes.output_of("srun", "--mpi=list", errors=subprocess.STDOUT)
    if cluster.mpi in re.findall(r"\b(pmix\w*|pmi2|none|openmpi)\b", listed):
        return [Check("OK", "MPI", f"srun --mpi={cluster.mpi}")]
    hint = "install Slurm's PMIx plugin; what uses torch.distributed runs without"
    return [Check("WARN", "MPI", f"srun has no {cluster.mpi}, Horovod cannot start", hint)]


def _folders(cluster: Cluster) -> list[Check]:
    known = {name: cluster.data_of(name) for name in catalogue.benchmarks()}
    checks = check_data_sets({name: folder for name, folder in known.items() if folder is not None})
    if cluster.results is None:
        return checks
    folder = existing(cluster.results)
    may_write = os.access(folder, os.W_OK)
    found = Check("OK", "results", str(cluster.results))
    if folder != cluster.results:
        hint = f"make it, on a file system that all nodes share: mkdir -p {shlex.quote(str(cluster.results))}"
        # The first run makes it where it may.
        found = Check("WARN" if may_write else "FAIL", "results", f"{cluster.results} does not exist", hint)
    elif not may_write:
        found = Check("FAIL", "results", f"{folder} is not writable", "name another folder")
    return [*checks, found]


def _python(framework: str, file: Path) -> Check:
    if file.is_absolute() and file.is_file() and os.access(file, os.X_OK):
        return Check("OK", "Python", f"{framework}: {file}")
    hint = "name one that every node has at the same path, such as /apps/pytorch/bin/python"
    return Check("FAIL", "Python", f"{framework}: {file} is no program on this node", hint)


def _runtime(cluster: Cluster) -> Check:
    if cluster.runtime in ("auto", "host"):
        return Check("OK", "runtime", cluster.runtime)
    try:
        engines.connect(cluster.runtime)
    except EncoreError as error:
        # Login nodes need not have what compute nodes have; the job looks on each of its nodes.
        level: Level = "FAIL" if cluster.runtime == "pyxis" else "WARN"
        return Check(level, "runtime", f"on this node: {error.found}", error.hint)
    if cluster.image.startswith("/") and not Path(cluster.image).exists():
        return Check("FAIL", "image", f"no file {cluster.image}", "encore images convert BENCHMARK --runtime enroot")
    return Check("OK", "runtime", cluster.runtime)


def _interface(cluster: Cluster) -> Check:
    name, there = cluster.network_interface, sorted(path.name for path in Path("/sys/class/net").iterdir())
    if name in ("", *there):
        return Check("OK", "network", name or "the interface is found on the node")
    return Check("WARN", "network", f"no interface {name} on this node, which has {', '.join(there)}", "leave it out")


def _requeue() -> Check:
    if commands.setting("JobRequeue") == "1":
        return Check("OK", "requeue", "allowed: jobs resume after the time limit and after a lost node")
    return Check("OK", "requeue", "off by default; slurm/run.sub asks for it with --requeue")
