"""Run an action on every node of the allocation, in one step of the job."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from encore import paths
from encore.errors import EncoreError
from encore.machine import fitness
from encore.machine.fitness import Need
from encore.machine.preflight import Check
from encore.slurm import step
from encore.slurm.allocation import Allocation

STEP_SECONDS = 90.0
PROBE_SECONDS = 15.0  # a node that does not start a process within this time is taken for lost


def on_all(action: str, nodes: int, wanted: str = "null") -> list[dict[str, Any]]:
    """Return the answer of each node to an action of on_node; EncoreError if one gives none."""
    command = (*step.once_a_node(nodes), sys.executable, "-m", "encore.machine.on_node", action, wanted)
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


def check(nodes: int, needs: Sequence[Need]) -> list[Check]:
    answers = on_all("check", nodes, fitness.question(needs))
    failed = [check for answer in answers for check in fitness.judge("node", answer["node"], answer["problems"], needs)]
    return [replace(each, hint=f"{each.hint}; or leave the node out: sbatch --exclude=NODE") for each in failed]


def drop_caches(nodes: int) -> bool:
    return all(answer["dropped"] for answer in on_all("drop-caches", nodes))


def lost(allocation: Allocation) -> list[str]:
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = pool.map(_answers, allocation.nodes)
        return [node for node, answer in zip(allocation.nodes, answers, strict=True) if not answer]


def _answers(node: str) -> bool:
    command = (*step.once_a_node(1), f"--nodelist={node}", "true")
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=False).returncode == 0
    return False
