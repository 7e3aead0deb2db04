"""Points of a sweep as Slurm jobs: what `encore submit` does, once a point.

from encore.lab.scaling.batch import connect
sweep_folder.run(study, here, connect(cluster_file=None), submit_all=True)
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from encore.lab.scaling.grid import GridPoint
from encore.lab.scaling.sweep_folder import Submitter
from encore.machine import preflight
from encore.run import submission
from encore.run.planning import Request
from encore.run.run_folder import RunFolder
from encore.run.submission import Prepared, Wanted
from encore.slurm import commands, queue


def connect(cluster_file: Path | None) -> Submitter | None:
    """Return the scheduler of this machine; None where there is no Slurm."""
    if not commands.is_installed():
        return None

    def check(point: GridPoint, request: Request) -> None:
        preflight.refuse_failed(submission.checks(prepared(point, request, cluster_file)))

    def submit(point: GridPoint, request: Request) -> str:
        return submission.submit(prepared(point, request, cluster_file))

    def resume(run: RunFolder) -> str:
        return submission.submit(submission.prepare_resume(run.path, Wanted(cluster=cluster_file)))

    return Submitter(submit=submit, is_live=is_live, check=check, resume=resume)


def prepared(point: GridPoint, request: Request, cluster_file: Path | None) -> Prepared:
    """Return the batch job of a point; needs no Slurm."""
    wanted = Wanted(nodes=point.nodes, gpus_per_node=point.gpus_per_node, cluster=cluster_file)
    # Nodes and GPUs are the job's, not the command line's.
    asked = replace(request, gpus=None, nodes=None)
    return submission.prepare(asked, arguments(asked), wanted)


def arguments(request: Request) -> tuple[str, ...]:
    """Return the options of ``encore run`` that make this request, without its GPUs and its cluster file."""
    given = {
        "--system": request.system,
        "--round": request.round,
        "--data": request.data,
        "--results": request.results,
        "--runs": request.runs,
        "--seed": request.seed,
        "--runtime": request.runtime,
        "--image": request.image,
        "--python": request.python,
    }
    found = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    found += [word for setting in request.settings for word in ("--set", setting)]
    found += [word for variable in request.environment for word in ("--env", variable)]
    if request.drop_caches is not None:
        found.append("--drop-caches" if request.drop_caches else "--no-drop-caches")
    return tuple(found)


def is_live(job: str) -> bool:
    """Return whether a job waits or runs; one that the controller has forgotten does not."""
    state = commands.show_job(job).get("JobState", "")
    return bool(state) and state not in queue.ENDED
