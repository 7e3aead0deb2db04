"""What Encore adds to a bare srun of the same command, measured on a real two-node Slurm: not a test.

    $ .venv/bin/python -m tools.slurm_overhead        # as root; 5 pairs on each number of nodes, about 5 minutes

Whole commands in turn inside one job: a bare `srun` of the training command, with the environment that Encore
gives, and `encore run` with the same configuration, data and seed.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from encore import data, environment, paths
from tests.cluster import slurm
from tools.run_overhead import SHORT

PAIRS = 5
NODES = (1, 2)


def seconds(command: list[str], variables: dict[str, str], expected: int) -> float:
    """Wall time of a command that must end with this exit code."""
    started = time.perf_counter()
    done = subprocess.run(command, cwd=paths.ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != expected:
        raise SystemExit(f"{shlex.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return time.perf_counter() - started


def pairs(work: Path, nodes: int) -> list[float]:
    """Seconds that `encore run` takes longer, pair by pair; runs inside a job of so many nodes."""
    encore = [sys.executable, "-m", "encore.cli.app", "run", "resnet", "--seed", "1", "--nodes", str(nodes)]
    encore += ["--data", str(work / "digits"), "--results", str(work / "results"), *SHORT]
    shown = subprocess.run([*encore, "--dry-run", "--json"], capture_output=True, text=True, check=True, cwd=paths.ROOT)
    planned = json.loads(shown.stdout)
    output = planned["argv"][planned["argv"].index("--output") + 1]
    differences = []
    for number in range(PAIRS):
        folder = work / f"hand_{nodes}_{number}"
        for rank in range(nodes):
            (folder / "ranks" / f"rank.{rank}").mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(planned["configuration"]), encoding="utf-8")
        bare = [word.replace(output, str(folder)) for word in planned["argv"]]
        bare_seconds = seconds(bare, planned["environment"], 0)
        ours = seconds(encore, dict(os.environ), 3)
        differences.append(ours - bare_seconds)
        print(f"{nodes} nodes, pair {number + 1}: srun {bare_seconds:.2f} s, encore run {ours:.2f} s", flush=True)
    return differences


def in_job(work: Path) -> None:
    """What the job does."""
    for nodes in NODES:
        median = statistics.median(pairs(work, nodes))
        print(f"over a bare srun on {nodes} nodes: median {median:+.2f} s of {PAIRS} pairs", flush=True)


def main() -> None:
    if "SLURM_JOB_ID" in os.environ:
        in_job(Path(sys.argv[1]))
        return
    python = environment.ensure_environment("mxnet")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        work = Path(folder)
        (work / "slurm").mkdir()
        data.prepare("resnet", work / "digits", data.Preparation(), python, lambda update: None)
        with slurm.running(work / "slurm") as cluster:
            command = [
                "salloc",
                "--nodes=2",
                "--exclusive",
                sys.executable,
                "-m",
                "tools.slurm_overhead",
                folder,
            ]
            subprocess.run(command, env=cluster.environment, cwd=paths.ROOT, check=True)


if __name__ == "__main__":
    main()
