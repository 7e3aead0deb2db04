"""The steps of a job: the ranks of an experiment, where they sit and what they talk through; one process on each node.

All nodes are taken to be alike.
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

# What Slurm gives each rank about itself and PMIx; a container gets these by name from its own task.
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
    """Return a launch by srun: over PMIx for Horovod, with a rendezvous by environment for torch.distributed.

    Args:
        configuration: what is trained, on how many nodes and ranks.
        cluster: its plugin for MPI, network interface and binding.
        allocation: the Slurm job.
        caller: the batch job's environment, of which Slurm's own variables alone reach srun and so the ranks.
        logs: folder of the ranks' output: rank.0/stdout, rank.0/stderr, ...
        in_container: whether a rank needs Slurm's own folders handed in, by which it reaches PMIx.
    """
    horovod = by_horovod(configuration.choice.implementation.framework)
    nodes, per_node = configuration.nodes, configuration.ranks_per_node
    crowded = allocation.cores_per_node is not None and per_node > allocation.cores_per_node
    network = interfaces(cluster, allocation, nodes)
    if configuration.get("device") == "cpu" and horovod:
        # By MPI alone.
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
        *(["--overcommit"] if crowded else []),
        *cpu_binding(cluster, allocation, per_node),
        *_without(),
    )
    passed = {name: value for name, value in caller.items() if name.startswith("SLURM_")}
    meeting = HOROVOD_BY_MPI if horovod else _rendezvous(allocation)
    return Launch(
        "srun",
        outer=command,
        environment={**passed, **network, **meeting},
        everywhere=once_a_node(nodes),
        passed=RANK_VARIABLES,
        cores=allocation.cores_per_node,
        folders=(spool_folder(),) if horovod and in_container else (),
    )


def once_a_node(nodes: int) -> tuple[str, ...]:
    """Return the srun line of a short step next to the ranks, one process on each node."""
    return (*_on_each(nodes), "--input=none")


def _on_each(nodes: int) -> tuple[str, ...]:
    size = (f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--mpi=none")
    return ("srun", *size, "--overlap", "--export=ALL", "--cpu-bind=none", "--quiet", *_without())


def _without() -> tuple[str, ...]:
    excluded = queue.left_out(os.environ)
    return (f"--exclude={','.join(excluded)}",) if excluded else ()


def samplers(allocation: Allocation, nodes: int, telemetry: Path) -> tuple[tuple[str, ...], ...]:
    """Return the srun line that samples the nodes but for this one, next to its file ``telemetry``."""
    others = tuple(name for name in allocation.nodes[:nodes] if name != node.name())
    if not (others and allocation.is_real):
        return ()
    program = (sys.executable, "-m", "encore.machine.telemetry", str(telemetry))
    return ((*_on_each(len(others)), f"--nodelist={','.join(others)}", *program),)


def spool_folder() -> str:
    """Return the folder below which PMIx meets its clients on every node: SlurmdSpoolDir up to its %n or %h."""
    spool = commands.setting("SlurmdSpoolDir") or "/var/spool/slurmd"
    return spool if "%" not in spool else str(Path(spool.partition("%")[0] + "x").parent)


def _rendezvous(allocation: Allocation) -> dict[str, str]:
    # Where torch.distributed's ranks meet: rank 0's node, on a port that no other job of the node chose.
    port = FIRST_PORT + (int(allocation.job) if allocation.is_real else 0) % PORTS
    first = address(allocation.nodes[0]) if allocation.is_real else allocation.nodes[0]
    return {"MASTER_ADDR": first, "MASTER_PORT": str(port)}


UNBOUND = ("--cpu-bind=none",)


def cpu_binding(cluster: Cluster, allocation: Allocation, ranks_per_node: int) -> tuple[str, ...]:
    """Return options of srun: each rank on the cores and the memory of its own GPU, unless cluster.toml differs.

    Only Slurm's task/affinity plugin can bind; and ranks that share cores are better left to the kernel.
    """
    if cluster.cpu_bind != "auto":
        return (f"--cpu-bind={cluster.cpu_bind}",)
    crowded = allocation.cores_per_node is not None and ranks_per_node > allocation.cores_per_node
    if not allocation.is_real or crowded or "affinity" not in commands.setting("TaskPlugin"):
        return UNBOUND
    return binding.srun_options(binding.of_this_machine(ranks_per_node))


def interfaces(cluster: Cluster, allocation: Allocation, nodes: int) -> dict[str, str]:
    """Return settings of NCCL, Gloo, UCX and OpenMPI: for cluster.toml's interface, else for this node's."""
    name = cluster.network_interface
    if name:
        by_name = ("GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
        return {"NCCL_SOCKET_IFNAME": f"={name}", **dict.fromkeys(by_name, name)}
    if not allocation.is_real:
        return {}
    return network.variables(network.read(), nodes)


def address(node: str) -> str:
    """Return where a node can be reached: its name need not be its host's (slurm.conf, NodeAddr)."""
    if not commands.is_installed():
        return node
    match = re.search(r"\bNodeAddr=(\S+)", commands.call("scontrol", "show", "node", node))
    return match.group(1) if match else node


# -- one process on each node ----------------------------------------------------------------------------

STEP_SECONDS = 90.0
PROBE_SECONDS = 15.0  # a node that does not start a process within this time is taken for lost


def _on_all(action: str, nodes: int, wanted: str = "null") -> list[dict[str, Any]]:
    # The answer of each node to an action of host_actions; EncoreError if one gives none.
    command = (*once_a_node(nodes), sys.executable, "-m", "encore.machine.host_actions", action, wanted)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=paths.ROOT, timeout=STEP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EncoreError(
            f"the nodes did not answer within {STEP_SECONDS:g} s", hint="see their state with: sinfo -N -l"
        ) from error
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(answers) != nodes:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0].removeprefix("srun: error: ")
        raise EncoreError(
            f"{nodes - len(answers)} of {nodes} nodes cannot start {sys.executable}: {reason}",
            expected="the checkout at the same path on every node",
            hint="put it on a file system that all nodes share, and submit again",
        )
    return sorted(answers, key=lambda answer: str(answer["node"]))


def check_nodes(nodes: int, needs: Sequence[Need]) -> list[Check]:
    answers = _on_all("check", nodes, host_requirements.question(needs))
    failed = [
        check
        for answer in answers
        for check in host_requirements.failed_checks("node", answer["node"], answer["problems"], needs)
    ]
    return [replace(each, hint=f"{each.hint}; or leave the node out: sbatch --exclude=NODE") for each in failed]


def drop_caches(nodes: int) -> bool:
    return all(answer["dropped"] for answer in _on_all("drop-caches", nodes))


def lost_nodes(allocation: Allocation) -> list[str]:
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = pool.map(_answers, allocation.nodes)
        return [node for node, answer in zip(allocation.nodes, answers, strict=True) if not answer]


def _answers(node: str) -> bool:
    command = (*once_a_node(1), f"--nodelist={node}", "true")
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=False).returncode == 0
    return False
