"""``encore submit``: a batch job of `encore run`, checked before it waits in the queue."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
import typer.main
from typing_extensions import TypedDict

from encore.cli import options
from encore.cli.layout import console, say, write_json
from encore.cli.run import as_request, print_checks, run
from encore.errors import EncoreError
from encore.kubernetes import manifests
from encore.kubernetes.api import Connection
from encore.kubernetes.settings import volume
from encore.machine import preflight
from encore.run import hints, planning, pods, run_folder, run_metadata, runner, workloads
from encore.run import submission as submissions
from encore.slurm import cluster as clusters
from encore.slurm import commands
from encore.slurm.script import Wanted


class Step(TypedDict):
    argv: tuple[str, ...]
    environment: Mapping[str, str]


class Submitted(TypedDict):
    """A batch job."""

    job: str | None  # Null of a dry run
    minutes: int | None  # Its time limit; null: the partition's
    estimate: str  # Where that is from
    script: str
    step: Step  # What it starts on its first node, for each run


class Manifests(TypedDict):
    """The objects of a run's experiments, as kubectl takes them."""

    kind: Literal["List"]
    apiVersion: Literal["v1"]
    items: list[dict[str, Any]]


class SentWorkloads(TypedDict):
    """A run that was sent to a cluster."""

    run: str  # Its folder
    workloads: list[str]  # Their names, one of each experiment


def submit(
    context: typer.Context,
    benchmark: options.OptionalBenchmark = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes; default: 1.")] = None,
    gpus_per_node: Annotated[
        str | None,
        typer.Option(
            metavar="GPUS", help="Of each node, also a100:8; without any: ranks; default: cluster.toml's, or 1."
        ),
    ] = None,
    minutes: Annotated[
        int | None, typer.Option("--time", help="Minutes; default: from the published time, with a margin.")
    ] = None,
    array: Annotated[
        str | None, typer.Option(metavar="0-N", help="A run for each task of an array, as sbatch has it: 0-4, 0-4%2.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Instead of cluster.toml's.")] = None,
    account: Annotated[str | None, typer.Option(help="Instead of cluster.toml's.")] = None,
    qos: Annotated[str | None, typer.Option(help="Instead of cluster.toml's.")] = None,
    reservation: Annotated[str | None, typer.Option(help="Reservation to run in.")] = None,
    dependency: Annotated[str | None, typer.Option(help="What to wait for, as sbatch has it: afterok:12.")] = None,
    mail: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Mail at the end, a failure and a requeue.")
    ] = None,
    job_name: Annotated[str | None, typer.Option(help="Put after encore-BENCHMARK- in the job's name.")] = None,
    comment: Annotated[str | None, typer.Option(help="Put after Encore's part of the job's comment.")] = None,
    require_target: Annotated[
        bool,
        typer.Option("--require-target", help="A missed target ends the job as FAILED; else afterok: jobs start."),
    ] = False,
    sbatch: Annotated[list[str] | None, typer.Option(metavar="OPTION", help="A further option of sbatch.")] = None,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="To a Kubernetes cluster; the GPUs in all follow the benchmark.")
    ] = False,
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="job, jobset, trainjob or auto; default: cluster.toml's, or auto."),
    ] = None,
    volumes: Annotated[
        list[str] | None,
        typer.Option("--volume", metavar="FOLDER=CLAIM", help="Folder that a PersistentVolumeClaim has."),
    ] = None,
    resume: options.Resume = None,
    trust_owner: options.TrustOwner = False,
    cluster: options.Cluster = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Write a batch script or a manifest, check it, and hand it to Slurm (sbatch) or Kubernetes.

    Examples:

      encore submit resnet --nodes 4 --gpus-per-node 8 --system dgxa100 --data /data/imagenet

      encore submit resnet --nodes 2 --array 0-4          5 runs, each a task of an array

      encore submit resnet --nodes 4 --runtime pyxis --dry-run

      encore submit --resume results/20261120T101500Z-resnet-mxnet-dgxa100-job12

      encore submit resnet-pytorch 16 --kubernetes --nodes 2 --system dgxa100 --volume /shared=CLAIM --dry-run

    All options of `encore run` may follow. What is particular to the cluster is in cluster.toml.
    """
    rest = tuple(context.args)
    if resume is not None:
        _refuse_more(resume, benchmark, rest)
        run_folder.refuse_foreign(resume, trust_owner)
    if kubernetes or _is_in_pods(resume):
        _refuse_others(context, KUBERNETES if resume is None else RESUMING)
        if cluster is not None:
            # The passport names it, and so does the command that resumes.
            os.environ["ENCORE_CLUSTER"] = str(cluster.absolute())
        if resume is not None:
            _resume_in_pods(resume.absolute(), dry_run, as_json)
        else:
            asked = pods.Wanted(kind=kind, nodes=nodes, volumes=tuple(map(volume, volumes or ())), minutes=minutes)
            given = _run_context(_named(benchmark), rest)
            _refuse_without_watch(given)
            if "hang_seconds" in options.given(given):
                asked = replace(asked, hang_seconds=given.params["hang_seconds"])
            _to_kubernetes(given.params, asked, dry_run, as_json)
        return
    if kind is not None or volumes:
        raise EncoreError("--kind and --volume are for --kubernetes", hint="add --kubernetes, or leave them out")
    gpu_type, count = _gpus(gpus_per_node)
    wanted = Wanted(
        nodes=nodes,
        gpus_per_node=count,
        gpu_type=gpu_type,
        minutes=minutes,
        array=array,
        partition=partition,
        account=account,
        qos=qos,
        reservation=reservation,
        dependency=dependency,
        mail=mail,
        job_name=job_name,
        comment=comment,
        require_target=require_target,
        more=tuple(sbatch or ()),
        cluster=cluster,
        trust_owner=trust_owner,
    )
    if resume is not None:
        prepared = submissions.prepare_resume(resume.absolute(), wanted)
    else:
        prepared = submissions.prepare(as_request(_run_context(_named(benchmark), rest).params), rest, wanted)
    job, screen = None, console(stderr=True, soft_wrap=True)
    if dry_run:
        found = [submissions.check_partition(prepared)] if commands.is_installed() else []
        print_checks(screen, [each for each in found if each.level in ("WARN", "FAIL")])
    else:
        found = submissions.checks(prepared)
        print_checks(screen, [each for each in found if each.level == "WARN"])
        preflight.refuse_failed(found)
        job = submissions.submit(prepared)
    if as_json:
        content: Submitted = {
            "job": job,
            "minutes": prepared.submission.minutes,
            "estimate": prepared.estimate.reason,
            "script": prepared.script,
            "step": {
                "argv": tuple(map(run_metadata.redact_text, prepared.step.argv)),
                "environment": run_metadata.redact(prepared.step.environment),
            },
        }
        write_json("submission", content)
    elif dry_run:
        typer.echo(prepared.script, nl=False)
        typer.echo("\n# What it starts on its first node, for each run:")
        typer.echo("\n".join(f"#   {line}" for line in runner.as_shell(prepared.step).splitlines()))
    else:
        say(console(), f"time limit: {prepared.estimate.reason}")
        say(console(), f"submitted as job {job}; watch it with: {hints.command('follow', str(job))}")


submit.settings = {"context_settings": options.PASS_ON}  # type: ignore[attr-defined]


RESUMING = {"kubernetes", "resume", "trust_owner", "cluster", "dry_run", "as_json"}
# Options of this command that mean something to Kubernetes
KUBERNETES = RESUMING | {"benchmark", "nodes", "minutes", "kind", "volumes"}


def _refuse_others(context: typer.Context, known: set[str]) -> None:
    more = sorted(options.given(context) - known - {"benchmark"})
    if more:
        named = {each.name: each.opts[0] for each in context.command.params}
        given = ", ".join(named[name] for name in more)
        if known is RESUMING:
            raise EncoreError(f"{given} with --resume", expected="what the run was submitted with", hint="leave it out")
        raise EncoreError(f"{given} with Kubernetes", expected="no option of Slurm's", hint="leave it out")


def _refuse_without_watch(given: typer.Context) -> None:
    # A pod runs the ranks alone: no `encore run` is there to do what these ask for.
    for name in ("gate", "notify", "stop_seconds", "require_target"):
        source = given.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            (option,) = (each.opts[0] for each in given.command.params if each.name == name)
            raise EncoreError(
                f"{option} with --kubernetes", expected="an option of what runs in pods", hint="leave it out"
            )


def _refuse_more(resume: Path, benchmark: str | None, rest: tuple[str, ...]) -> None:
    if benchmark is not None or rest:
        raise EncoreError(
            f"--resume takes all that is to be run from the run folder, not {shlex.join(rest) or benchmark!r}",
            hint=hints.command("submit", "--resume", resume),
        )


def _named(benchmark: str | None) -> str:
    if benchmark is None:
        raise EncoreError("no benchmark given", expected="encore submit BENCHMARK --nodes NODES")
    return benchmark


def _is_in_pods(resume: Path | None) -> bool:
    return resume is not None and workloads.is_in_pods(run_folder.open_run(resume))


def _to_kubernetes(given: Mapping[str, Any], wanted: pods.Wanted, dry_run: bool, as_json: bool) -> None:
    plan, estimate = pods.prepare(as_request(given), wanted)
    found = pods.checks(plan)
    print_checks(console(stderr=True, soft_wrap=True), [each for each in found if each.level in ("WARN", "FAIL")])
    if dry_run:
        _show(pods.shown(plan), as_json)
        return
    preflight.refuse_failed(found)
    connection = pods.connect(plan)
    plan = pods.detected(plan, wanted.kind or plan.cluster.kubernetes.kind, connection)
    if not as_json:
        say(console(), f"time limit: {estimate.reason}")
    _send(plan, pods.create(plan, connection.context), connection, as_json)


def _resume_in_pods(path: Path, dry_run: bool, as_json: bool) -> None:
    if not workloads.is_in_pods(run_folder.open_run(path)):
        raise EncoreError(f"{path.name} was not submitted to Kubernetes", hint=hints.resume(path))
    plan, folder = pods.resumed(path)
    if dry_run:
        _show(pods.shown(plan, folder), as_json)
        return
    connection = pods.connect(plan)
    pods.clear(plan, folder, connection)
    _send(plan, folder, connection, as_json)


def _show(objects: list[manifests.Manifest], as_json: bool) -> None:
    if as_json:
        found: Manifests = {"kind": "List", "apiVersion": "v1", "items": objects}
        write_json("manifests", found)
    else:
        typer.echo(manifests.as_yaml(objects), nl=False)


def _send(plan: planning.Plan, folder: run_folder.RunFolder, connection: Connection, as_json: bool) -> None:
    sent = pods.submit(plan, folder, connection)
    if as_json:
        content: SentWorkloads = {"run": str(folder.path), "workloads": sent}
        write_json("workloads", content)
        return
    for name in sent:
        say(console(), f"submitted {name}")
    say(console(), f"watch it with: {hints.follow(folder.path)}")


def _gpus(text: str | None) -> tuple[str | None, int | None]:
    # The type and the number in ``--gpus-per-node a100:8``; None for each that was not given.
    if text is None:
        return None, None
    try:
        return clusters.typed(text)
    except ValueError as error:
        raise EncoreError(
            f"--gpus-per-node {text!r}", expected="a number such as 8, or with its type: a100:8"
        ) from error


def _run_context(benchmark: str, rest: tuple[str, ...]) -> typer.Context:
    # The rest of the command line as `encore run` reads it, with its own messages for what is wrong.
    app = typer.Typer()
    app.command()(run)
    return cast("typer.Context", typer.main.get_command(app).make_context("encore run", [benchmark, *rest]))
