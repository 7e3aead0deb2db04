"""Where the ranks of a job sit on its nodes and what they talk through; all nodes are taken to be alike."""

import contextlib
import re

from encore.errors import EncoreError
from encore.machine import binding, network
from encore.slurm import commands
from encore.slurm.allocation import Allocation
from encore.slurm.cluster import Cluster

UNBOUND = ("--cpu-bind=none",)


def cpu_binding(cluster: Cluster, allocation: Allocation, ranks_per_node: int) -> tuple[str, ...]:
    """Return options of srun: each rank on the cores and the memory of its own GPU, unless cluster.toml differs.

    Only Slurm's task/affinity plugin can bind; and ranks that share cores are better left to the kernel.
    """
    if cluster.cpu_bind != "auto":
        return (f"--cpu-bind={cluster.cpu_bind}",)
    crowded = allocation.cores_per_node is not None and ranks_per_node > allocation.cores_per_node
    if not allocation.is_real or crowded or "affinity" not in setting("TaskPlugin"):
        return UNBOUND
    return binding.srun_options(binding.of_this_machine(ranks_per_node))


def setting(name: str) -> str:
    """Return one value of Slurm's configuration, such as TaskPlugin; empty where there is no Slurm."""
    # A dry run may take place anywhere, also next to a Slurm that nobody has configured.
    with contextlib.suppress(EncoreError):
        text = commands.call("scontrol", "show", "config")
        match = re.search(rf"^{name}\s*=\s*(\S+)", text, re.MULTILINE)
        return match.group(1) if match else ""
    return ""


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
