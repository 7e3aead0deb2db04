"""``encore submit``: check `encore run` as a batch job, and submit it."""

import os
import shlex
from collections.abc import Mapping, Set
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
from encore.slurm.script import Options


class Step(TypedDict):
    argv: tuple[str, ...]
    environment: Mapping[str, str]


class Submitted(TypedDict):
    """A batch job."""

    job: str | None  # Null in a dry run
    minutes: int | None  # Time limit; null: limit of the partition
    estimate: str  # Where that is from
    script: str
    step: Step  # Command on the first node of the job, per run


class Manifests(TypedDict):
    """Objects of all experiments, as a list for kubectl."""

    kind: Literal["List"]
    apiVersion: Literal["v1"]
    items: list[dict[str, Any]]


class SentWorkloads(TypedDict):
    """A run that was sent to a cluster."""

    run: str  # Run folder
    workloads: list[str]  # Names, one per experiment


def submit(
    context: typer.Context,
    benchmark: options.OptionalBenchmark = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes. Default: 1.")] = None,
    gpus_per_node: Annotated[
        str | None,
        typer.Option(
            metavar="GPUS",
            help="GPUs per node, e.g. 8 or a100:8 (CPU ranks if there are none). Default: from cluster.toml, else 1.",
        ),
    ] = None,
    minutes: Annotated[
        int | None, typer.Option("--time", help="Time limit in minutes. Default: published time plus a margin.")
    ] = None,
    array: Annotated[
        str | None, typer.Option(metavar="0-N", help="Job array with one run per task, in sbatch syntax: 0-4, 0-4%2.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition. Default: from cluster.toml.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account. Default: from cluster.toml.")] = None,
    qos: Annotated[str | None, typer.Option(help="Slurm QOS. Default: from cluster.toml.")] = None,
    reservation: Annotated[str | None, typer.Option(help="Slurm reservation.")] = None,
    dependency: Annotated[str | None, typer.Option(help="Job dependency in sbatch syntax: afterok:12.")] = None,
    mail: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Send mail when the job ends, fails or is requeued.")
    ] = None,
    job_name: Annotated[str | None, typer.Option(help="Suffix of the job name: encore-BENCHMARK-JOB_NAME.")] = None,
    comment: Annotated[str | None, typer.Option(help="Text appended to the job comment.")] = None,
    require_target: Annotated[
        bool,
        typer.Option(
            "--require-target",
            help="Mark the job FAILED if a target is not reached, so that afterok dependencies do not start.",
        ),
    ] = False,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="Additional sbatch option. Repeatable.")
    ] = None,
    kubernetes: Annotated[
        bool,
        typer.Option("--kubernetes", help="Submit to Kubernetes. The second argument is the total number of GPUs."),
    ] = False,
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND", help="Kubernetes object: job, jobset or auto. Default: from cluster.toml, else auto."
        ),
    ] = None,
    volumes: Annotated[
        list[str] | None,
        typer.Option("--volume", metavar="FOLDER=CLAIM", help="Mount a PersistentVolumeClaim at a folder. Repeatable."),
    ] = None,
    resume: options.Resume = None,
    trust_owner: options.TrustOwner = False,
    cluster: options.Cluster = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Generate and check a batch script or manifest, and submit it to Slurm or Kubernetes.

    Examples:

      encore submit resnet --nodes 4 --gpus-per-node 8 --system dgxa100 --data /data/imagenet

      encore submit resnet --nodes 2 --array 0-4          5 runs as a job array

      encore submit resnet --nodes 4 --runtime pyxis --dry-run

      encore submit --resume results/20261120T101500Z-resnet-mxnet-dgxa100-job12

      encore submit resnet-pytorch 16 --kubernetes --nodes 2 --system dgxa100 --volume /shared=CLAIM --dry-run

    Accepts all options of `encore run`. Cluster settings are in cluster.toml (docs/slurm.md).
    """
    rest = tuple(context.args)
    if resume is not None:
        if benchmark is not None or rest:
            raise EncoreError(
                f"--resume takes all settings from the run folder, not {shlex.join(rest) or benchmark!r}",
                hint=hints.command("submit", "--resume", resume),
            )
        run_folder.refuse_foreign(resume, trust_owner)
    if kubernetes or (resume is not None and workloads.is_in_pods(run_folder.open_run(resume))):
        if resume is not None:
            _refuse(context, set(context.params) - RESUMING, "--resume", "the options of the original submission")
        _refuse(context, set(context.params) - KUBERNETES, "Kubernetes", "no option of Slurm's")
        if cluster is not None:
            # run.json names it, and so does the command that resumes.
            os.environ["ENCORE_CLUSTER"] = str(cluster.absolute())
        if resume is not None:
            _resume_in_pods(resume.absolute(), dry_run, as_json)
        else:
            pod_options = pods.Options(
                kind=kind, nodes=nodes, volumes=tuple(map(volume, volumes or ())), minutes=minutes
            )
            run_context = _run_context(benchmark, rest)
            # Pods run only the ranks; no `encore run` process handles these options.
            unused = {"gate", "notify", "stop_seconds", "require_target"}
            _refuse(run_context, unused, "--kubernetes", "an option that pods support")
            if "hang_seconds" in options.given(run_context):
                pod_options = replace(pod_options, hang_seconds=run_context.params["hang_seconds"])
            _to_kubernetes(run_context.params, pod_options, dry_run, as_json)
        return
    if kind is not None or volumes:
        raise EncoreError("--kind and --volume are for --kubernetes", hint="add --kubernetes, or remove them")
    try:
        gpu_type, count = clusters.parse_gpus(gpus_per_node) if gpus_per_node is not None else (None, None)
    except ValueError as error:
        expected = "a number such as 8, optionally with a type: a100:8"
        raise EncoreError(f"--gpus-per-node {gpus_per_node!r}", expected=expected) from error
    site_options = Options(
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
        sbatch=tuple(sbatch or ()),
        cluster=cluster,
        trust_owner=trust_owner,
    )
    if resume is not None:
        prepared = submissions.prepare_resume(resume.absolute(), site_options)
    else:
        prepared = submissions.prepare(as_request(_run_context(benchmark, rest).params), rest, site_options)
    job, screen = None, console(stderr=True, soft_wrap=True)
    if dry_run:
        checks = [submissions.check_partition(prepared)] if commands.is_installed() else []
        print_checks(screen, [check for check in checks if check.level in ("WARN", "FAIL")])
    else:
        checks = submissions.checks(prepared)
        print_checks(screen, [check for check in checks if check.level == "WARN"])
        preflight.refuse_failed(checks)
        job = submissions.submit(prepared)
    if as_json:
        write_json(
            "submission",
            Submitted(
                job=job,
                minutes=prepared.submission.minutes,
                estimate=prepared.estimate.reason,
                script=prepared.script,
                step={
                    "argv": tuple(run_metadata.redact_arguments(prepared.step.argv)),
                    "environment": run_metadata.redact(prepared.step.environment),
                },
            ),
        )
    elif dry_run:
        typer.echo(prepared.script, nl=False)
        typer.echo("\n# Command on the first node, for every run:")
        typer.echo("\n".join(f"#   {line}" for line in runner.as_shell(prepared.step).splitlines()))
    else:
        say(console(), f"time limit: {prepared.estimate.reason}")
        say(console(), f"submitted as job {job}; watch it with: {hints.command('follow', str(job))}")


submit.settings = {"context_settings": options.PASS_ON}  # type: ignore[attr-defined]


RESUMING = {"kubernetes", "resume", "trust_owner", "cluster", "dry_run", "as_json"}
# Options of this command that mean something to Kubernetes
KUBERNETES = RESUMING | {"benchmark", "nodes", "minutes", "kind", "volumes"}


def _refuse(context: typer.Context, names: Set[str], use: str, expected: str) -> None:
    # Not those from the environment: they are for all commands
    flags = [
        param.opts[0]
        for param in context.command.params
        if param.name in names and "COMMANDLINE" in str(context.get_parameter_source(param.name))
    ]
    if flags:
        raise EncoreError(f"{', '.join(sorted(flags))} with {use}", expected=expected, hint="leave it out")


def _to_kubernetes(values: Mapping[str, Any], pod_options: pods.Options, dry_run: bool, as_json: bool) -> None:
    plan, estimate = pods.prepare(as_request(values), pod_options)
    checks = pods.checks(plan)
    print_checks(console(stderr=True, soft_wrap=True), [check for check in checks if check.level in ("WARN", "FAIL")])
    if dry_run:
        _show(pods.preview(plan), as_json)
        return
    preflight.refuse_failed(checks)
    connection = pods.connect(plan)
    plan = pods.select_kind(plan, pod_options.kind or plan.cluster.kubernetes.kind, connection)
    if not as_json:
        say(console(), f"time limit: {estimate.reason}")
    _send(plan, pods.create(plan, connection.context), connection, as_json)


def _resume_in_pods(path: Path, dry_run: bool, as_json: bool) -> None:
    if not workloads.is_in_pods(run_folder.open_run(path)):
        raise EncoreError(f"{path.name} was not submitted to Kubernetes", hint=hints.resume(path))
    plan, folder = pods.open_plan(path)
    if dry_run:
        _show(pods.preview(plan, folder), as_json)
        return
    connection = pods.connect(plan)
    pods.clear(plan, folder, connection)
    _send(plan, folder, connection, as_json)


def _show(objects: list[manifests.Manifest], as_json: bool) -> None:
    if as_json:
        write_json("manifests", Manifests(kind="List", apiVersion="v1", items=objects))
    else:
        typer.echo(manifests.as_yaml(objects), nl=False)


def _send(plan: planning.Plan, folder: run_folder.RunFolder, connection: Connection, as_json: bool) -> None:
    sent = pods.submit(plan, folder, connection)
    if as_json:
        write_json("workloads", SentWorkloads(run=str(folder.path), workloads=sent))
        return
    for name in sent:
        say(console(), f"submitted {name}")
    say(console(), f"watch it with: {hints.follow(folder.path)}")


def _run_context(benchmark: str | None, rest: tuple[str, ...]) -> typer.Context:
    # Parse the remaining arguments as `encore run`, with its error messages.
    if benchmark is None:
        raise EncoreError("no benchmark given", expected="encore submit BENCHMARK --nodes NODES")
    app = typer.Typer()
    app.command()(run)
    return cast("typer.Context", typer.main.get_command(app).make_context("encore run", [benchmark, *rest]))
