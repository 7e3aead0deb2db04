"""Ask or tell every node of the allocation something, in one step of the job."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from encore import paths
from encore.errors import EncoreError
from encore.machine.preflight import Check
from encore.slurm import step
from encore.slurm.allocation import Allocation

STEP_SECONDS = 90.0
PROBE_SECONDS = 15.0
"""A node that does not start a process within this time is taken for lost."""


def on_all(action: str, nodes: int, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer of each node to an action of encore.slurm.on_node; EncoreError if one gives none."""
    program = (sys.executable, "-m", "encore.slurm.on_node", action, json.dumps(wanted))
    command = (*step.once_a_node(nodes), *program)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=paths.ROOT, timeout=STEP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EncoreError(
            f"the nodes did not answer within {STEP_SECONDS:g} s", remedy="see their state with: sinfo -N -l"
        ) from error
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(answers) != nodes:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[0].removeprefix("srun: error: ")
        raise EncoreError(
            f"{nodes - len(answers)} of {nodes} nodes cannot start {sys.executable}: {said}",
            expected="the checkout at the same path on every node",
            remedy="put it on a file system that all nodes share, and submit again",
        )
    return sorted(answers, key=lambda answer: str(answer["node"]))


def check(nodes: int, wanted: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Check]]:
    """Facts of all nodes, and what one of them lacks."""
    answers = on_all("check", nodes, wanted)
    remedy = "mend the node, or leave it out: sbatch --exclude=NODE"
    failed = [
        Check("FAIL", f"node {answer['node']}", "; ".join(answer["missing"]), remedy)
        for answer in answers
        if answer["missing"]
    ]
    return answers, failed or [Check("OK", "nodes", f"{nodes} answer and have what the run needs")]


def drop_caches(nodes: int) -> bool:
    """Whether all nodes could drop their file caches."""
    return all(answer["dropped"] for answer in on_all("drop-caches", nodes, {}))


def lost(allocation: Allocation) -> list[str]:
    """Nodes of the allocation that no longer start a process."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = pool.map(_answers, allocation.nodes)
        return [node for node, answer in zip(allocation.nodes, answers, strict=True) if not answer]


def _answers(node: str) -> bool:
    command = (*step.once_a_node(1), f"--nodelist={node}", "true")
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
