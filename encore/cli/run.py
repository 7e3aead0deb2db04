"""``encore run``: train, follow, judge."""

import http.client
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from typing_extensions import TypedDict

from encore import data, files, job, paths
from encore.cli import options, progress_display
from encore.cli.layout import console, ignore_closed_output, show, text, write_json
from encore.configuration import Deviation
from encore.errors import EncoreError, ExitCode
from encore.machine import node_checks, preflight
from encore.results import peaks
from encore.results.findings import ReportJson
from encore.results.format import with_names
from encore.run import evaluate, hints, planning, run_folder, run_metadata, runner, supervise
from encore.run import gate as gates
from encore.slurm import cluster as clusters
from encore.ssh import hosts

COLORS = {"reached": "green", "not_reached": "yellow"}
NOTIFY_SECONDS = 20.0
# Sections of run.json that are printed after a run on GPUs
_MEASUREMENTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "startup": progress_display.start,
    "checkpoints": progress_display.checkpoints,
    "utilization": peaks.sentence,
}


class ExperimentResult(TypedDict):
    """A finished and evaluated experiment."""

    number: int  # From 0
    status: run_folder.Status
    reason: str  # Why it failed or was interrupted; empty otherwise
    seed: int | None
    minutes: float | None  # Time to the target, from the log
    epochs: float
    qualities: dict[str, float]  # Quality at the evaluation that met the targets, else the last one
    targets: dict[str, float]
    compliance: ReportJson | None  # Null if MLPerf does not have the benchmark, and before the log is complete


class RunResult(TypedDict):
    """A finished run; also sent by `--notify`."""

    run: str  # The run folder
    standing: str  # Permitted name of the result (MLPerf's results policy)
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
    refused: list[str]  # Checks that would reject the run


def run(
    context: typer.Context,
    benchmark: options.OptionalBenchmark = None,
    gpus: Annotated[
        int | None,
        typer.Argument(help="Number of GPUs (CPU ranks if there are none). Default in a Slurm job: all allocated."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes of the Slurm job. Default: all.")] = None,
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
        Path | None, typer.Option(help="Like --hosts, from a file with one host per line: n1 slots=4 or n1:4.")
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(help="Launcher for ssh: horovodrun (default) or mpirun; torchrun for torch.distributed."),
    ] = None,
    require_target: Annotated[
        bool,
        typer.Option(help="Exit with code 3 if a target is not reached. Default in slurm/run.sub: no."),
    ] = True,
    notify: Annotated[
        str | None,
        typer.Option(
            envvar=run_metadata.NOTIFY,
            metavar="URL|COMMAND",
            help="Send the result as JSON to a URL (POST) or to the stdin of a command.",
        ),
    ] = None,
    gate: Annotated[bool, typer.Option("--gate", help="Slurm: exclude nodes that fail encore doctor --nodes.")] = False,
    resume: options.Resume = None,
    trust_owner: options.TrustOwner = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Train a benchmark, show progress, and validate the MLPerf log.

    Examples:

      encore run resnet 2                                       toy data set, CPU

      encore run resnet 8 --system dgxa100 --data /data/imagenet --runs 5

      encore run resnet 8 --system dgxa100 --round v0.7 --dry-run

      encore run resnet 8 --data /data/imagenet --runtime docker

      encore run resnet 8 --hosts n1:4,n2:4 --data /data/imagenet    two hosts, ssh

      encore run --resume results/20261120T101500Z-resnet-mxnet-cpu

      encore run resnet                       in a Slurm allocation: all allocated GPUs

    Exit codes: 0 target reached, 3 not reached, 2 invalid request, 1 failed, 130 interrupted.
    """
    context.with_resource(ignore_closed_output())
    screen, limits = console(stderr=as_json, soft_wrap=True), supervise.Limits(hang_seconds, stop_seconds)
    if cluster is not None:
        # A run that resumes after a requeue is planned from its folder and needs the same cluster file.
        os.environ["ENCORE_CLUSTER"] = str(cluster.absolute())
    if resume is not None:
        run_folder.refuse_foreign(resume, trust_owner)
    passed = None
    if gate and not dry_run:
        site, _ = clusters.load()
        root = resume.absolute().parent if resume else (results or site.results or paths.default_results()).absolute()
        node_count = run_folder.open_run(resume).metadata()["nodes"] if resume else nodes
        passed = gates.leave_out_failed(node_count, site, root, partial(screen.print, markup=False, highlight=False))
    if resume is not None:
        refuse_with_resume(
            context, "run folder", "hang_seconds", "stop_seconds", "cluster", "require_target", "gate", "notify",
            "trust_owner",
        )  # fmt: skip
        _resume(screen, resume.absolute(), limits, dry_run, as_json, require_target, notify, passed)
    if benchmark is None:
        raise EncoreError("no benchmark given", expected="encore run BENCHMARK GPUS")
    plan = planning.make_plan(as_request(context.params))
    if dry_run:
        _print_plan(screen, plan, as_json)
        return
    # The run folder of this job, if it was requeued or shares the folder with other array tasks
    arguments = run_metadata.redact_arguments(sys.argv[1:])
    if plan.allocation and (previous := runner.existing_run(plan.results, plan.allocation, arguments)):
        run_folder.refuse_foreign(previous.path, trust_owner)
        screen.print(f"resuming {previous.path}")
        _resume(screen, previous.path, limits, dry_run, as_json, require_target, notify, passed)
    if plan.target.reason != "asked for":
        screen.print(f"runtime {plan.target.runtime}: {plan.target.reason}")
    plan = planning.query_python(plan)
    for check in planning.refuse(plan):
        screen.print(f"[yellow]warning[/] {check.name}: {check.found}")
    folder = runner.prepare_and_create(plan, hooks(screen, None, None))
    if passed is not None:
        files.write_json(folder.path / "gate.json", passed)
    with progress_display.RunView(screen) as view:
        ending = runner.execute(plan, folder, hooks(screen, view, folder), limits)
    finish(screen, folder, ending, as_json, require_target, notify)


def as_request(values: Mapping[str, Any]) -> planning.Request:
    host_list, hostfile = values["host_list"], values["hostfile"]
    if host_list is not None and hostfile is not None:
        raise EncoreError("--hosts and --hostfile", expected="one of them", hint="leave one out")
    ssh_hosts = hosts.read(hostfile) if hostfile is not None else ()
    if host_list is not None:
        ssh_hosts = hosts.parse(host_list)
    same = ("gpus", "nodes", "system", "runs", "seed", "drop_caches", "runtime", "image")
    return planning.Request(
        name=values["benchmark"],
        round=values["round_name"],
        data=values["data_folder"],
        settings=tuple(values["settings"] or ()),
        environment=tuple(values["environment"] or ()),
        hosts=ssh_hosts,
        launcher=values["launcher"],
        results=values["results"],
        python=values["python"],
        cluster=values["cluster"],
        **{name: values[name] for name in same},
    )


def refuse_with_resume(context: typer.Context, folder: str, *fitting: str) -> None:
    allowed = {"resume": "", **{name: f"--{name.replace('_', '-')}" for name in (*fitting, "dry_run")}}
    allowed["as_json"] = "--json"
    if not options.given(context) <= set(allowed):
        raise EncoreError(
            f"--resume takes all settings from the {folder}",
            expected=f"no other arguments than {', '.join(filter(None, allowed.values()))}",
            hint="remove them, or start a new run without --resume",
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
) -> NoReturn:
    folder = run_folder.open_run(path)
    if passed is not None:
        files.write_json(folder.path / "gate.json", passed)
    if dry_run:
        for experiment in folder.experiments():
            if not experiment.has_finished:
                typer.echo(runner.as_shell(runner.resumed_command(folder, experiment)))
        raise typer.Exit
    with progress_display.RunView(screen) as view:
        ending = runner.resume(folder, hooks(screen, view, folder), limits)
    finish(screen, folder, ending, as_json, require_target, notify)


def hooks(screen: Console, view: progress_display.RunView | None, folder: run_folder.RunFolder | None) -> runner.Hooks:
    """Return hooks that report progress on ``screen`` and ``view``; without a folder, only the steps before the run."""

    def step(message: str) -> None:
        screen.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {message}")

    def prepare(directory: Path, python_or_container: Path | job.Command) -> None:
        from encore.cli.data import shown_progress

        screen.print(f"making the toy data set in {directory}")
        with shown_progress(screen) as on_update:
            data.prepare(directory.name, directory, data.Preparation(), python_or_container, on_update)

    def start(experiment: run_folder.Experiment) -> None:
        count = len(folder.experiments()) if folder else 1
        if view is not None:
            view.start(f"experiment {experiment.number + 1}/{count}")

    def on_end(experiment: run_folder.Experiment, outcome: supervise.Outcome) -> None:
        if outcome.reason:
            screen.print(f"[red]experiment {experiment.number + 1} {outcome.status}[/]: {outcome.reason}")
        for line in outcome.last_lines:
            screen.print(f"  | {line}", markup=False)

    return runner.Hooks(
        step=step,
        prepare_data=prepare,
        experiment=start,
        progress=view.update if view else lambda progress: None,
        finished=on_end,
    )


def finish(
    screen: Console,
    folder: run_folder.RunFolder,
    ending: runner.Ending,
    as_json: bool,
    require_target: bool = True,
    notify: str | None = None,
) -> NoReturn:
    """Print the result and exit with its exit code; 0 if a target that is not required is missed."""
    is_excused = ending.code == ExitCode.NOT_REACHED and not require_target
    code = ExitCode.REACHED if is_excused else ending.code
    summaries = evaluate.evaluate_run(folder)
    if notify and (problem := notify_end(notify, _as_json(folder, summaries, code))):
        screen.print(f"[yellow]warning[/] notification failed: {escape(run_metadata.redact_text(problem))}")
    if as_json:
        write_json("run-result", _as_json(folder, summaries, code))
    else:
        _print_summaries(screen, folder, summaries)
    if is_excused:
        screen.print("a target was missed: exit code 0 (with --require-target: 3)")
    is_final = ending.is_final or any(summary.state.is_final for summary in summaries)
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
                "number": summary.number,
                "status": summary.state.status,
                "reason": summary.state.reason,
                "seed": summary.seed,
                "minutes": summary.minutes,
                "epochs": summary.epochs,
                "qualities": dict(summary.qualities),
                "targets": dict(summary.targets),
                "compliance": summary.compliance.as_json() if summary.compliance else None,
            }
            for summary in summaries
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
            None if experiment.minutes is None else progress_display.clock(experiment.minutes * 60),
            f"{experiment.epochs:.4g}",
            with_names(experiment.qualities),
            with_names(experiment.targets, "g"),
            _compliance(experiment),
        )
        for experiment in summaries
    )
    show(screen, title, columns, rows, least=("log", "epochs"))
    if any(experiment.resumed and experiment.minutes is not None for experiment in summaries):
        screen.print("resumed runs include the time between stop and resume: the MLPerf clock does not pause")
    _print_findings(screen, summaries[0], errors_only=is_trial)
    screen.print(f"run folder: {folder.path}")
    on_gpu = folder.metadata()["configuration"]["device"]["value"] == "gpu"
    for section, describe in _MEASUREMENTS.items() if on_gpu else ():
        for number, measured in folder.metadata().get(section, {}).items():
            screen.print(f"run {int(number) + 1}: {describe(measured)}", markup=False, highlight=False)
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


def _compliance(experiment: evaluate.ExperimentSummary) -> Text:
    if experiment.compliance is None or experiment.compliance.passed:
        return text("compliant" if experiment.compliance else "")
    return text("valid, toy data") if experiment.compliance.passed_but_for_data else text("not compliant", "red")


def _print_findings(screen: Console, experiment: evaluate.ExperimentSummary, errors_only: bool) -> None:
    # Trial runs cannot follow the rules for data sets and page caches. Other errors in the log are reported.
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
    plan = planning.query_python(plan, start=False)
    command = runner.dry_run_command(plan)
    checks = planning.checks(plan)
    refused = [check.name for check in checks if check.level == "FAIL"]
    if as_json:
        write_json(
            "run-plan",
            RunPlan(
                argv=tuple(run_metadata.redact_arguments(command.argv)),
                environment=run_metadata.redact(command.environment),
                working_directory=str(command.working_directory),
                configuration=plan.configuration.plain(),
                deviations=plan.configuration.deviations,
                checks=checks,
                refused=refused,
            ),
        )
        return
    print_checks(screen, checks)
    typer.echo(runner.as_shell(command))
    if refused:
        screen.print(
            f"[red]the run would be rejected[/] with exit code 2: {', '.join(refused)}; a dry run exits with 0"
        )


def print_checks(screen: Console, checks: list[preflight.Check]) -> None:
    colours = {"OK": "green", "WARN": "yellow", "FAIL": "red"}
    for check in checks:
        hint = f"; hint: {check.hint}" if check.hint and check.level != "OK" else ""
        screen.print(f"[{colours[check.level]}]{check.level:<4}[/] {check.name}: {check.found}{hint}")


def notify_end(target: str, content: Mapping[str, Any]) -> str:
    """POST ``content`` as JSON to a URL, or pipe it to a command. Return the error message; empty on success.

    Commands are split like shell words but run without a shell.
    """
    body = json.dumps(content).encode()
    try:
        if target.startswith(("http://", "https://")):
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(target, data=body, headers=headers, method="POST")
            with urllib.request.urlopen(request, timeout=NOTIFY_SECONDS):
                return ""
        done = subprocess.run(shlex.split(target), input=body, capture_output=True, timeout=NOTIFY_SECONDS, check=False)
    except http.client.InvalidURL:
        return "not a valid URL"  # The error has the URL, which may be secret
    except (OSError, ValueError, IndexError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
        return str(error) or type(error).__name__
    messages = done.stderr.decode(errors="replace").strip().splitlines()
    return "" if done.returncode == 0 else (messages or [f"exit code {done.returncode}"])[-1]
