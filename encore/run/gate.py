"""Node checks before a job: query all nodes of a Slurm job or host list, measure pairs of nodes, store the results.

from encore.run.gate import check, from_job
verdicts = check(from_job(allocation, cluster), (results,))
"""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore import environment, launchers, paths
from encore.errors import EncoreError
from encore.files import utc_now
from encore.machine import health, node, node_checks
from encore.machine.node_checks import Gate, NodeVerdict
from encore.slurm import queue, step
from encore.slurm.cluster import Cluster
from encore.slurm.queue import Allocation
from encore.ssh import multi_host
from encore.ssh.hosts import Host

ALL_SECONDS = 300.0
NODE_SECONDS = 180.0  # With the framework's measurements
PAIR_SECONDS = 60.0
AT_ONCE = 1024  # Nodes and pairs that are waited for at a time
FIRST_PORT = 31000  # First rendezvous port for a pair, below the ephemeral ports


@dataclass(frozen=True, kw_only=True)
class NodeSet:
    """Nodes and the commands that run programs on them."""

    nodes: tuple[str, ...]
    everywhere: tuple[tuple[str, ...], ...]
    clock: str  # Name of this machine, as the nodes know it
    # Returns command and variables of ranks on two nodes; None: pairs are not measured
    pair: Callable[[tuple[str, str], int, tuple[str, ...]], tuple[tuple[str, ...], Mapping[str, str]]] | None = None


def this_node() -> NodeSet:
    return NodeSet(nodes=(node.name(),), everywhere=((),), clock="localhost")


def from_job(allocation: Allocation, cluster: Cluster) -> NodeSet:
    """Return the nodes of the Slurm job that this process runs in."""

    def pair(nodes: tuple[str, str], ranks: int, program: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
        port = FIRST_PORT + allocation.nodes.index(nodes[0]) % 1000
        meeting = {"MASTER_ADDR": step.address(nodes[0]), "MASTER_PORT": str(port)}
        # Slurm's variables contain the task counts of the full job.
        plain = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_NTASKS")}
        size = ("--nodes=2", f"--ntasks={2 * ranks}", f"--ntasks-per-node={ranks}", f"--nodelist={','.join(nodes)}")
        command = ("srun", *size, "--mpi=none", "--overlap", "--cpu-bind=none", "--quiet", "--input=none")
        return (*command, *program), {**plain, **step.interfaces(cluster, allocation, 2), **meeting}

    names = allocation.nodes
    once = (*step.one_task_per_node(len(names)), f"--nodelist={','.join(names)}")
    return NodeSet(nodes=names, everywhere=(once,), clock=platform.node(), pair=pair)


def from_hosts(hosts: Sequence[Host]) -> NodeSet:
    """Return hosts that are reached over ssh; the first is this machine. Pairs are not measured."""
    commands = [() if multi_host.is_local(host.name) else multi_host.shell_command(host.name) for host in hosts]
    first = multi_host.with_first_resolved(tuple(hosts))[0].name
    return NodeSet(nodes=tuple(host.name for host in hosts), everywhere=tuple(commands), clock=first)


def check(
    nodes: NodeSet,
    disks: Sequence[Path],
    python: Path | None = None,
    on_step: Callable[[str], None] = lambda text: None,
    must_exist: bool = False,
) -> list[NodeVerdict]:
    """Query all nodes and measure pairs of nodes; return one verdict per node. Takes up to five minutes.

    Args:
        nodes: Nodes to check.
        disks: Folders that every node must be able to write to.
        python: Interpreter with PyTorch; None: GEMMs, copies and collectives are not measured.
        on_step: Called with progress messages.
        must_exist: Whether missing folders are an error. A run would create them.
    """
    until = time.monotonic() + ALL_SECONDS
    on_step(f"checking {len(nodes.nodes)} node{'s' * (len(nodes.nodes) > 1)}")
    with health.serve_clock() as port:
        question = {
            "disks": list(map(str, disks)),
            "named": must_exist,
            "clock": f"{nodes.clock}:{port}" if len(nodes.nodes) > 1 else "",
            "python": str(python or ""),
        }
        program = (sys.executable, "-m", "encore.machine.health", json.dumps(question))
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            answered = list(pool.map(lambda command: _ask(command, program), nodes.everywhere))
    facts_by_node: dict[str, Any] = dict.fromkeys(nodes.nodes)
    reasons = dict.fromkeys(nodes.nodes, f"no answer within {NODE_SECONDS:g} s")
    # A host reports its hostname, which may differ from its ssh name.
    one_each = len(nodes.everywhere) == len(nodes.nodes)
    for position, (answers, reason) in enumerate(answered):
        names = nodes.nodes[position : position + 1] if one_each else nodes.nodes
        facts_by_node.update({names[0] if one_each else name: info for name, info in answers.items()})
        reasons.update({name: reason for name in names if reason})
    pairs = _pairs(nodes, python, facts_by_node, on_step, until) if python else {}
    return node_checks.check_nodes(facts_by_node, pairs, reasons)


def _ask(command: tuple[str, ...], program: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    # The facts by node that one command brings, and why some are missing.
    argv = [*command, *program] if not command or command[0] == "srun" else [*command, shlex.join(program)]
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=paths.ROOT
        )
    except OSError as error:
        return {}, f"{argv[0]}: {error.strerror}"
    try:
        output, errors = process.communicate(timeout=NODE_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # On SIGTERM srun terminates its tasks. On SIGKILL it leaves them running.
        output, errors = process.communicate()
    messages = [line.removeprefix("srun: error: ") for line in errors.splitlines() if line.strip()]
    reason = (messages or [f"exit code {process.returncode}"])[-1] if process.returncode else ""
    return health.parse_answers(output), reason


def _pairs(
    nodes: NodeSet, python: Path, facts_by_node: Mapping[str, Any], on_step: Callable[[str], None], until: float
) -> dict[tuple[str, str], dict[str, float]]:
    names = [name for name in nodes.nodes if facts_by_node[name] is not None]
    if nodes.pair is None or len(names) < 2:
        return {}
    measured: dict[tuple[str, str], dict[str, float]] = {}
    cards = min(len(facts_by_node[name]["gpus"]) for name in names)
    size = ("--device", "gpu") if cards else ("--device", "cpu", "--most-bytes", str(1 << 22))
    program = (str(python), "-m", "benchmarks.common.checks.link_speeds", *size)
    for pairs in node_checks.rounds_of(names):
        if until - time.monotonic() < PAIR_SECONDS:
            on_step(f"not measured (time limit): {', '.join('-'.join(pair) for pair in pairs)}")
            continue
        on_step(f"measuring between {', '.join('-'.join(pair) for pair in pairs)}")
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            commands = [
                nodes.pair(pair, cards or 1, (*program, "--no-pairs", "--output", "/dev/stdout")) for pair in pairs
            ]
            measured.update(zip(pairs, pool.map(lambda rank_command: _rates(*rank_command), commands), strict=True))
    return measured


def _rates(argv: tuple[str, ...], variables: Mapping[str, str]) -> dict[str, float]:
    # Bandwidth per collective for the largest array, bytes/s; empty if the ranks failed.
    with suppress(OSError, ValueError, KeyError, subprocess.TimeoutExpired):
        done = subprocess.run(
            argv, env=dict(variables), stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=paths.ROOT,
            timeout=PAIR_SECONDS, check=False,
        )  # fmt: skip
        result = json.loads(done.stdout[done.stdout.index("{") :])
        rows = sorted(result["collectives"], key=lambda row: int(row["bytes"]))
        return {row["kind"]: float(row["rate"]) for row in rows}
    return {}


def framework_python(requested: Path | None) -> Path | None:
    """Return the Python for measurements: the requested one, else Encore's framework environment if it exists."""
    if requested is not None:
        return requested.expanduser().absolute()
    with suppress(EncoreError):
        framework = environment.describe(launchers.own_framework())
        return framework.python if framework.is_ready else None
    return None


# -- a run in a job with spare nodes --------------------------------------------------------------------------


def leave_out_failed(min_nodes: int | None, cluster: Cluster, results: Path, on_step: Callable[[str], None]) -> Gate:
    """Exclude failed nodes of this Slurm job from the run, through ENCORE_LEFT_OUT in the environment.

    Returns the content of gate.json.

    Raises:
        EncoreError: not in a Slurm job, or fewer than ``min_nodes`` nodes pass (None: all must pass).
    """
    allocation = queue.this_allocation(os.environ)
    if allocation is None:
        raise EncoreError("--gate outside of a Slurm job", hint="encore doctor --nodes --hosts n1:8,n2:8")
    verdicts = check(from_job(allocation, cluster), (results,), on_step=on_step)
    node_checks.store(verdicts)
    failed = {verdict.node: "; ".join(verdict.reasons) for verdict in verdicts if verdict.level == "FAIL"}
    reasons = [f"{name}: {reason}" for name, reason in failed.items()]
    needed = min_nodes or len(allocation.nodes)
    if len(allocation.nodes) - len(failed) < needed:
        raise EncoreError(
            f"{len(failed)} of {len(allocation.nodes)} nodes failed the gate: {' | '.join(reasons)}",
            expected=f"{needed} that pass",
            hint=f"allocate spare nodes, sbatch -N {needed + len(failed)} ... --nodes {needed} --gate; or leave them "
            f"out: sbatch --exclude={','.join(failed)}",
        )
    for line in reasons:
        on_step(f"excluded by the gate: {line}")
    if failed:
        os.environ[queue.EXCLUDED_NODES] = ",".join(failed)
    return {"time": utc_now(), "nodes": verdicts}
