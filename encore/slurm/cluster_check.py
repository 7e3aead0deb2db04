"""``encore doctor --slurm``: cluster.toml and the cluster against each other, from a login node."""

import os
import re
import shlex
import subprocess
from pathlib import Path

from encore import catalogue
from encore.containers import engines
from encore.errors import EncoreError
from encore.files import existing
from encore.machine import processes
from encore.machine.preflight import Check, Level, check_data_sets
from encore.slurm import cluster as clusters
from encore.slurm import commands, partitions, script
from encore.slurm.cluster import Cluster

EXAMPLE = "copy slurm/cluster.example.toml to cluster.toml and fill in what differs from the defaults"


def check(file: Path | None) -> list[Check]:
    """Return every check; the first failed ones make the others pointless, and are returned alone."""
    try:
        cluster, found = clusters.load(file)
        commands.require()
        version = commands.call("sinfo", "--version").strip()
        known = partitions.partitions()
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


def _partition(cluster: Cluster, known: dict[str, partitions.Partition]) -> list[Check]:
    try:
        chosen = partitions.choose(known, cluster.partition)
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
    for nodes, reason in partitions.unusable(",".join(each.name for each in chosen)).items():
        checks.append(Check("WARN", "nodes", f"{nodes} {reason}", "ask who runs the cluster: scontrol show node"))
    return [*checks, *_gpus(cluster, chosen[0])]


def _gpus(cluster: Cluster, partition: partitions.Partition) -> list[Check]:
    wanted, kind = cluster.gpus_per_node, cluster.gpu_type
    if not wanted:
        return []
    fitting = partition.nodes(wanted, kind)
    if partition.gpus is None and cluster.gpu_option != "none":
        found = f"gpus_per_node = {wanted}, but Slurm manages no GPUs in {partition.name}"
        return [Check("FAIL", "GPUs", found, 'gpu_option = "none": whole nodes are asked for anyway')]
    if partition.gpus is not None and not fitting:
        found = f"gpus_per_node = {wanted}, a node of {partition.name} has {partition.gpus}"
        found += f", and none {kind!r}" if kind and partition.nodes(wanted) else ""
        return [Check("FAIL", "GPUs", found, "see the nodes' GPUs and their types with: sinfo --format='%P %D %G'")]
    return [Check("OK", "GPUs", f"{wanted} a node, on {fitting} of {partition.nodes()} nodes")]


def _account(cluster: Cluster) -> Check:
    # Check by a submission that sbatch only tests: it asks the same rules as a real one.
    given = {"partition": cluster.partition, "account": cluster.account, "qos": cluster.qos}
    given |= script.gpus(cluster.gpus_per_node or 0, cluster)
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
