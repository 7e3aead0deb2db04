"""Run lifecycle: prepare, render, execute, and resume interrupted runs."""

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from encore import data as data_sets
from encore import environment, files, paths
from encore.containers import checks, engines, renderers, runtimes
from encore.errors import EncoreError, ExitCode
from encore.job import Command, Job, training_job
from encore.machine import host_actions, host_requirements, links, node, openmetrics, preflight
from encore.machine.host_requirements import Need
from encore.machine.processes import heartbeats
from encore.results import peaks
from encore.run import compile_cache, follow, hints, ownership, run_folder, run_metadata, status
from encore.run.planning import Plan, plan_of, query_python, refuse
from encore.run.run_folder import Experiment, ExperimentState, RunFolder
from encore.run.supervise import Limits, Outcome, Signals, launcher_output, run
from encore.slurm import commands, queue, step
from encore.slurm.queue import Allocation
from encore.ssh import hosts, multi_host

LAUNCHES = 3  # Tries to start the ranks
CRASHES = ("killed by SIGSEGV", "killed by SIGABRT", "killed by SIGBUS")
# Time for a checkpoint after a signal: less than KillWait, after which Slurm kills (30 s unless configured).
SLURM_STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Ending:
    code: ExitCode
    goes_on: bool = False  # Whether the Slurm job was requeued, so no manual resume is needed
    is_final: bool = False  # Whether it would end in the same way if it were resumed


@dataclass(frozen=True, kw_only=True)
class Hooks:
    step: Callable[[str], None]
    # Makes the toy data set in this folder, with this Python or by this command.
    prepare_data: Callable[[Path, Path | Command], object]
    experiment: Callable[[Experiment], None]
    progress: Callable[[follow.Progress], None]
    finished: Callable[[Experiment, Outcome], None]


def job_of(plan: Plan, output: Path) -> Job:
    trained = preflight.weight_mounts(preflight.weight_files(plan.configuration, plan.data), plan.data)
    launch = plan.launch(str(output))
    return training_job(
        plan.configuration, plan.data, output, plan.extra_environment, node.cores(), launch, weights=trained
    )


def render(plan: Plan, output: Path) -> Command:
    job = job_of(plan, output)
    if plan.python is not None:
        command = renderers.host(job, plan.python, os.environ, is_user_python=plan.target.python is not None)
    else:
        command = runtimes.render(plan.target, job, runtimes.container_name(output), os.environ)
    if plan.hosts:
        return multi_host.add_cleanup(command, plan.hosts, output, os.environ)
    if not job.launch.outer:
        return command
    # srun makes files, but no folders; horovodrun and torchrun make both.
    folders = tuple(output / "ranks" / f"rank.{rank}" for rank in range(job.ranks))
    nodes, telemetry = plan.configuration.nodes, output / "telemetry.jsonl"
    away = step.samplers(plan.allocation, nodes, telemetry) if plan.allocation else ()
    return replace(command, rank_folders=folders, samplers=away)


def dry_run_command(plan: Plan) -> Command:
    return render(plan, plan.results / f"TIME-{plan.label}" / "experiment_0")


def ensure_python(plan: Plan, hooks: Hooks) -> None:
    if plan.target.runtime == "host" and plan.target.python is None:
        environment.ensure_environment(plan.configuration.choice.implementation.framework, hooks.step)


def as_shell(command: Command) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in run_metadata.redact(command.environment).items()]
    return " ".join(["cd", shlex.quote(str(command.working_directory)), "&&", "env", "-i", *variables]) + (
        " \\\n  " + shlex.join(run_metadata.redact_arguments(command.argv))
    )


def prepare_and_create(plan: Plan, hooks: Hooks) -> RunFolder:
    ensure_python(plan, hooks)
    if plan.makes_small_data and not (plan.data / "dataset.json").exists():
        # Container engines mount existing folders only.
        plan.data.mkdir(parents=True, exist_ok=True)
        preparer = plan.python or runtimes.preparation(plan.target, plan.data.name, plan.data, data_sets.Preparation())
        hooks.prepare_data(plan.data, preparer)
    refuse(plan)
    check_nodes(plan)
    manifest = data_sets.check_data(plan.data, plan.configuration.choice.benchmark.name)
    data_set = run_metadata.data_facts(manifest, str(plan.data))
    seeds = list(plan.seeds)
    trained = preflight.weights_json(preflight.weight_files(plan.configuration, plan.data))
    server = links.this_server(plan.machine).as_json()

    def content(path: Path) -> run_metadata.Begun:
        command, target = render(plan, path / "experiment_0"), (plan.target.runtime, plan.target.as_json())
        return {
            **run_metadata.describe(plan.configuration, command, data_set, plan.machine, seeds, *target),
            "links": server,
            "weights": trained,
            "drop_caches": plan.drop_caches,
            "extra_environment": run_metadata.redact(plan.extra_environment),
            "hosts": list(plan.hosts),
            "launcher": plan.launcher,
            "python": plan.target.python_json(),
            "slurm": plan.allocation.as_json() if plan.allocation else None,
        }

    system = run_metadata.system_description(plan.configuration, plan.machine, software(plan))
    config = plan.configuration.plain()
    shared = shared_stamp(plan.allocation) if plan.allocation else None
    return run_folder.create(plan.results, plan.label, content, system, config, seeds, shared)


def software(plan: Plan) -> dict[str, str]:
    # Package versions of the ranks: as reported by their Python, else from the framework's environment.
    answered = plan.target.python_info.packages if plan.target.python_info is not None else {}
    installed = environment.packages(plan.python) if plan.python is not None and not answered else answered
    return environment.software(plan.configuration.choice.implementation.framework, installed)


def check_nodes(plan: Plan) -> None:
    if plan.allocation is None and not plan.hosts[1:]:
        return
    with host_requirements.shared_marker(plan.results) as mark:
        needs = needs_of(plan, mark)
        if plan.allocation is not None:
            results = step.check_nodes(plan.configuration.nodes, needs)
        else:
            # Containers are rejected over ssh, so a Python exists.
            results = multi_host.check_hosts(plan.hosts[1:], needs, paths.ROOT, plan.python or Path(sys.executable))
    preflight.refuse_failed(results)


def needs_of(plan: Plan, mark: Path) -> list[Need]:
    target = plan.target
    needs = [
        host_requirements.same_file(
            plan.data / data_sets.PASSPORT, f"{host_requirements.SHARE}, or copy the data set there"
        ),
        Need("shared", str(mark), host_requirements.SHARE),
    ]
    if plan.python is not None:
        needs.append(host_requirements.same_file(paths.BENCHMARKS, host_requirements.SHARE))
        other = "use one that exists on all hosts" if target.python else "set XDG_CACHE_HOME to a shared folder"
        needs.append(Need("executable", str(plan.python), f"{host_requirements.SHARE}, or {other}"))
    if target.engine is not None:
        # By name, because the path may differ on other nodes.
        program = Path(target.engine.program).name
        needs.append(Need("program", program, f"install {program} there"))
        if target.runtime in engines.BUILDERS:
            needs.append(Need("image", program, "build or pull the image there", target.image))
    if Path(target.image).is_absolute():
        needs.append(Need("readable", target.image, host_requirements.SHARE))
    interface = plan.cluster.network_interface
    if plan.allocation is None:
        interface = multi_host.interface(plan.hosts, plan.extra_environment)
    if interface:
        hint = "set the correct one: --env NCCL_SOCKET_IFNAME=..., or network_interface in cluster.toml"
        needs.append(Need("interface", interface, hint))
    if plan.configuration.get("device") == "gpu":
        needs.append(Need("gpus", str(plan.configuration.ranks_per_node), "request fewer GPUs"))
    return needs


def execute(plan: Plan, folder: RunFolder, hooks: Hooks, limits: Limits) -> Ending:
    """Run all unfinished experiments; stop at the first failure or interruption.

    A Slurm array task runs only the experiment with its number.
    """
    experiments = experiments_of(folder, plan.allocation)
    gpus = [f"{gpu.name}, {gpu.driver}" for gpu in plan.machine.gpus]
    key = compile_cache.key_of(plan.configuration, folder.metadata()["image"], plan.python, gpus)
    if plan.cluster.textfile is not None:
        os.environ.setdefault(openmetrics.VARIABLE, str(plan.cluster.textfile))
    with Signals() as signals:
        for experiment in experiments:
            if experiment.has_finished:
                continue
            with ownership.acquire(experiment, plan.allocation.name if plan.allocation else "") as owner:
                is_cached = compile_cache.load(key, experiment.folder)
                outcome = _run_experiment(plan, experiment, hooks, signals, limits, owner)
                compile_cache.store(key, experiment.folder)
            if experiment.number == 0 or len(experiments) > 1:  # A single writer if array tasks share the folder.
                _note_ranks(plan, folder, experiment, hooks, {"key": key, "found": is_cached} if key else {})
            hooks.finished(experiment, outcome)
            if outcome.status == "failed":
                return Ending(ExitCode.FAILED, _requeue(plan, outcome, signals, hooks), outcome.is_final)
            if outcome.status == "interrupted":
                return Ending(ExitCode.INTERRUPTED, _requeue(plan, outcome, signals, hooks))
    reached = all(experiment.state().status == "reached" for experiment in experiments)
    return Ending(ExitCode.REACHED if reached else ExitCode.NOT_REACHED)


def _note_ranks(
    plan: Plan, folder: RunFolder, experiment: Experiment, hooks: Hooks, compile_info: Mapping[str, Any]
) -> None:
    # Add the report of rank 0 to run.json. A full disk must not hide the outcome of the experiment.
    try:
        progress = follow.read_progress(experiment.metrics)
        reported = {**progress.reported, "utilization": _utilization(plan, progress), "compiled": compile_info}
        folder.note_ranks(experiment.number, run_metadata.redact(progress.environment), reported)
    except OSError as error:
        hooks.step(f"the report of the ranks cannot be added to run.json: {error.strerror or error}")


def _utilization(plan: Plan, progress: follow.Progress) -> dict[str, Any]:
    speed = progress.trained_per_second
    if progress.flops_per_sample is None or speed is None:
        return {}
    configuration = plan.configuration
    gpu = plan.machine.gpus[0].name if configuration.get("device") == "gpu" and plan.machine.gpus else ""
    kind = progress.gemm_precision
    return peaks.utilization(progress.flops_per_sample, speed, progress.batch_unit, gpu, kind, configuration.ranks)


def _requeue(plan: Plan, outcome: Outcome, signals: Signals, hooks: Hooks) -> bool:
    # Requeue the job after a node failure or at its time limit. Return whether it was requeued.
    if plan.allocation is None:
        return False
    asks = outcome.lost_nodes or (outcome.status == "interrupted" and signals.received == queue.WARNING)
    if not asks and not queue.is_requeued(plan.allocation):
        return False
    goes_on, text = queue.requeue(plan.allocation, plan.cluster.max_requeues)
    hooks.step(text)
    return goes_on


def _run_experiment(
    plan: Plan, experiment: Experiment, hooks: Hooks, signals: Signals, limits: Limits, owner: ownership.Owner
) -> Outcome:
    started = experiment.state().started or files.utc_now()
    job = plan.allocation.name if plan.allocation else ""
    cluster = plan.allocation.cluster if plan.allocation else ""
    state = ExperimentState(status="running", started=started, job=job, cluster=cluster)
    try:
        if not experiment.has_checkpoint:
            clear_remains(experiment)
            cleared = plan.drop_caches and (
                step.drop_caches(plan.configuration.nodes) if plan.allocation else host_actions.drop_caches()["dropped"]
            )
            run_metadata.write_log_header(experiment.log, plan.configuration, plan.machine, cleared)
        if plan.hosts:
            launched = hosts.as_file(multi_host.with_first_resolved(plan.hosts))
            with files.replaced(experiment.folder / "hosts") as file:
                file.write(launched.encode())
        experiment.set_state(state)
        hooks.experiment(experiment)
        published = _last_written(experiment.log) if experiment.result.exists() else 0
        command = render(plan, experiment.folder)
        if plan.allocation is None:
            outcome = run(command, experiment, owner, signals, hooks.progress, limits)
        else:
            outcome = _run_in_slurm(plan.allocation, command, experiment, hooks, signals, limits, owner)
        if outcome.memory:
            advice = hints.less_memory(plan.configuration, outcome.memory)
            outcome = replace(outcome, reason=f"{outcome.reason}; hint: {advice}")
        if not ownership.renew(experiment, owner):
            return outcome  # state and log are the new owner's
        final_state = replace(state, status=outcome.status, reason=outcome.reason, ended=files.utc_now())
        experiment.set_state(replace(final_state, is_final=outcome.is_final))
        # A log without new lines, because the ranks rejected it, must not replace the published log.
        if _last_written(experiment.log) != published:
            experiment.publish_log()
    except OSError as error:
        outcome = Outcome("failed", f"the run folder cannot be written: {error.strerror or error}")
        # The few bytes may be available again after the ranks have exited.
        with contextlib.suppress(OSError, EncoreError):
            if ownership.renew(experiment, owner) and not experiment.has_finished:
                experiment.set_state(replace(state, status="failed", reason=outcome.reason, ended=files.utc_now()))
    return outcome


def _last_written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _run_in_slurm(
    allocation: Allocation,
    command: Command,
    experiment: Experiment,
    hooks: Hooks,
    signals: Signals,
    limits: Limits,
    owner: ownership.Owner,
) -> Outcome:
    limits = replace(limits, stop_seconds=limits.stop_seconds or SLURM_STOP_SECONDS)
    for retries in reversed(range(LAUNCHES)):
        outcome = run(command, experiment, owner, signals, hooks.progress, limits)
        if outcome.status != "failed":
            return outcome
        lost = step.lost_nodes(allocation)
        if lost:
            # The training can resume on other nodes.
            reason = f"lost {', '.join(lost)}: no process can be started there ({outcome.reason})"
            return replace(outcome, status="interrupted", reason=reason, lost_nodes=tuple(lost))
        # A crashed step can leave PMIx's socket on a node, which blocks the next step with the same number there
        # (mpi/pmix, pmixp_usock_create_srv). Each attempt uses a new step number.
        never_began = "aborted before step completely launched" in launcher_output(experiment)
        # PMIx crashes a rank now and then while it connects (openpmix issue 1114): none has a heartbeat by then.
        never_began |= outcome.reason.endswith(CRASHES) and not heartbeats(experiment.folder / "heartbeat")
        if signals.received or not never_began or not retries:
            return outcome
        hooks.step(f"srun could not start the ranks ({outcome.reason}); trying again")
    return outcome


def clear_remains(experiment: Experiment) -> None:
    # Move files from an attempt without a checkpoint aside, so that the next attempt starts clean.
    for path in (experiment.log, experiment.metrics):
        if path.exists():
            path.replace(path.with_name(f"{path.name}.discarded"))


def resumed_command(folder: RunFolder, experiment: Experiment) -> Command:
    return render(query_python(plan_of(folder), start=False), experiment.folder)


def resume(folder: RunFolder, hooks: Hooks, limits: Limits) -> Ending:
    """Resume a run: finished experiments are kept, the rest continue from their checkpoints.

    Nothing is written before the folder was verified to be complete and without an owner.
    """
    folder.check_whole()
    plan = plan_of(folder)
    job = plan.allocation.name if plan.allocation else ""
    experiments = experiments_of(folder, plan.allocation)
    ownership.refuse_owned(experiments, job)
    status.refuse_queued(folder, experiments, job)
    plan = query_python(plan)
    data_id = folder.metadata()["data"]["id"]
    if data_sets.check_data(plan.data, plan.configuration.choice.benchmark.name).id != data_id:
        raise EncoreError(
            f"the data set in {plan.data} differs from the one that the run started with",
            expected=f"id {data_id[:12]}",
            hint="restore it, or start a new run",
        )
    preflight.refuse_other_weights(
        preflight.weight_files(plan.configuration, plan.data), folder.metadata().get("weights", {})
    )
    checks.refuse_other_image(folder.metadata(), plan.target)
    preflight.refuse_failed(
        [
            *checks.check(plan.target, plan.configuration, plan.machine, [plan.data, plan.results]),
            *preflight.check_devices(plan.configuration, plan.machine),
        ]
    )
    ensure_python(plan, hooks)
    check_nodes(plan)
    return execute(plan, folder, hooks, limits)


# -- in a Slurm job ----------------------------------------------------------------------------------


def folders(results: Path, mark: str) -> list[RunFolder]:
    # A job's run folders, oldest first. ``mark`` is, for example, ``job12``.
    runs = sorted(results.glob(f"[0-9]*-{mark}")) + sorted(results.glob(f"[0-9]*-{mark}-[0-9]*"))
    return [RunFolder(path) for path in runs if (path / "run.json").is_file()]


def existing_run(results: Path, allocation: Allocation, arguments: Sequence[str]) -> RunFolder | None:
    """Return the run folder created before the job was requeued, or by another task of the array.

    A job may contain several Encore commands: only folders with the same command line match, unfinished ones first.
    """
    if allocation.restarts == 0 and allocation.array_count == 1:
        return None
    same = [f for f in folders(results, allocation.folder_mark) if f.metadata()["arguments"] == list(arguments)]
    unfinished = [folder for folder in same if not all(experiment.has_finished for experiment in folder.experiments())]
    return next(iter([*unfinished, *same]), None)


def shared_stamp(allocation: Allocation) -> str | None:
    # Timestamp shared by the run folders of all array tasks; None outside arrays.
    if allocation.array_count == 1:
        return None
    submitted = commands.show_job(allocation.job).get("SubmitTime", "")
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(submitted).astimezone(timezone.utc).strftime(run_folder.STAMP)
    return f"array{allocation.array_job}"


def experiments_of(folder: RunFolder, allocation: Allocation | None) -> list[Experiment]:
    """Return all experiments, or an array task's single experiment.

    The array that created the run maps tasks to experiments by position; an array that resumes it maps them by
    number.
    """
    experiments = folder.experiments()
    if allocation is None or allocation.array_job is None:
        return experiments
    is_first = folder.path.name.partition(f"-{allocation.folder_mark}")[1] != ""
    number = allocation.array_index if is_first else allocation.array_task
    assigned = [experiment for experiment in experiments if experiment.number == number]
    if not assigned:
        raise EncoreError(
            f"task {allocation.array_task} of the array has no experiment in {folder.path.name}",
            expected=f"tasks 0 to {len(experiments) - 1}",
            hint=hints.resume(folder.path),
        )
    return assigned
