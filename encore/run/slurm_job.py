"""Runs inside a Slurm job: which run folder is theirs, which experiments, and what a lost node means."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from encore.errors import EncoreError
from encore.run import hints, run_folder
from encore.run.run_folder import Experiment, RunFolder
from encore.run.supervise import Outcome, launcher_output
from encore.slurm import commands, nodes
from encore.slurm.allocation import Allocation

LAUNCHES = 3  # Tries to start the ranks
# Time for a checkpoint after a signal: less than KillWait, after which Slurm kills (30 s unless configured).
STOP_SECONDS = 20.0


def folders(results: Path, mark: str) -> list[RunFolder]:
    """Run folders of a job, the oldest first; ``mark`` is ``job12``."""
    found = sorted(results.glob(f"[0-9]*-{mark}")) + sorted(results.glob(f"[0-9]*-{mark}-[0-9]*"))
    return [RunFolder(path) for path in found if (path / "run.json").is_file()]


def begun(results: Path, allocation: Allocation, arguments: Sequence[str]) -> RunFolder | None:
    """Return the folder that this call made before its job was requeued, or that another task of its array made.

    A job may hold several calls: the folder of the same command line counts, an unfinished one first.
    """
    if allocation.restarts == 0 and allocation.array_count == 1:
        return None
    same = [f for f in folders(results, allocation.folder_mark) if f.passport()["arguments"] == list(arguments)]
    unfinished = [folder for folder in same if not _has_ended(folder)]
    return next(iter([*unfinished, *same]), None)


def _has_ended(folder: RunFolder) -> bool:
    return all(each.state().status in run_folder.FINISHED for each in folder.experiments())


def shared_stamp(allocation: Allocation) -> str | None:
    """Return the time in the folder's name that all tasks of an array have in common; None outside of arrays."""
    if allocation.array_count == 1:
        return None
    submitted = commands.show_job(allocation.job).get("SubmitTime", "")
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(submitted).astimezone(timezone.utc).strftime(run_folder.STAMP)
    return f"array{allocation.array_job}"


def experiments_of(folder: RunFolder, allocation: Allocation | None) -> list[Experiment]:
    """Return all experiments, or for a task of an array its own.

    In the array that began the run that is the one at the task's place, in an array that resumes it the one of the
    task's number.
    """
    every = folder.experiments()
    if allocation is None or allocation.array_job is None:
        return every
    is_first = folder.path.name.partition(f"-{allocation.folder_mark}")[1] != ""
    number = allocation.array_index if is_first else allocation.array_task
    mine = [each for each in every if each.number == number]
    if not mine:
        raise EncoreError(
            f"task {allocation.array_task} of the array has no experiment in {folder.path.name}",
            expected=f"tasks 0 to {len(every) - 1}",
            hint=hints.resume(folder.path),
        )
    return mine


def was_not_launched(experiment: Experiment) -> bool:
    """Return whether srun could not start the ranks at all, which another try may.

    PMIx's socket of a step that a crash cut off, for one, blocks the next step of its number on that node
    (mpi/pmix, pmixp_usock_create_srv); the next try has the next number.
    """
    return "aborted before step completely launched" in launcher_output(experiment)


def blame_lost_nodes(outcome: Outcome, allocation: Allocation) -> Outcome:
    """Return the outcome; a failure since a node was lost is an interruption, to be resumed elsewhere."""
    lost = nodes.lost(allocation)
    if not lost:
        return outcome
    reason = f"lost {', '.join(lost)}: no process can be started there ({outcome.reason})"
    return replace(outcome, status="interrupted", reason=reason, lost_nodes=tuple(lost))
