"""The life of a run: plan, check, prepare, render, run, judge; and going on with an interrupted one."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from encore import caches, catalogue, environment, mlperf_header, node, passport, paths, preflight, run_folder
from encore import configuration as configurations
from encore import data as data_sets
from encore import targets as runtimes
from encore.catalogue import Choice, System
from encore.configuration import Configuration
from encore.errors import EncoreError, ExitCode
from encore.follow import Progress
from encore.job import Command, Job, Mount, Places, training_job
from encore.node import Node
from encore.run_folder import Experiment, ExperimentState, RunFolder
from encore.runtimes import host
from encore.supervise import Outcome, Signals, run
from encore.targets import ON_HOST, Target

MAX_GPUS = 4096


@dataclass(frozen=True)
class Request:
    """What the user asked for; None where the user left the choice to Encore."""

    name: str
    gpus: int
    system: str | None = None
    round: str | None = None
    data: Path | None = None
    results: Path | None = None
    runs: int = 1
    seed: int | None = None
    settings: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    drop_caches: bool | None = None
    runtime: str = "auto"
    image: str | None = None


@dataclass(frozen=True)
class Plan:
    """A request with all choices made."""

    configuration: Configuration
    machine: Node
    data: Path
    makes_small_data: bool
    results: Path
    seeds: tuple[int, ...]
    extra_environment: Mapping[str, str]
    drop_caches: bool
    target: Target = ON_HOST

    @property
    def label(self) -> str:
        """``resnet-mxnet-cpu``: the run folder's name after the time."""
        choice = self.configuration.choice
        return f"{choice.benchmark.name}-{choice.implementation_name}-{self.configuration.system.system}"


@dataclass(frozen=True)
class Hooks:
    """How a run tells what it does."""

    step: Callable[[str], None]
    prepare_data: Callable[[Path, Path | Command], None]
    """Makes the small data set in this folder, with this Python or by this command."""
    experiment: Callable[[Experiment], None]
    progress: Callable[[Progress], None]
    ended: Callable[[Experiment, Outcome], None]


def choose_system(
    choice: Choice, gpus: int, machine: Node, name: str | None, round_name: str | None
) -> System:
    """The system that was named, else the one that is nearest to this machine's GPUs, else the small one."""
    if name is not None:
        return catalogue.find_system(choice, name, round_name)
    if not machine.gpus:
        return catalogue.find_system(choice, choice.benchmark.small_data.system, round_name)
    wanted_round = round_name or choice.benchmark.default_round
    candidates = [s for s in catalogue.systems(choice) if s.kind == "submitted" and s.round == wanted_round]
    if not candidates:
        raise EncoreError(
            f"no system of {choice.name} in round {wanted_round}", remedy="name one with --system"
        )
    gpu = machine.gpus[0]

    def distance(system: System) -> tuple[bool, bool, float, int]:
        # Of accelerators that nothing was submitted on, the memory says best which batch will fit.
        other = preflight.family(system.accelerator) not in gpu.name
        memory = abs(preflight.memory_gib(system.accelerator) - gpu.memory_gib) if other else 0.0
        return (system.nodes > 1, other, memory, abs(system.gpus_per_node - gpus))

    return min(candidates, key=distance)


def check_gpus(gpus: int) -> None:
    """Refuse a number of GPUs that cannot be."""
    if not 1 <= gpus <= MAX_GPUS:
        raise EncoreError(f"{gpus} GPUs asked for", expected=f"1 to {MAX_GPUS}", remedy="such as 8")


def spread(system: System, gpus: int) -> tuple[int, int]:
    """Nodes, and GPUs on each: as in the system for its own number of GPUs, else all on one node."""
    if gpus == system.nodes * system.gpus_per_node:
        return system.nodes, system.gpus_per_node
    return 1, gpus


def parse_environment(settings: tuple[str, ...], caller: Mapping[str, str]) -> dict[str, str]:
    """Variables of ``--env NAME=VALUE`` and, taken from the caller, ``--env NAME``."""
    variables = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not name.isidentifier():
            raise EncoreError(f"--env {setting!r} names no variable", expected="NAME=VALUE or NAME")
        if not separator and name not in caller:
            raise EncoreError(
                f"--env {name}: the variable is not set", remedy=f"give it a value: --env {name}=VALUE"
            )
        variables[name] = value if separator else caller[name]
    return variables


def make_plan(request: Request, small_data: Path | None = None) -> Plan:
    """Make all choices; EncoreError for names, numbers and combinations that cannot be.

    ``small_data`` is where the small data set is made if not at its usual place.
    """
    choice = catalogue.choose(request.name)
    check_gpus(request.gpus)
    if request.runs < 1:
        raise EncoreError(f"--runs {request.runs}", expected="at least 1", remedy="--runs 5")
    if request.seed is not None and not 0 <= request.seed < 2**31:
        raise EncoreError(f"--seed {request.seed}", expected="0 to 2147483647")
    machine = node.this_node()
    system = choose_system(choice, request.gpus, machine, request.system, request.round)
    nodes, per_node = spread(system, request.gpus)
    resolved = configurations.resolve(choice, system, nodes, per_node, list(request.settings))
    small = system.kind == "small" and request.data is None
    first = request.seed if request.seed is not None else secrets.randbits(31) % (2**31 - request.runs)
    return Plan(
        configuration=resolved,
        machine=machine,
        data=(request.data or small_data or paths.default_data(choice.benchmark.name)).absolute(),
        makes_small_data=small,
        results=(request.results or paths.default_results()).absolute(),
        seeds=tuple(first + number for number in range(request.runs)),
        extra_environment=parse_environment(request.environment, os.environ),
        drop_caches=system.kind != "small" if request.drop_caches is None else request.drop_caches,
        target=runtimes.choose(request.runtime, choice, machine, resolved.get("device"), request.image),
    )


def checks(plan: Plan) -> list[preflight.Check]:
    """The preflight of a plan; the small data set, which is made on the way, need not be there yet."""
    found = preflight.check_run(plan.configuration, plan.machine, plan.data, plan.results)
    if plan.makes_small_data and not (plan.data / "dataset.json").exists():
        made = preflight.Check("OK", "data set", f"the small one will be made in {plan.data}")
        found = [made if check.name == "data set" else check for check in found]
    folders = [plan.data, plan.results]
    found = [*runtimes.check(plan.target, plan.configuration, plan.machine, folders), *found]
    if plan.configuration.nodes > 1:
        remedy = f"give the GPUs of one node: {plan.configuration.ranks_per_node}"
        found.insert(0, preflight.Check("FAIL", "nodes", f"{plan.configuration.nodes} nodes wanted", remedy))
    return found


def refuse(plan: Plan) -> list[preflight.Check]:
    """Refuse a plan with a failed check; returns the warnings."""
    found = checks(plan)
    preflight.refuse_failed(found)
    return [check for check in found if check.level == "WARN"]


def job_of(plan: Plan, output: Path) -> Job:
    """The job of the experiment in ``output``."""
    mounts = (Mount(plan.data, str(plan.data), True), Mount(output, str(output), False))
    places = Places(data=str(plan.data), output=str(output))
    return training_job(plan.configuration, places, mounts, plan.extra_environment)


def render(plan: Plan, output: Path, python: Path | None) -> Command:
    """The command of the experiment in ``output`` on this machine; ``python`` on the host alone."""
    job = job_of(plan, output)
    if python is not None:
        return host.render(job, python, os.environ)
    return runtimes.render(plan.target, job, runtimes.container_name(output), os.environ)


def preparation_command(plan: Plan) -> Command:
    """The command that makes the small data set in a container."""
    prepare = data_sets.prepare_command("python", plan.data.name, plan.data, data_sets.Preparation())
    mounts = (Mount(plan.data, str(plan.data), False),)
    job = Job(argv=(*prepare, "--progress", "json"), environment={}, mounts=mounts, ranks=1, gpus=0)
    return runtimes.render(plan.target, job, runtimes.container_name(plan.data), os.environ)


def dry_run_command(plan: Plan) -> Command:
    """The command that a run would execute, without making anything."""
    output = plan.results / f"TIME-{plan.label}" / "experiment_0"
    if plan.target.runtime != "host":
        return render(plan, output, None)
    return render(
        plan, output, environment.describe(plan.configuration.choice.implementation.framework).python
    )


def ensure_python(plan: Plan, hooks: Hooks) -> Path | None:
    """The Python of the framework's environment, made if need be; None where an image brings its own."""
    if plan.target.runtime != "host":
        return None
    return environment.ensure_environment(plan.configuration.choice.implementation.framework, hooks.step)


def as_shell(command: Command) -> str:
    """A command as one could type it."""
    variables = [
        f"{name}={shlex.quote(value)}" for name, value in passport.redact(command.environment).items()
    ]
    return " ".join(["cd", shlex.quote(str(command.working_directory)), "&&", "env", "-i", *variables]) + (
        " \\\n  " + shlex.join(command.argv)
    )


def prepare_and_create(plan: Plan, hooks: Hooks) -> tuple[RunFolder, Path | None]:
    """Set up what is missing, check, and make the run folder; returns it with the environment's Python."""
    python = ensure_python(plan, hooks)
    if plan.makes_small_data and not (plan.data / "dataset.json").exists():
        # An engine mounts only what is there.
        plan.data.mkdir(parents=True, exist_ok=True)
        hooks.prepare_data(plan.data, python or preparation_command(plan))
    refuse(plan)
    found = data_sets.check_data(plan.data, plan.configuration.choice.benchmark.name)
    data_set = {
        "id": found.id,
        "name": found.name,
        "folder": str(plan.data),
        "counts": dict(found.counts),
    }
    seeds = list(plan.seeds)

    def content(path: Path) -> dict[str, Any]:
        command = render(plan, path / "experiment_0", python)
        target = (plan.target.runtime, plan.target.as_json())
        told = passport.describe(plan.configuration, command, data_set, plan.machine, seeds, *target)
        told["drop_caches"] = plan.drop_caches
        told["extra_environment"] = passport.redact(plan.extra_environment)
        return told

    system = passport.system_description(plan.configuration, plan.machine)
    folder = run_folder.create(plan.results, plan.label, content, system, plan.configuration.plain(), seeds)
    return folder, python


def execute(
    plan: Plan, folder: RunFolder, python: Path | None, hooks: Hooks, hang_seconds: float
) -> ExitCode:
    """Run every experiment that has not ended yet; stops at the first that fails or is interrupted."""
    with Signals() as signals:
        for experiment in folder.experiments():
            if experiment.state().status in run_folder.FINISHED:
                continue
            outcome = _run_experiment(plan, experiment, python, hooks, signals, hang_seconds)
            hooks.ended(experiment, outcome)
            if outcome.status == "failed":
                return ExitCode.FAILED
            if outcome.status == "interrupted":
                return ExitCode.INTERRUPTED
    reached = all(experiment.state().status == "reached" for experiment in folder.experiments())
    return ExitCode.REACHED if reached else ExitCode.NOT_REACHED


def _run_experiment(
    plan: Plan,
    experiment: Experiment,
    python: Path | None,
    hooks: Hooks,
    signals: Signals,
    hang_seconds: float,
) -> Outcome:
    state = ExperimentState("running", started=experiment.state().started or run_folder.utc_now())
    try:
        fresh = not (experiment.folder / "checkpoint").exists()
        if fresh:
            _clear_remains(experiment)
            cleared = caches.drop() if plan.drop_caches else False
            mlperf_header.write(experiment.log, plan.configuration, plan.machine, cleared)
        experiment.set_state(state)
        hooks.experiment(experiment)
        command = render(plan, experiment.folder, python)
        outcome = run(command, experiment, signals, hooks.progress, hang_seconds)
        experiment.set_state(
            replace(state, status=outcome.status, reason=outcome.reason, ended=run_folder.utc_now())
        )
        experiment.publish_log()
    except OSError as error:
        return Outcome("failed", f"the run folder cannot be written: {error.strerror or error}")
    return outcome


def _clear_remains(experiment: Experiment) -> None:
    """Put aside what a try without a checkpoint has left, so that the new one starts clean."""
    for path in (experiment.log, experiment.metrics):
        if path.exists():
            path.replace(path.with_name(f"{path.name}.discarded"))


def plan_of(folder: RunFolder) -> Plan:
    """The plan of an existing run, from its passport alone."""
    content = folder.passport()
    choice = catalogue.choose(content["name"])
    system = catalogue.find_system(choice, content["system"], content["round"])
    config = configurations.config_class(choice.folder)
    stored = run_folder.read_json(folder.path / "config.json")
    if set(stored) != set(configurations.field_types(choice.folder)):
        raise EncoreError(
            f"{folder.path} was made by a version of Encore with other configuration keys",
            remedy=f"check out commit {content['code']['commit']} to go on with it, or start a new run",
        )
    config(**{key: tuple(v) if isinstance(v, list) else v for key, v in stored.items()})
    values = {
        name: configurations.Value(
            tuple(v) if isinstance(v, list) else v, content["configuration"][name]["origin"]
        )
        for name, v in stored.items()
    }
    resolved = Configuration(
        choice, system, content["nodes"], content["ranks_per_node"], values, tuple(content["deviations"])
    )
    machine = node.this_node()
    image = content["image"]["name"] if content["image"] else None
    return Plan(
        configuration=resolved,
        machine=machine,
        data=Path(content["data"]["folder"]),
        makes_small_data=False,
        results=folder.path.parent,
        seeds=tuple(content["seeds"]),
        extra_environment=_restore_secrets(content["extra_environment"]),
        drop_caches=content["drop_caches"],
        target=runtimes.choose(content["runtime"], choice, machine, resolved.get("device"), image),
    )


def resumed_command(folder: RunFolder, experiment: Experiment) -> Command:
    """The command that would go on with an experiment."""
    plan = plan_of(folder)
    python = None
    if plan.target.runtime == "host":
        python = environment.describe(plan.configuration.choice.implementation.framework).python
    return render(plan, experiment.folder, python)


def _restore_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables of an earlier call; the values of secrets, which were not kept, come from this caller."""
    missing = [
        name for name, value in variables.items() if value == passport.REDACTED and name not in os.environ
    ]
    if missing:
        raise EncoreError(
            f"the run was given {', '.join(missing)}, whose value is not kept",
            remedy=f"set it again: {missing[0]}=VALUE encore run --resume RUN",
        )
    return {name: os.environ[name] if v == passport.REDACTED else v for name, v in variables.items()}


def resume(folder: RunFolder, hooks: Hooks, hang_seconds: float) -> tuple[Plan, ExitCode]:
    """Go on with a run: finished experiments stay, the others go on from their checkpoints."""
    plan = plan_of(folder)
    wanted = folder.passport()["data"]["id"]
    found = data_sets.check_data(plan.data, plan.configuration.choice.benchmark.name)
    if found.id != wanted:
        raise EncoreError(
            f"the data set in {plan.data} is not the one that the run began with",
            expected=f"id {wanted[:12]}",
            remedy="restore it, or start a new run",
        )
    runtimes.refuse_other_image(folder.passport(), plan.target)
    preflight.refuse_failed(
        [
            *runtimes.check(plan.target, plan.configuration, plan.machine, [plan.data, plan.results]),
            *preflight.check_devices(plan.configuration, plan.machine),
        ]
    )
    python = ensure_python(plan, hooks)
    return plan, execute(plan, folder, python, hooks, hang_seconds)
