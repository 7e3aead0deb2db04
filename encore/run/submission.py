"""Submission of runs to Slurm: options, checks, batch script."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from encore import data, job
from encore.errors import EncoreError
from encore.machine import preflight
from encore.run import hints, ownership, planning, run_folder, run_metadata, runner, status
from encore.slurm import cluster as clusters
from encore.slurm import cluster_checks, commands, script
from encore.slurm.cluster import Cluster
from encore.slurm.queue import Allocation
from encore.slurm.script import Estimate, Options, Submission

MAX_NODES = 4096
MOST_TASKS = 1000
LEAST_MINUTES = 5  # Longer than start and warning time
MOST_MINUTES = 60 * 24 * 31


@dataclass(frozen=True, kw_only=True)
class Prepared:
    submission: Submission
    cluster: Cluster
    plan: planning.Plan
    script: str
    estimate: Estimate
    step: job.Command  # Command that the job runs for each run
    secrets: Mapping[str, str]  # Variables for sbatch, which exports them to the job


def prepare(request: planning.Request, arguments: Sequence[str], options: Options) -> Prepared:
    # Resolve all choices and render the script, without contacting Slurm. ``arguments`` are from ``encore run``.
    cluster, file = _cluster(options)
    nodes = 1 if options.nodes is None else options.nodes
    per_node = (cluster.gpus_per_node or 1) if options.gpus_per_node is None else options.gpus_per_node
    for option, number, upper in (("--nodes", nodes, MAX_NODES), ("--gpus-per-node", per_node, 64)):
        if not 1 <= number <= upper:
            raise EncoreError(f"{option} {number}", expected=f"1 to {upper}")
    if request.gpus is not None:
        raise EncoreError(f"{request.gpus} GPUs given", hint="give the number of GPUs per node: --gpus-per-node")
    if request.system is None and cluster.gpus_per_node and cluster.gpu_option != "none":
        raise EncoreError(
            "no system given; the GPUs of the nodes cannot be detected here",
            hint=f"--system dgxa100, or another system from: encore list {request.name}",
        )
    tasks = _tasks(options.array)
    plan = planning.make_plan(replace(request, cluster=file), allocation=dummy_allocation(nodes, per_node, len(tasks)))
    plain, secrets = run_metadata.split_secrets(arguments)
    handed_on = script.with_cluster((str(nodes * per_node), *plain), file)
    return _prepared(plan, cluster, options, handed_on, tasks, 1 if tasks else len(plan.seeds), secrets=secrets)


def prepare_resume(path: Path, options: Options) -> Prepared:
    """Prepare a resumed run's submission: the same number of nodes, and all unfinished experiments.

    An array run is resumed as an array with one task per unfinished experiment.
    """
    folder = run_folder.open_run(path)
    folder.check_whole()
    content = folder.metadata()
    unfinished = [experiment.number for experiment in folder.experiments() if not experiment.has_finished]
    if not unfinished:
        raise EncoreError(f"{path.name} has finished: nothing left to run", hint=f"see it: {hints.follow(path)}")
    status.refuse_queued(folder, folder.experiments())
    ownership.refuse_owned(folder.experiments())
    tasks = tuple(unfinished) if options.array or status.is_of_array(folder) else ()
    if options.array and len(_tasks(options.array)) < len(unfinished):
        raise EncoreError(
            f"--array {options.array}, and {len(unfinished)} runs are left",
            hint=f"omit --array, or --array 0-{len(unfinished) - 1}",
        )
    nodes, per_node = content["nodes"], content["ranks_per_node"]
    if options.nodes not in (None, nodes):
        raise EncoreError(f"--nodes {options.nodes}, the run started on {nodes}", hint="leave --nodes out")
    cluster, file = _cluster(options)
    plan = planning.plan_of(folder, dummy_allocation(nodes, per_node, 0))
    handed_on = script.with_cluster(("--resume", str(path), *(["--trust-owner"] if options.trust_owner else [])), file)
    return _prepared(plan, cluster, options, handed_on, tasks, 1 if tasks else len(unfinished), resumes=path.name)


def _cluster(options: Options) -> tuple[Cluster, Path | None]:
    _check_options(options)
    cluster, file = clusters.load(options.cluster)
    settings = {option: getattr(options, option) for option in ("partition", "account", "qos", "gpu_type")}
    return cluster.model_copy(update={name: value for name, value in settings.items() if value}), file


def _check_options(options: Options) -> None:
    # Reject time limits that are too short to train, and sbatch options that conflict with Encore's.
    if options.minutes is not None and not LEAST_MINUTES <= options.minutes <= MOST_MINUTES:
        raise EncoreError(
            f"--time {options.minutes}",
            expected=f"{LEAST_MINUTES} to {MOST_MINUTES} minutes: the job is warned {script.WARNING_SECONDS} s before "
            "the end, writes a checkpoint and is requeued",
        )
    texts = ("partition", "account", "qos", "reservation", "dependency", "mail", "job_name", "comment")
    for name, text in ((field, getattr(options, field)) for field in texts):
        if text is not None and not re.fullmatch(r"[^\s\"'|\\]+", text):
            option = f"--{name.replace('_', '-')}"
            raise EncoreError(f"{option} {text!r}", expected="a text without spaces, quotes, backslashes and |")
    for option in options.sbatch:
        if not option.startswith("-") or "\n" in option:
            raise EncoreError(f"--sbatch {option!r} is not an sbatch option", hint="--sbatch=--constraint=a100")
        conflict = clusters.reserved_option(option)
        if conflict is not None:
            hint = clusters.RESERVED_OPTIONS[conflict]
            raise EncoreError(f"--sbatch {option!r} conflicts with an option that Encore sets", hint=hint)


def _tasks(array: str | None) -> tuple[int, ...]:
    # The numbers of the tasks that ``--array`` asks for.
    if array is None:
        return ()
    match = re.fullmatch(r"0-(\d+)(?:%[1-9]\d*)?", array)
    count = int(match.group(1)) + 1 if match else 0
    if not 1 <= count <= MOST_TASKS:
        raise EncoreError(
            f"--array {array}",
            expected=f"up to {MOST_TASKS} tasks, numbered from 0: 0-4 is 5 runs, 0-4%2 runs 2 at a time",
            hint="for other forms use: sbatch --array=... slurm/run.sub",
        )
    return tuple(range(count))


def dummy_allocation(nodes: int, gpus_per_node: int, tasks: int) -> Allocation:
    return Allocation(
        job="JOB",
        nodes=tuple(f"node{number}" for number in range(1, nodes + 1)),
        gpus_per_node=gpus_per_node,
        array_job="JOB" if tasks else None,
        array_count=tasks or 1,
    )


def _prepared(
    plan: planning.Plan,
    cluster: Cluster,
    options: Options,
    arguments: tuple[str, ...],
    tasks: tuple[int, ...],
    runs: int,
    resumes: str = "",
    secrets: Mapping[str, str] = {},
) -> Prepared:
    # Build the submission. ``runs`` is the number of sequential runs in a job.
    configuration = plan.configuration
    estimate = script.estimate(configuration, runs, options.minutes)
    submission = Submission(
        name=configuration.choice.name,
        nodes=configuration.nodes,
        gpus_per_node=configuration.ranks_per_node if configuration.get("device") == "gpu" else 0,
        minutes=estimate.minutes,
        results=plan.results,
        arguments=(*arguments, *(["--require-target"] if options.require_target else [])),
        array=tasks,
        options=options,
        resumes=resumes,
        secrets=tuple(secrets),
    )
    return Prepared(
        submission=submission,
        cluster=cluster,
        plan=plan,
        script=script.render(submission, cluster),
        estimate=estimate,
        step=runner.dry_run_command(plan),
        secrets=secrets,
    )


def check_partition(prepared: Prepared) -> preflight.Check:
    return cluster_checks.check_partition(prepared.submission, prepared.cluster.partition, prepared.cluster.gpu_type)


def checks(prepared: Prepared) -> list[preflight.Check]:
    # Checks that are possible on a login node: partition, data set, results folder, image file.
    commands.require()
    plan, target = prepared.plan, prepared.plan.target
    is_there = not plan.makes_small_data or (plan.data / data.PASSPORT).exists()
    no_image = target.problem if target.runtime in ("apptainer", "enroot", "pyxis") else None
    return [
        check_partition(prepared),
        *([preflight.check_data_set(plan.configuration, plan.data)[0]] if is_there else []),
        *preflight.check_weights(plan.configuration, plan.data, creates_data=not is_there),
        preflight.check_results(plan.results, resumes=bool(prepared.submission.resumes)),
        *([preflight.Check.of(no_image, target.runtime)] if no_image is not None else []),
    ]


def submit(prepared: Prepared) -> str:
    prepared.submission.results.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **prepared.secrets}
    done = subprocess.run(
        ["sbatch", "--parsable"], input=prepared.script, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise commands.explain("sbatch", done.stderr)
    match = re.match(r"\d+", done.stdout)
    if match is None:
        raise EncoreError(f"sbatch printed {done.stdout.strip()!r}", expected="a job number")
    return match.group()
