"""``encore run``: train, follow, judge."""

import os
import shlex
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from typing_extensions import TypedDict

from encore import data, files, job, paths, peaks
from encore.cli import live, options
from encore.cli.layout import console, ignore_closed_output, show, text, write_json
from encore.configuration import Deviation
from encore.errors import EncoreError, ExitCode
from encore.machine import node_checks, preflight
from encore.results.findings import ReportJson
from encore.results.format import with_names
from encore.run import evaluate, hints, notification, planning, run_folder, run_metadata, runner, supervise
from encore.run import gate as gates
from encore.slurm import cluster as clusters
from encore.ssh import hosts

COLORS = {"reached": "green", "not_reached": "yellow"}


class ExperimentResult(TypedDict):
    """An experiment of a run, judged."""

    number: int  # From 0
    status: run_folder.Status
    reason: str  # Why it failed or was interrupted; empty otherwise
    seed: int | None
    minutes: float | None  # To the target, by its log
    epochs: float
    qualities: dict[str, float]  # Of the evaluation that met the targets, else of the last one
    targets: dict[str, float]
    compliance: ReportJson | None  # Null of a benchmark that MLPerf has not, and before its log has ended


class RunResult(TypedDict):
    """A run that ended; also what `--notify` reports."""

    run: str  # The run folder
    standing: str  # What the result may be called
    exit_code: int  # As in docs/exit-codes.md
    experiments: list[ExperimentResult]


class RunPlan(TypedDict):
    """A run that was not started."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    working_directory: str
    configuration: dict[str, Any]  # As config.json of the implementation
    deviations: tuple[Deviation, ...]  # From the system file; empty: exactly that configuration
    checks: list[preflight.Check]
    refused: list[str]  # Names of the checks for which the run would be refused


def run(
    context: typer.Context,
    benchmark: options.OptionalBenchmark = None,
    gpus: Annotated[
        int | None,
        typer.Argument(help="GPUs, without any: ranks on the CPU; in a Slurm job by default all it has."),
    ] = None,
    gpus_option: Annotated[str | None, typer.Option("--gpus", hidden=True)] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of the Slurm job to use; default: all.")] = None,
    system: options.System = None,
    round_name: options.Round = None,
    data_folder: options.Data = None,
    results: options.Results = None,
    runs: options.Experiments = 1,
    seed: options.Seed = None,
    settings: options.Settings = None,
    environment: options.Environment = None,
    drop_caches: options.DropCaches = None,
    hang_seconds: options.HangSeconds = 600.0,
    stop_seconds: options.StopSeconds = None,
    runtime: options.Runtime = None,
    image: options.Image = None,
    python: options.Python = None,
    cluster: options.Cluster = None,
    host_list: options.Hosts = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="The same from a file, a line a host: n1 slots=4, or n1:4.")
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(help="Over ssh: horovodrun (default) or mpirun; torchrun for torch.distributed."),
    ] = None,
    require_target: Annotated[
        bool, typer.Option(help="Exit with 3 where a target is missed; slurm/run.sub exits with 0 unless given.")
    ] = True,
    notify: Annotated[
        str | None,
        typer.Option(
            envvar=run_metadata.NOTIFY,
            metavar="URL|COMMAND",
            help="Report the end: POST JSON, or give it to a command.",
        ),
    ] = None,
    gate: Annotated[
        bool, typer.Option("--gate", help="In a Slurm job: leave out nodes that encore doctor --nodes finds unfit.")
    ] = False,
    resume: options.Resume = None,
    trust_owner: options.TrustOwner = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Train a benchmark, follow it, and judge the result.

    Examples:

      encore run resnet 2                                       the toy data set, on a CPU

      encore run resnet 8 --system dgxa100 --data /data/imagenet --runs 5

      encore run resnet 8 --system dgxa100 --round v0.7 --dry-run

      encore run resnet 8 --data /data/imagenet --runtime docker

      encore run resnet 8 --hosts n1:4,n2:4 --data /data/imagenet    two hosts, by ssh

      encore run --resume results/20261120T101500Z-resnet-mxnet-cpu

      srun --nodes=2 --pty bash, and there: encore run resnet      all GPUs of the Slurm job

    Exit codes: 0 target reached, 3 not reached, 2 refused before the start, 1 failed, 130 interrupted.
    """
    context.with_resource(ignore_closed_output())
    screen, limits = console(stderr=as_json, soft_wrap=True), supervise.Limits(hang_seconds, stop_seconds)
    if cluster is not None:
        # A run that resumes after a requeue is planned from its folder, with the same cluster file.
        os.environ["ENCORE_CLUSTER"] = str(cluster.absolute())
    if resume is not None:
        run_folder.refuse_foreign(resume, trust_owner)
    passed = _leave_out_failed(screen, nodes, resume, results) if gate and not dry_run else None
    if resume is not None:
        refuse_with_resume(
            context, "run folder", "hang_seconds", "stop_seconds", "cluster", "require_target", "gate", "notify",
            "trust_owner",
        )  # fmt: skip
        _resume(screen, resume.absolute(), limits, dry_run, as_json, require_target, notify, passed)
        return
    if benchmark is None:
        raise EncoreError("no benchmark given", expected="encore run BENCHMARK GPUS")
    plan = planning.make_plan(as_request(context.params))
    if dry_run:
        _print_plan(screen, plan, as_json)
        return
    begun = _begun(plan)
    if begun is not None:
        run_folder.refuse_foreign(begun, trust_owner)
        screen.print(f"resuming {begun}")
        _resume(screen, begun, limits, dry_run, as_json, require_target, notify, passed)
        return
    if plan.target.why != "asked for":
        screen.print(f"runtime {plan.target.runtime}: {plan.target.why}")
    plan = planning.asked(plan)
    for check in planning.refuse(plan):
        screen.print(f"[yellow]warning[/] {check.name}: {check.found}")
    folder = runner.prepare_and_create(plan, hooks(screen, None, None))
    _keep_gate(folder, passed)
    with live.RunView(screen) as view:
        ending = runner.execute(plan, folder, hooks(screen, view, folder), limits)
    finish(screen, folder, ending, as_json, require_target, notify)


def _leave_out_failed(
    screen: Console, nodes: int | None, resume: Path | None, results: Path | None
) -> node_checks.Gate:
    settings, _ = clusters.load()
    where = resume.absolute().parent if resume else (results or settings.results or paths.default_results()).absolute()
    wanted = run_folder.open_run(resume).metadata()["nodes"] if resume else nodes
    said = partial(screen.print, markup=False, highlight=False)
    return gates.leave_out_failed(wanted, settings, where, said)


def _keep_gate(folder: run_folder.RunFolder, passed: node_checks.Gate | None) -> None:
    if passed is not None:
        files.write_json(folder.path / "gate.json", passed)


def as_request(given: Mapping[str, Any]) -> planning.Request:
    if given["gpus_option"] is not None:
        words = given["benchmark"], given["gpus_option"]
        hint = f"{hints.command('run', *words)}; or {shlex.join(('./run.sh', *words))}"
        raise EncoreError(f"--gpus {words[1]}: the number follows the benchmark, without an option", hint=hint)
    same = ("gpus", "nodes", "system", "runs", "seed", "drop_caches", "runtime", "image")
    return planning.Request(
        name=given["benchmark"],
        round=given["round_name"],
        data=options.as_path(given["data_folder"]),
        settings=tuple(given["settings"] or ()),
        environment=tuple(given["environment"] or ()),
        hosts=_hosts(given["host_list"], options.as_path(given["hostfile"])),
        launcher=given["launcher"],
        results=options.as_path(given["results"]),
        python=options.as_path(given["python"]),
        cluster=options.as_path(given["cluster"]),
        **{name: given[name] for name in same},
    )


def _begun(plan: planning.Plan) -> Path | None:
    # The run folder of this very call, if its Slurm job was requeued or shares it with other tasks.
    if plan.allocation is None:
        return None
    folder = runner.begun(plan.results, plan.allocation, run_metadata.redact_arguments(sys.argv[1:]))
    return folder.path if folder is not None else None


def _hosts(named: str | None, file: Path | None) -> tuple[hosts.Host, ...]:
    if named is not None and file is not None:
        raise EncoreError("--hosts and --hostfile", expected="one of them", hint="leave one out")
    if file is not None:
        return hosts.read(file)
    return () if named is None else hosts.parse(named)


def refuse_with_resume(context: typer.Context, folder: str, *fitting: str) -> None:
    kept = {"resume": "", **{name: f"--{name.replace('_', '-')}" for name in (*fitting, "dry_run")}}
    kept["as_json"] = "--json"
    if not options.given(context) <= set(kept):
        raise EncoreError(
            f"--resume takes all that is to be run from the {folder}",
            expected=f"no other arguments than {', '.join(filter(None, kept.values()))}",
            hint="leave them out, or start anew without --resume",
        )


def _resume(
    screen: Console,
    path: Path,
    limits: supervise.Limits,
    dry_run: bool,
    as_json: bool,
    require_target: bool,
    notify: str | None,
    passed: node_checks.Gate | None,
) -> None:
    folder = run_folder.open_run(path)
    _keep_gate(folder, passed)
    if dry_run:
        for experiment in folder.experiments():
            if experiment.state().status not in run_folder.FINISHED:
                typer.echo(runner.as_shell(runner.resumed_command(folder, experiment)))
        return
    with live.RunView(screen) as view:
        ending = runner.resume(folder, hooks(screen, view, folder), limits)
    finish(screen, folder, ending, as_json, require_target, notify)


def hooks(screen: Console, view: live.RunView | None, folder: run_folder.RunFolder | None) -> runner.Hooks:
    """Return hooks that report on ``screen`` and ``view`` what a run does; without a folder, what comes before it."""

    def step(what: str) -> None:
        screen.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {what}")

    def prepare(directory: Path, by: Path | job.Command) -> None:
        from encore.cli.data import shown_progress

        screen.print(f"making the toy data set in {directory}")
        with shown_progress(screen) as on_update:
            data.prepare(directory.name, directory, data.Preparation(), by, on_update)

    def start(experiment: run_folder.Experiment) -> None:
        count = len(folder.experiments()) if folder else 1
        if view is not None:
            view.start(f"experiment {experiment.number + 1}/{count}")

    def ended(experiment: run_folder.Experiment, outcome: supervise.Outcome) -> None:
        if outcome.reason:
            screen.print(f"[red]experiment {experiment.number + 1} {outcome.status}[/]: {outcome.reason}")
        for line in outcome.last_lines:
            screen.print(f"  | {line}", markup=False)

    return runner.Hooks(
        step=step,
        prepare_data=prepare,
        experiment=start,
        progress=view.update if view else lambda progress: None,
        ended=ended,
    )


def finish(
    screen: Console,
    folder: run_folder.RunFolder,
    ending: runner.Ending,
    as_json: bool,
    require_target: bool = True,
    notify: str | None = None,
) -> None:
    """Print the judged result and leave with its exit code; 0 for a missed target that is not required."""
    is_excused = ending.code == ExitCode.NOT_REACHED and not require_target
    code = ExitCode.REACHED if is_excused else ending.code
    summaries = evaluate.evaluate_run(folder)
    if notify and (problem := notification.send(notify, _as_json(folder, summaries, code))):
        screen.print(f"[yellow]warning[/] the end was not reported: {escape(run_metadata.redact_text(problem))}")
    if as_json:
        write_json("run-result", _as_json(folder, summaries, code))
    else:
        _print_summaries(screen, folder, summaries)
    if is_excused:
        screen.print("a target was missed: exit code 0 (with --require-target: 3)")
    is_final = ending.is_final or any(each.state.is_final for each in summaries)
    if code in (ExitCode.INTERRUPTED, ExitCode.FAILED) and not (ending.goes_on or is_final):
        screen.print(f"resume with: {hints.resume(folder.path)}", markup=False, highlight=False)
    raise typer.Exit(code)


def _as_json(folder: run_folder.RunFolder, summaries: list[evaluate.ExperimentSummary], code: ExitCode) -> RunResult:
    return {
        "run": str(folder.path),
        "standing": evaluate.standing(folder),
        "exit_code": int(code),
        "experiments": [
            {
                "number": each.number,
                "status": each.state.status,
                "reason": each.state.reason,
                "seed": each.seed,
                "minutes": each.minutes,
                "epochs": each.epochs,
                "qualities": dict(each.qualities),
                "targets": dict(each.targets),
                "compliance": each.compliance.as_json() if each.compliance else None,
            }
            for each in summaries
        ],
    }


def _print_summaries(
    screen: Console, folder: run_folder.RunFolder, summaries: list[evaluate.ExperimentSummary]
) -> None:
    is_trial, name = evaluate.is_trial(folder), folder.metadata()["name"]
    title = f"{name} ({folder.path.name})"
    columns = ("run", "status", "time to target", "epochs", "quality", "target", "log")
    rows = (
        (
            experiment.number + 1,
            text(experiment.state.status.replace("_", " "), COLORS.get(experiment.state.status, "red")),
            None if experiment.minutes is None else live.clock(experiment.minutes * 60),
            f"{experiment.epochs:.4g}",
            with_names(experiment.qualities),
            with_names(experiment.targets, "g"),
            _compliance(experiment),
        )
        for experiment in summaries
    )
    show(screen, title, columns, rows, least=("log", "epochs"))
    if any(experiment.resumed and experiment.minutes is not None for experiment in summaries):
        screen.print("resumed runs include the time between stop and resume: the MLPerf clock never pauses")
    _print_findings(screen, summaries[0], errors_only=is_trial)
    screen.print(f"run folder: {folder.path}")
    on_gpu = folder.metadata()["configuration"]["device"]["value"] == "gpu"
    if on_gpu:
        _print_measurements(screen, folder)
    finished = all(experiment.state.status in run_folder.FINISHED for experiment in summaries)
    if is_trial and finished:
        result, start = evaluate.trial_result(folder, summaries), ("encore run" if paths.IS_INSTALLED else "./run.sh")
        screen.print(result, style="green" if result.startswith("OK") else "yellow", markup=False, highlight=False)
        occasion = "with the complete data set" if on_gpu else "on a GPU server"
        screen.print(f"next, {occasion}: {start} {name} 8 --data DIR", markup=False, highlight=False)
        return
    screen.print(evaluate.standing(folder), markup=False, highlight=False)
    if any(experiment.compliance is not None for experiment in summaries):
        screen.print(f"compare with the submission: {hints.command('compare', folder.path)}", markup=False)


def _print_measurements(screen: Console, folder: run_folder.RunFolder) -> None:
    sections = (("startup", live.start), ("checkpoints", live.checkpoints), ("utilization", peaks.sentence))
    for section, describe in sections:
        for number, measured in folder.metadata().get(section, {}).items():
            screen.print(f"run {int(number) + 1}: {describe(measured)}", markup=False, highlight=False)


def _compliance(experiment: evaluate.ExperimentSummary) -> Text:
    if experiment.compliance is None:
        return text("")
    if experiment.compliance.passed:
        return text("compliant")
    return text("valid, toy data") if experiment.compliance.passed_but_for_data else text("not compliant", "red")


def _print_findings(screen: Console, experiment: evaluate.ExperimentSummary, errors_only: bool) -> None:
    # A trial cannot meet the rules for data sets and page caches; its log may still have errors.
    report = experiment.compliance
    findings = [
        finding
        for finding in (report.findings if report else ())
        if not errors_only or (finding.severity == "error" and finding.kind != "small_data")
    ]
    if report is None or not findings:
        return
    screen.print(f"checked by {report.checker}, ruleset {report.ruleset}:", highlight=False)
    for finding in findings:
        line = f"  {finding.label}: expected {finding.expected}, found {finding.found}"
        screen.print(line, markup=False, highlight=False)


def _print_plan(screen: Console, plan: planning.Plan, as_json: bool) -> None:
    plan = planning.asked(plan, start=False)
    command = runner.dry_run_command(plan)
    found = planning.checks(plan)
    refused = [check.name for check in found if check.level == "FAIL"]
    if as_json:
        content: RunPlan = {
            "argv": tuple(map(run_metadata.redact_text, command.argv)),
            "environment": run_metadata.redact(command.environment),
            "working_directory": str(command.working_directory),
            "configuration": plan.configuration.plain(),
            "deviations": plan.configuration.deviations,
            "checks": found,
            "refused": refused,
        }
        write_json("run-plan", content)
        return
    print_checks(screen, found)
    typer.echo(runner.as_shell(command))
    if refused:
        screen.print(f"[red]the run would be refused[/] with exit code 2: {', '.join(refused)}; a dry run exits with 0")


def print_checks(screen: Console, found: list[preflight.Check]) -> None:
    colours = {"OK": "green", "WARN": "yellow", "FAIL": "red"}
    for check in found:
        hint = f"; hint: {check.hint}" if check.hint and check.level != "OK" else ""
        screen.print(f"[{colours[check.level]}]{check.level:<4}[/] {check.name}: {check.found}{hint}")
