"""Measure the overhead of the host side on this machine or on a two-node Slurm cluster.

    $ .venv/bin/python -m tools.overhead            # 5 pairs of runs, about 3 minutes on 2 cores
    $ .venv/bin/python -m tools.overhead --slurm    # as root; 5 pairs on each number of nodes, about 5 minutes
    $ .venv/bin/python -m tools.overhead --telemetry    # 5 pairs of runs with and without it, about 8 minutes

Compares `./run.sh resnet 2`, or `encore run` in a Slurm job, with the plain launcher command for the same
configuration, data, seed and environment, in turn; and measures the CPU fraction that telemetry uses.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import psutil
import typer

from encore import data, environment, paths
from encore.machine.telemetry import Telemetry
from tests.cluster import conftest as real_slurm
from tools import run

PAIRS = 5
NODES = (1, 2)
ON_NODES = (sys.executable, "-m", "encore.cli.app", "run", "resnet")
SHORT = ("epochs=1", "warmup_epochs=0", "quality_target=1.0", "checkpoint_interval=0")
TELEMETRY_SECONDS = 20.0
TELEMETRY_PAIRS = 5
# Encore without telemetry
WITHOUT = """
from encore.cli.app import main
from encore.machine.telemetry import Telemetry
Telemetry.start = Telemetry.stop = lambda telemetry: None
main()
"""


def seconds(command: Sequence[str], variables: Mapping[str, str], expected: int) -> float:
    # Wall time for a command, which must exit with this code
    started = time.perf_counter()
    done = subprocess.run(command, cwd=paths.ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != expected:
        raise SystemExit(done.stdout + done.stderr)
    return time.perf_counter() - started


def measure(title: str, command: Sequence[str], work: Path, ranks: int) -> None:
    # Print the median of the additional seconds of Encore's command compared with the launcher, by pair
    encore_command = [*command, "--seed", "1", "--data", str(work / "digits"), "--results", str(work / "results")]
    encore_command += [word for setting in SHORT for word in ("--set", setting)]
    planned = json.loads(subprocess.check_output([*encore_command, "--dry-run", "--json"], text=True, cwd=paths.ROOT))
    output = planned["argv"][planned["argv"].index("--output") + 1]
    differences = []
    for number in range(PAIRS):
        folder = work / f"bare_{title.replace(' ', '_')}_{number}"
        for rank in range(ranks):
            (folder / "ranks" / f"rank.{rank}").mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(planned["configuration"]), encoding="utf-8")
        bare = seconds([word.replace(output, str(folder)) for word in planned["argv"]], planned["environment"], 0)
        differences.append(seconds(encore_command, os.environ, 3) - bare)
        print(f"{title}, pair {number + 1}: bare {bare:.2f} s, Encore {differences[-1]:+.2f} s", flush=True)
    print(f"{title}: median {statistics.median(differences):+.2f} s of {PAIRS} pairs", flush=True)


def telemetry_pairs(work: Path) -> None:
    # Print the additional run time with telemetry by pair, in alternating order
    options = ["run", "resnet", "2", "--seed", "1", "--data", str(work / "digits"), "--results", str(work / "results")]
    options += ["--set", "quality_target=1.0", "--set", "epochs=2"]
    kinds = {"with": [sys.executable, "-m", "encore.cli.app"], "without": [sys.executable, "-c", WITHOUT]}
    ratios = []
    for number in range(TELEMETRY_PAIRS):
        names = list(kinds) if number % 2 else list(reversed(kinds))
        took = {name: seconds([*kinds[name], *options], os.environ, 3) for name in names}
        ratios.append(took["with"] / took["without"])
        print(f"pair {number + 1}: without {took['without']:.2f} s, with telemetry {ratios[-1] - 1:+.2%}", flush=True)
    spread = f"{min(ratios) - 1:+.2%} to {max(ratios) - 1:+.2%}"
    print(f"telemetry: median {statistics.median(ratios) - 1:+.2%} of {TELEMETRY_PAIRS} pairs, {spread}")


def telemetry_share(work: Path) -> float:
    # CPU seconds per second that sampling uses
    telemetry, process = Telemetry(work / "telemetry.jsonl"), psutil.Process()
    start_times = process.cpu_times()
    telemetry.start()
    time.sleep(TELEMETRY_SECONDS)
    telemetry.stop()
    after = process.cpu_times()
    return (after.user + after.system - start_times.user - start_times.system) / TELEMETRY_SECONDS


def main(
    slurm: Annotated[bool, typer.Option("--slurm", help="on a real two-node Slurm")] = False,
    telemetry: Annotated[bool, typer.Option("--telemetry", help="pairs of runs with and without telemetry")] = False,
    in_job: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    if in_job is not None:
        for nodes in NODES:
            measure(f"over srun on {nodes} nodes", [*ON_NODES, "--nodes", str(nodes)], in_job, nodes)
        return
    python = environment.ensure_environment("mxnet")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        work = Path(folder)
        data.prepare("resnet", work / "digits", data.Preparation(), python, lambda update: None)
        if telemetry:
            telemetry_pairs(work)
            return
        if not slurm:
            print(f"telemetry: {telemetry_share(work):.2%} of a core")
            measure("over horovodrun", [str(paths.ROOT / "run.sh"), "resnet", "2"], work, 2)
            return
        (work / "slurm").mkdir()
        with real_slurm.running(work / "slurm") as cluster:
            command = ["salloc", "--nodes=2", "--exclusive", sys.executable, "-m", "tools.overhead", "--in-job", folder]
            subprocess.run(command, env=cluster.environment, cwd=paths.ROOT, check=True)


if __name__ == "__main__":
    run(main, __doc__)
