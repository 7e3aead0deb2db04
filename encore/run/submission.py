"""From what the user asks for to a checked batch script, and to the queue."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from encore import data
from encore.configuration import Configuration
from encore.errors import EncoreError
from encore.job import Command
from encore.machine import preflight
from encore.machine.preflight import Check
from encore.run import planning, run_folder, runner
from encore.run.planning import Plan, Request
from encore.slurm import cluster as clusters
from encore.slurm import commands, partitions, script, walltime
from encore.slurm.allocation import Allocation
from encore.slurm.cluster import Cluster
from encore.slurm.script import Submission
from encore.slurm.walltime import Estimate

MAX_NODES = 4096


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What ``encore submit`` was asked for in addition to the run; None leaves the choice to cluster.toml."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    minutes: int | None = None
    array: int | None = None
    partition: str | None = None
    account: str | None = None
    more: tuple[str, ...] = ()
    cluster: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A submission that is ready for sbatch."""

    submission: Submission
    cluster: Cluster
    plan: Plan
    script: str
    estimate: Estimate
    step: Command
    """What the job starts for each run."""


def prepare(request: Request, arguments: Sequence[str], wanted: Wanted) -> Prepared:
    """Make all choices and render the script; needs no Slurm. ``arguments`` are those of ``encore run``."""
    cluster, file = _cluster(wanted)
    nodes = 1 if wanted.nodes is None else wanted.nodes
    per_node = (cluster.gpus_per_node or 1) if wanted.gpus_per_node is None else wanted.gpus_per_node
    _check_numbers(nodes, per_node, wanted)
    if request.gpus is not None:
        raise EncoreError(f"{request.gpus} GPUs given", remedy="give the GPUs of each node: --gpus-per-node")
    _refuse_unknown_gpus(request, cluster)
    allocation = pretended(nodes, per_node, wanted.array)
    plan = planning.make_plan(replace(request, cluster=file), allocation=allocation)
    handed_on = script.with_cluster((str(nodes * per_node), *arguments), file)
    return _prepared(plan, cluster, wanted, handed_on)


def prepare_resume(path: Path, wanted: Wanted) -> Prepared:
    """Return the same for a run to be resumed; it needs as many nodes as it began with."""
    folder = run_folder.open_run(path)
    passport = folder.passport()
    nodes, per_node = passport["nodes"], passport["ranks_per_node"]
    if wanted.nodes not in (None, nodes):
        raise EncoreError(f"--nodes {wanted.nodes}, the run began on {nodes}", remedy="leave --nodes out")
    cluster, file = _cluster(wanted)
    plan = planning.plan_of(folder, pretended(nodes, per_node, None))
    handed_on = script.with_cluster(("--resume", str(path)), file)
    return _prepared(plan, cluster, wanted, handed_on, resumes=True)


def _cluster(wanted: Wanted) -> tuple[Cluster, Path | None]:
    cluster, file = clusters.load(wanted.cluster)
    given = {"partition": wanted.partition, "account": wanted.account}
    return cluster.model_copy(update={name: value for name, value in given.items() if value}), file


def _check_numbers(nodes: int, per_node: int, wanted: Wanted) -> None:
    for option, number, most in (
        ("--nodes", nodes, MAX_NODES),
        ("--gpus-per-node", per_node, 64),
        ("--array", 1 if wanted.array is None else wanted.array, 1000),
        ("--time", 1 if wanted.minutes is None else wanted.minutes, 60 * 24 * 31),
    ):
        if not 1 <= number <= most:
            raise EncoreError(f"{option} {number}", expected=f"1 to {most}")
    for option in wanted.more:
        if not option.startswith("-") or "\n" in option:
            raise EncoreError(f"--sbatch {option!r} is no option of sbatch", remedy="--sbatch=--constraint=a100")


def _refuse_unknown_gpus(request: Request, cluster: Cluster) -> None:
    """Refuse where no system was named: a login node has no GPUs from which it could be chosen."""
    if request.system is None and cluster.gpus_per_node and cluster.gpu_option != "none":
        raise EncoreError(
            "no system named; the nodes' GPUs cannot be seen from here",
            remedy=f"--system dgxa100, or another one of: encore list {request.name}",
        )


def pretended(nodes: int, gpus_per_node: int, array: int | None) -> Allocation:
    """Return an allocation such as the job will have, to plan with."""
    return Allocation(
        job="JOB",
        nodes=tuple(f"node{number}" for number in range(1, nodes + 1)),
        gpus_per_node=gpus_per_node,
        array_job="JOB" if array else None,
        array_count=array or 1,
    )


def _prepared(
    plan: Plan, cluster: Cluster, wanted: Wanted, arguments: tuple[str, ...], resumes: bool = False
) -> Prepared:
    configuration = plan.configuration
    runs = 1 if wanted.array else len(plan.seeds)
    estimate = walltime.estimate(configuration, runs)
    if wanted.minutes:
        estimate = Estimate(wanted.minutes, "as asked for")
    submission = Submission(
        name=configuration.choice.name,
        nodes=configuration.nodes,
        gpus_per_node=_gpus(configuration),
        minutes=estimate.minutes,
        results=plan.results,
        arguments=arguments,
        array=wanted.array,
        more=wanted.more,
    )
    text = script.render(submission, cluster, with_name=not resumes)
    return Prepared(
        submission=submission,
        cluster=cluster,
        plan=plan,
        script=text,
        estimate=estimate,
        step=runner.dry_run_command(plan),
    )


def _gpus(configuration: Configuration) -> int:
    return configuration.ranks_per_node if configuration.get("device") == "gpu" else 0


def checks(prepared: Prepared) -> list[Check]:
    """Return what can be seen from a login node: the partition, the data set, the results folder, the image file."""
    commands.require()
    partition = partitions.choose(partitions.partitions(), prepared.cluster.partition)
    partitions.refuse_impossible(prepared.submission, partition)
    plan = prepared.plan
    found = [Check("OK", "partition", f"{partition.name}, {partition.nodes} nodes")]
    if not plan.makes_small_data or (plan.data / data.PASSPORT).exists():
        found.append(preflight.check_data_set(plan.configuration, plan.data)[0])
    found.append(preflight.check_results(plan.results))
    if plan.target.problem is not None and plan.target.runtime in ("apptainer", "enroot", "pyxis"):
        found.append(Check("FAIL", plan.target.runtime, plan.target.problem.found, plan.target.problem.remedy))
    return found


def submit(prepared: Prepared) -> str:
    """Hand the script to sbatch; return the job's number."""
    prepared.submission.results.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["sbatch", "--parsable"], input=prepared.script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise commands.explain("sbatch", done.stderr)
    match = re.match(r"\d+", done.stdout)
    if match is None:
        raise EncoreError(f"sbatch printed {done.stdout.strip()!r}", expected="the number of the job")
    return match.group()
