"""Commands that the user may copy from a message: whole, quoted, and right from whatever folder they are read in."""

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
    """Return a command of Encore's as a shell takes it; by its path where ``encore`` is not on PATH."""
    installed = paths.ROOT / ".venv" / "bin" / "encore"
    program = "encore" if shutil.which("encore") or not installed.exists() else str(installed)
    return shlex.join([program, *(str(word) for word in args)])


# Keys of a configuration that decide how much a step of the training or the evaluation holds at once.
BATCHES = ("batch_size", "eval_batch_size", "inference_batch", "concurrent_games")
# Those of what is read ahead or kept in the memory of the machine.
INPUT = ("prefetch", "dali_prefetch", "dali_threads", "threads", "eval_workers", "cache_mb")
PARTS = ("accumulation", "accumulation_steps")  # Those of the parts of a batch that are trained on one after the other


def less_memory(configuration: Configuration, memory: str) -> str:
    # Which values of a configuration to change where the ``memory`` of the GPU or the CPU is too small.
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


def cancel(run: Path) -> str:
    return command("cancel", run.absolute())


def resume(run: Path) -> str:
    """Return the command that continues a run: through the cluster where it was submitted, on its terms."""
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
