"""What the host side costs, measured on this machine: not a test, since machines are noisy.

    $ .venv/bin/python -m tools.run_overhead            # 5 pairs of runs, about 3 minutes on 2 cores

Compares ``./run.sh resnet 2`` with horovodrun by hand over the same configuration and data, whole commands
in turn, and measures the share of a core that telemetry takes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from encore import data, environment, paths
from encore.machine.telemetry import Telemetry

PAIRS = 5
SHORT = (
    "--set",
    "epochs=1",
    "--set",
    "warmup_epochs=0",
    "--set",
    "quality_target=1.0",
    "--set",
    "checkpoint_interval=0",
)
TELEMETRY_SECONDS = 20.0


def seconds(command: list[str], variables: dict[str, str], expected: int) -> float:
    """Wall time of a command that must end with this exit code."""
    started = time.perf_counter()
    done = subprocess.run(command, cwd=paths.ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != expected:
        raise SystemExit(done.stdout + done.stderr)
    return time.perf_counter() - started


def by_hand(folder: Path, small: Path, python: Path, config: dict[str, object]) -> float:
    """horovodrun over the training command, with the environment that Encore would give."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    command = [
        "horovodrun", "--gloo", "-np", "2", "--output-filename", str(folder / "ranks"),
        "python", "-m", "benchmarks.resnet.mxnet.train",
        "--config", str(folder / "config.json"), "--data", str(small), "--output", str(folder),
    ]  # fmt: skip
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    return seconds(command, variables, 0)


def launch_overhead(work: Path) -> list[float]:
    """Seconds that ./run.sh takes longer than horovodrun, pair by pair."""
    python = environment.ensure_environment("mxnet")
    small = work / "digits"
    data.prepare("resnet", small, data.Preparation(), python, lambda update: None)
    common = ["resnet", "2", "--seed", "1", "--data", str(small), "--results", str(work / "results"), *SHORT]
    shown = subprocess.run(
        [str(paths.ROOT / "run.sh"), *common, "--dry-run", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    config = json.loads(shown.stdout)["configuration"]
    differences = []
    for number in range(PAIRS):
        hand = by_hand(work / f"hand_{number}", small, python, config)
        ours = seconds([str(paths.ROOT / "run.sh"), *common], dict(os.environ), 3)
        differences.append(ours - hand)
        print(f"pair {number + 1}: by hand {hand:.2f} s, run.sh {ours:.2f} s", file=sys.stderr)
    return differences


def telemetry_share(work: Path) -> float:
    """Share of a core that sampling takes."""
    telemetry = Telemetry(work / "telemetry.jsonl")
    process = psutil.Process()
    before = process.cpu_times()
    telemetry.start()
    time.sleep(TELEMETRY_SECONDS)
    telemetry.stop()
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / TELEMETRY_SECONDS


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        print(f"telemetry: {telemetry_share(work):.2%} of a core")
        differences = launch_overhead(work)
        print(f"host side over horovodrun by hand: median {statistics.median(differences):+.2f} s of {PAIRS} pairs")


if __name__ == "__main__":
    main()
