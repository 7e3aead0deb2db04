"""Commands for messages, ready to copy: complete, quoted, and independent of the working directory."""

import contextlib
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from encore import paths
from encore.configuration import Configuration
from encore.errors import EncoreError
from encore.run.run_folder import RunFolder


def command(*args: str | Path) -> str:
    """Return an Encore command for the shell, with the full path if ``encore`` is not on PATH."""
    installed = paths.ROOT / ".venv" / "bin" / "encore"
    program = "encore" if shutil.which("encore") or not installed.exists() else str(installed)
    return shlex.join([program, *(str(word) for word in args)])


# Configuration keys that determine the memory for a training or evaluation step.
BATCHES = ("batch_size", "eval_batch_size", "inference_batch", "concurrent_games")
# Keys for prefetching and caching in host memory.
INPUT = ("prefetch", "dali_prefetch", "dali_threads", "threads", "eval_workers", "cache_mb")
PARTS = ("accumulation", "accumulation_steps")  # Keys for gradient accumulation


def less_memory(configuration: Configuration, memory: str) -> str:
    # Suggest configuration changes for insufficient ``memory`` (GPU or CPU).
    def choices(keys: Sequence[str], least: int) -> str:
        there = [key for key in keys if key in configuration.values and configuration.get(key) >= least]
        return " or ".join(f"{key} (now {configuration.get(key)})" for key in there)

    lower = choices(BATCHES if memory == "GPU" else (*BATCHES, *INPUT), 2)
    higher = choices([key for key in PARTS if configuration.accepts(key, configuration.get("batch_size"))], 1)
    ranks = configuration.ranks_per_node if memory == "CPU" else 1
    ways = [f"a lower {lower}" if lower else "", f"a higher {higher}" if higher else ""]
    ways.append(f"fewer ranks on a machine (now {ranks})" if ranks > 1 else "")
    return f"start a new run with {', or '.join(filter(None, ways)) or 'a smaller network'}: --set KEY=VALUE"


def follow(run: Path) -> str:
    return command("follow", run.absolute())


def inspect(run: Path) -> str:
    return f"see the outcome: {follow(run)}"


def cancel(run: Path) -> str:
    return command("cancel", run.absolute())


def resume(run: Path) -> str:
    """Return the command that resumes a run, on the cluster that it was submitted to."""
    submitted, cluster, target_options = False, "", []
    with contextlib.suppress(EncoreError):
        metadata = RunFolder(run).metadata()
        submitted, cluster = (
            bool(metadata.get("slurm") or metadata.get("kubernetes")),
            metadata.get("cluster_file") or "",
        )
        target_options = [
            argument for argument in metadata.get("arguments") or () if submitted and argument == "--require-target"
        ]
    with_cluster = ("--cluster", cluster) if cluster else ()
    return command("submit" if submitted else "run", "--resume", run.absolute(), *with_cluster, *target_options)
