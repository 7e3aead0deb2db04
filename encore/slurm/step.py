"""Job steps in a run: srun options, CPU binding, network settings and one process per node.

All nodes are assumed to be identical.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from encore import paths
from encore.configuration import Configuration
from encore.errors import EncoreError
from encore.launchers import HOROVOD_BY_MPI, Launch, by_horovod
from encore.machine import binding, host_requirements, network, node
from encore.machine.host_requirements import Need
from encore.machine.preflight import Check
from encore.slurm import commands, queue
from encore.slurm.cluster import Cluster
from encore.slurm.queue import Allocation

# Variables that Slurm and PMIx set per rank; they are passed to containers by name.
RANK_VARIABLES = (
    "PMIX_BFROP_BUFFER_TYPE", "PMIX_DSTORE_21_BASE_PATH", "PMIX_DSTORE_ESH_BASE_PATH", "PMIX_GDS_MODULE",
    "PMIX_HOSTNAME", "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SECURITY_MODE", "PMIX_SERVER_TMPDIR",
    "PMIX_SERVER_URI2", "PMIX_SERVER_URI21", "PMIX_SERVER_URI3", "PMIX_SERVER_URI4", "PMIX_SERVER_URI41",
    "PMIX_SYSTEM_TMPDIR", "PMIX_VERSION",
    "SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
)  # fmt: skip

FIRST_PORT = 20000
PORTS = 10000


def launch(
    configuration: Configuration,
    cluster: Cluster,
    allocation: Allocation,
    caller: Mapping[str, str],
    logs: str,
    in_container: bool,
) -> Launch:
    """Return the srun launch: Horovod uses PMIx, torch.distributed a rendezvous by environment variables.

    Args:
        configuration: configuration of the run, with nodes and ranks.
        cluster: MPI plugin, network interface and binding.
        allocation: the Slurm job.
        caller: environment of the batch job; only the SLURM_ variables are passed to srun and the ranks.
        logs: folder of the rank output: rank.0/stdout, rank.0/stderr, ...
        in_container: mount Slurm's spool folder, which PMIx needs.
    """
    horovod = by_horovod(configuration.choice.implementation.framework)
    nodes, per_node = configuration.nodes, configuration.ranks_per_node
    oversubscribed = allocation.cores_per_node is not None and per_node > allocation.cores_per_node
    network = interfaces(cluster, allocation, nodes)
    if configuration.get("device") == "cpu" and horovod:
        # Horovod on CPUs uses only MPI.
        network = {name: value for name, value in network.items() if name.startswith("OMPI_")}
    command = (
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes * per_node}",
        f"--ntasks-per-node={per_node}",
        f"--mpi={cluster.mpi if horovod else 'none'}",
        "--distribution=block",
        "--export=ALL",
        "--kill-on-bad-exit=1",
        "--input=none",
        "--open-mode=truncate",
        f"--output={logs}/rank.%t/stdout",
        f"--error={logs}/rank.%t/stderr",
        *(["--overcommit"] if oversubscribed else []),
        *cpu_binding(cluster, allocation, per_node),
        *_exclude_option(),
    )
    slurm_variables = {name: value for name, value in caller.items() if name.startswith("SLURM_")}
    rendezvous = HOROVOD_BY_MPI if horovod else _rendezvous(allocation)
    return Launch(
        "srun",
        outer=command,
        environment={**slurm_variables, **network, **rendezvous},
        everywhere=one_task_per_node(nodes),
        passed=RANK_VARIABLES,
        cores=allocation.cores_per_node,
        folders=(spool_folder(),) if horovod and in_container else (),
    )


def one_task_per_node(nodes: int) -> tuple[str, ...]:
    """Return srun arguments for a short step that overlaps the ranks, with one task per node."""
    return (*_srun_per_node(nodes), "--input=none")


def _srun_per_node(nodes: int) -> tuple[str, ...]:
    size = (f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--mpi=none")
    return ("srun", *size, "--overlap", "--export=ALL", "--cpu-bind=none", "--quiet", *_exclude_option())


def _exclude_option() -> tuple[str, ...]:
    excluded = queue.excluded_nodes(os.environ)
    return (f"--exclude={','.join(excluded)}",) if excluded else ()


def samplers(allocation: Allocation, nodes: int, telemetry: Path) -> tuple[tuple[str, ...], ...]:
    """Return the srun command that samples the other nodes into files beside ``telemetry``."""
    nodes_to_sample = tuple(name for name in allocation.nodes[:nodes] if name != node.name())
    if not (nodes_to_sample and allocation.is_real):
        return ()
    program = (sys.executable, "-m", "encore.machine.telemetry", str(telemetry))
    return ((*_srun_per_node(len(nodes_to_sample)), f"--nodelist={','.join(nodes_to_sample)}", *program),)


def spool_folder() -> str:
    """Return the parent of the PMIx server folders on every node: SlurmdSpoolDir up to %n or %h."""
    spool = commands.setting("SlurmdSpoolDir") or "/var/spool/slurmd"
    return spool if "%" not in spool else str(Path(spool.partition("%")[0] + "x").parent)


def _rendezvous(allocation: Allocation) -> dict[str, str]:
    # torch.distributed rendezvous: the node of rank 0, with a port that differs between jobs on the same node
    port = FIRST_PORT + (int(allocation.job) if allocation.is_real else 0) % PORTS
    first = address(allocation.nodes[0]) if allocation.is_real else allocation.nodes[0]
    return {"MASTER_ADDR": first, "MASTER_PORT": str(port)}


def cpu_binding(cluster: Cluster, allocation: Allocation, ranks_per_node: int) -> tuple[str, ...]:
    """Return srun's binding options. auto: each rank on the cores and memory local to the GPU.

    Binding requires Slurm's task/affinity plugin. Ranks that share cores are not bound.
    """
    if cluster.cpu_bind != "auto":
        return (f"--cpu-bind={cluster.cpu_bind}",)
    oversubscribed = allocation.cores_per_node is not None and ranks_per_node > allocation.cores_per_node
    if not allocation.is_real or oversubscribed or "affinity" not in commands.setting("TaskPlugin"):
        return ("--cpu-bind=none",)
    return binding.srun_options(binding.of_this_machine(ranks_per_node))


def interfaces(cluster: Cluster, allocation: Allocation, nodes: int) -> dict[str, str]:
    """Return NCCL, Gloo, UCX and OpenMPI settings for the interface in cluster.toml, or for this node."""
    name = cluster.network_interface
    if name:
        variables = ("GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
        return {"NCCL_SOCKET_IFNAME": f"={name}", **dict.fromkeys(variables, name)}
    if not allocation.is_real:
        return {}
    return network.variables(network.read(), nodes)


def address(node: str) -> str:
    """Return a node's address, which may differ from the node name (slurm.conf, NodeAddr)."""
    if not commands.is_installed():
        return node
    match = re.search(r"\bNodeAddr=(\S+)", commands.call("scontrol", "show", "node", node))
    return match.group(1) if match else node


# -- one process per node ------------------------------------------------------------------------------------

STEP_SECONDS = 90.0
PROBE_SECONDS = 15.0  # A node that does not start a process in this time is considered lost


def _query_nodes(action: str, nodes: int, question: str = "null") -> list[dict[str, Any]]:
    # Run an action of host_actions on all nodes and return the answers. Raises EncoreError if one is missing.
    command = (*one_task_per_node(nodes), sys.executable, "-m", "encore.machine.host_actions", action, question)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=paths.ROOT, timeout=STEP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EncoreError(
            f"the nodes did not answer within {STEP_SECONDS:g} s", hint="check the state of the nodes with: sinfo -N -l"
        ) from error
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(answers) != nodes:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0].removeprefix("srun: error: ")
        raise EncoreError(
            f"{nodes - len(answers)} of {nodes} nodes cannot start {sys.executable}: {reason}",
            expected="the checkout at the same path on every node",
            hint="put it on a file system that all nodes share, then resubmit",
        )
    return sorted(answers, key=lambda answer: str(answer["node"]))


def check_nodes(nodes: int, needs: Sequence[Need]) -> list[Check]:
    failed = [
        check
        for answer in _query_nodes("check", nodes, host_requirements.question(needs))
        for check in host_requirements.failed_checks("node", answer["node"], answer["problems"], needs)
    ]
    return [replace(failure, hint=f"{failure.hint}; or exclude the node: sbatch --exclude=NODE") for failure in failed]


def drop_caches(nodes: int) -> bool:
    return all(answer["dropped"] for answer in _query_nodes("drop-caches", nodes))


def lost_nodes(allocation: Allocation) -> list[str]:
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = pool.map(_responds, allocation.nodes)
        return [node for node, answer in zip(allocation.nodes, answers, strict=True) if not answer]


def _responds(node: str) -> bool:
    command = (*one_task_per_node(1), f"--nodelist={node}", "true")
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=False).returncode == 0
    return False
