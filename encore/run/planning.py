"""Resolve a run's choices, check them, and restore them from an existing run's metadata."""

import functools
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from encore import catalogue, environment, files, launchers, paths
from encore import configuration as configurations
from encore import data as data_sets
from encore.catalogue import Choice, System
from encore.configuration import Configuration
from encore.containers import checks as container_checks
from encore.containers import runtimes
from encore.containers.runtimes import ON_HOST, Target
from encore.errors import EncoreError
from encore.kubernetes import manifests
from encore.kubernetes.manifests import Pods
from encore.kubernetes.settings import Kubernetes
from encore.launchers import Launch
from encore.machine import node, preflight
from encore.run import hints, run_folder, run_metadata
from encore.slurm import cluster as clusters
from encore.slurm import queue, step
from encore.slurm.cluster import Cluster
from encore.slurm.queue import Allocation
from encore.ssh import hosts, multi_host
from encore.ssh.hosts import Host

MAX_GPUS = 4096
OVER_SSH = replace(ON_HOST, reason="containers are not supported over ssh")
FITTING = ("submitted", "later", "derived")  # Kinds of system that are chosen for a machine with GPUs
# Largest ratio of the memory in an accelerator's name to the memory reported by the driver: a 16 GB V100 reports 15.8
# GiB.
ROUNDING = 1.1


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of the user. None: Encore chooses."""

    name: str
    gpus: int | None  # In all nodes together; None: all that Slurm has given to the job
    nodes: int | None = None
    system: str | None = None
    round: str | None = None
    data: Path | None = None
    results: Path | None = None
    runs: int = 1
    seed: int | None = None
    settings: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    drop_caches: bool | None = None
    runtime: str | None = None
    image: str | None = None
    python: Path | None = None  # Interpreter for the host runtime
    cluster: Path | None = None  # Path to cluster.toml; None: the default path, if it exists
    hosts: tuple[Host, ...] = ()  # Hosts to reach over ssh; empty: this machine or the scheduler's allocation
    launcher: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    configuration: Configuration
    machine: node.Node
    data: Path
    makes_small_data: bool
    results: Path
    seeds: tuple[int, ...]
    extra_environment: Mapping[str, str]
    drop_caches: bool
    target: Target = ON_HOST
    allocation: Allocation | None = None  # Slurm job of the run; None: this machine only
    cluster: Cluster = field(default_factory=Cluster)
    hosts: tuple[Host, ...] = ()  # Hosts that ssh reaches, without a scheduler
    launcher: str = ""  # Launcher for ``hosts``; empty without hosts
    pods: Pods | None = None  # Pods of a Kubernetes run
    # Reason and device for training the toy data set on a machine with GPUs; empty if the user requested it.
    toy_data_set: str = ""

    @property
    def label(self) -> str:
        # ``resnet-mxnet-cpu``: the run folder's name after the time; in a Slurm job with ``-job12``.
        choice = self.configuration.choice
        name = f"{choice.benchmark.name}-{choice.implementation_name}-{self.configuration.system.system}"
        return f"{name}-{self.allocation.folder_mark}" if self.allocation else name

    @functools.cached_property  # Cached because the checkout may change during a run
    def python(self) -> Path | None:
        if self.target.runtime != "host":
            return None
        return self.target.python or environment.describe(self.configuration.choice.implementation.framework).python

    def launch(self, output: str) -> Launch:
        framework = self.configuration.choice.implementation.framework
        if self.pods is not None:
            name = manifests.name_of(self.configuration.choice.name, Path(output))
            ranks, interface = self.configuration.ranks_per_node, self.cluster.network_interface
            return manifests.launch(framework, self.pods, ranks, name, output, interface)
        if self.hosts:
            gpus = self.configuration.get("device") == "gpu"
            return multi_host.launch(self.launcher, self.hosts, output, self.extra_environment, gpus)
        if self.allocation is None:
            info, ranks = self.target.python_info, self.configuration.ranks
            build = launchers.parse_check_build(info.check_build) if info else None
            meeting = launchers.controller(build, info.mpirun if info else False, ranks)
            return launchers.on_one_node(framework, ranks, output, meeting, os.geteuid() == 0)
        # Pyxis configures PMIx; the host runtime sees all folders.
        needs_folders = self.target.runtime not in ("host", "pyxis")
        logs = f"{output}/ranks"
        return step.launch(self.configuration, self.cluster, self.allocation, os.environ, logs, needs_folders)


def choose_system(
    choice: Choice, gpus: int, machine: node.Node, name: str | None, round_name: str | None, nodes: int = 1
) -> System:
    """Return the named system, else the system closest to this machine's GPUs, else the toy system.

    ``gpus`` is the total over all nodes.
    """
    if name is not None:
        return catalogue.find_system(choice, name, round_name)
    if not machine.gpus:
        return catalogue.find_system(choice, choice.benchmark.small_data.system, round_name)
    wanted_round = round_name or choice.benchmark.default_round
    candidates = [s for s in catalogue.systems(choice) if s.kind in FITTING and s.round == wanted_round]
    if not candidates and round_name is None:
        # Rounds without published results: configurations of other rounds or of the reference, newest first.
        fitting = (s for s in catalogue.systems(choice) if s.kind in (*FITTING, "study"))
        order = list(choice.benchmark.rounds)
        candidates = sorted(fitting, key=lambda system: -order.index(system.round))
    if not candidates:
        raise EncoreError(f"no system of {choice.name} in round {wanted_round}", hint="choose one with --system")
    gpu = machine.gpus[0]

    def distance(system: System) -> tuple[bool, bool, bool, float, bool, float, float]:
        # A batch from a system with more memory would not fit. For accelerators without submissions, memory is the best
        # predictor of a batch that fits.
        has = preflight.memory_gib(system.accelerator)
        memory = abs(has - gpu.memory_gib) if has else 0.0
        other = preflight.family(system.accelerator) not in gpu.name
        count = abs(math.log2(system.nodes * system.gpus_per_node / gpus))
        several = nodes == 1 and system.nodes > 1
        return (several, has > ROUNDING * gpu.memory_gib, other, memory * other, system.nodes != nodes, count, memory)

    return min(candidates, key=distance)


def check_gpus(gpus: int) -> None:
    if not 1 <= gpus <= MAX_GPUS:
        raise EncoreError(f"{gpus} GPUs requested", expected=f"1 to {MAX_GPUS}", hint="such as 8")


def spread(system: System, gpus: int) -> tuple[int, int]:
    # Nodes and GPUs per node: the system's numbers if the total matches, else a single node.
    if gpus == system.nodes * system.gpus_per_node:
        return system.nodes, system.gpus_per_node
    return 1, gpus


def spread_over(allocation: Allocation, request: Request, cluster: Cluster, machine: node.Node) -> tuple[int, int]:
    # Nodes and GPUs (on CPUs: ranks) per node for a run in a Slurm job.
    nodes = request.nodes or len(allocation.nodes)
    if nodes > len(allocation.nodes):
        raise EncoreError(
            f"{nodes} nodes requested, the Slurm job has {len(allocation.nodes)}",
            hint=f"submit with more nodes: sbatch -N {nodes} slurm/run.sub {request.name}",
        )
    if request.gpus is None:
        has = allocation.gpus_per_node or allocation.tasks_per_node or cluster.gpus_per_node
        return nodes, has or len(machine.gpus) or 1
    if request.nodes is None and request.gpus < nodes:
        nodes = 1
    if request.gpus % nodes:
        raise EncoreError(
            f"{request.gpus} GPUs cannot be spread evenly over {nodes} nodes",
            expected=f"a multiple of {nodes}",
            hint=f"{request.gpus - request.gpus % nodes} or {request.gpus + nodes - request.gpus % nodes},"
            " or fewer nodes: --nodes 1",
        )
    return nodes, request.gpus // nodes


def make_plan(request: Request, small_data: Path | None = None, allocation: Allocation | None = None) -> Plan:
    """Resolve a run's choices.

    ``small_data`` overrides the folder of the toy data set; ``allocation`` is the Slurm job to plan for, by default
    this process's job.

    Raises:
        EncoreError: an invalid name, number or combination of options.
    """
    choice, machine = catalogue.choose(request.name), node.this_node()
    if not request.hosts:
        allocation = allocation or queue.this_allocation(os.environ)
    cluster, _ = clusters.load(request.cluster)
    _check_numbers(request, allocation)
    runtime, python = choose_python(request, cluster, choice)
    image = request.image or cluster.image or None
    small, toy_reason = ("", "") if allocation else _toy_data_set(request, choice, cluster, machine)
    request = replace(request, system=small or request.system)
    if allocation is not None:
        nodes, per_node = spread_over(allocation, request, cluster, machine)
        total = nodes * per_node
        system = choose_system(choice, total, machine, request.system, request.round, nodes)
    else:
        total = request.gpus or 1
        system = choose_system(choice, total, machine, request.system, request.round, len(request.hosts) or 1)
        nodes, per_node = hosts.layout(request.hosts, total) if request.hosts else spread(system, total)
    check_gpus(total)
    data = request.data or cluster.data_of(choice.benchmark.name)
    manifest = data_sets.read_manifest(data, choice.benchmark.name) if data else {}
    resolved = configurations.resolve(choice, system, nodes, per_node, list(request.settings), manifest)
    device = resolved.get("device")
    runs = allocation.array_count if allocation and allocation.array_count > 1 else request.runs
    first = request.seed if request.seed is not None else secrets.randbits(31) % (2**31 - runs)
    return Plan(
        configuration=resolved,
        machine=machine,
        data=paths.absolute(data or small_data or paths.default_data(choice.benchmark.name)),
        makes_small_data=system.kind == "small" and data is None,
        results=paths.absolute(request.results or cluster.results or paths.default_results()),
        seeds=tuple(first + number for number in range(runs)),
        extra_environment=run_metadata.parse_environment(request.environment, os.environ),
        drop_caches=system.kind != "small" if request.drop_caches is None else request.drop_caches,
        target=OVER_SSH
        if request.hosts and runtime == "auto" and python is None
        else runtimes.choose(runtime, choice, machine, device, image, allocation is not None, python),
        allocation=allocation,
        cluster=cluster,
        hosts=request.hosts,
        launcher=multi_host.choose(request.launcher, choice.implementation.framework, request.hosts),
        toy_data_set=toy_reason,
    )


def _toy_data_set(request: Request, choice: Choice, cluster: Cluster, machine: node.Node) -> tuple[str, str]:
    # Choose the toy data set on a machine with GPUs but without the full data set, on the GPUs if possible. Return the
    # system and the reason; both are empty if the request excludes the toy data set.
    if request.system or request.hosts or request.data or cluster.data or not means_toy_data_set(choice, machine):
        return "", ""
    ranks = request.gpus or 1
    system = catalogue.find_system(choice, catalogue.ON_GPUS, request.round)
    resolved = configurations.resolve(choice, system, 1, ranks, list(request.settings))
    runtime, python = choose_python(request, cluster, choice)
    target = runtimes.choose(runtime, choice, machine, "gpu", request.image or cluster.image or None, python=python)
    target = runtimes.query_python(target, choice, {}, ranks, start=False)
    device_checks = [
        *preflight.check_devices(resolved, machine),
        *container_checks.check(target, resolved, machine, []),
    ]
    problem = next((check for check in device_checks if check.level == "FAIL"), None)
    small, full = choice.benchmark.small_data, choice.benchmark.full_data.name
    without = f"no {full} here: trains the toy data set, {small.name},"
    if problem is None:
        return system.system, f"{without} on the GPUs ({target.python or target.image})"
    return small.system, f"{without} on the CPU ({problem.found}); to use the GPUs: {problem.hint}"


def means_toy_data_set(choice: Choice, machine: node.Node) -> bool:
    if not machine.gpus:
        return False
    folder = paths.default_data(choice.benchmark.name)
    try:
        return data_sets.read_passport(folder).name == choice.benchmark.small_data.name
    except EncoreError:
        # A partially prepared data set was meant to be a different one.
        return not (folder / data_sets.PARTS).exists()


def choose_python(request: Request, cluster: Cluster, choice: Choice) -> tuple[str, Path | None]:
    # The runtime, and the Python that was named for the host: on the command line or in the cluster file.
    if request.python is None:
        return request.runtime or cluster.runtime, cluster.python.get(choice.implementation.framework)
    if request.runtime not in (None, "auto", "host") or request.image:
        other = f"--image {request.image}" if request.image else f"--runtime {request.runtime}"
        raise EncoreError(f"--python with {other}", expected="one of them", hint="leave one out")
    # Do not resolve links: a virtual environment's interpreter locates its packages by the link's path.
    return "host", request.python.expanduser().absolute()


def _check_numbers(request: Request, allocation: Allocation | None) -> None:
    gpus, nodes, runs, seed = request.gpus, request.nodes, request.runs, request.seed
    tasks = allocation.array_count if allocation else 1
    refusals = (
        (
            gpus is None and allocation is None,
            EncoreError("no number of GPUs given", expected=f"encore run {request.name} GPUS"),
        ),
        (
            nodes is not None and allocation is None,
            EncoreError(
                f"--nodes {nodes} outside of a Slurm job", hint=f"sbatch -N {nodes} slurm/run.sub {request.name}"
            ),
        ),
        (runs < 1, EncoreError(f"--runs {runs}", expected="at least 1", hint="--runs 5")),
        (
            allocation is not None and allocation.array_index is None,
            EncoreError(
                "the task numbers of the array are not evenly spaced",
                expected="--array=FIRST-LAST or FIRST-LAST:STEP",
                hint="such as sbatch --array=0-4 slurm/run.sub resnet, for 5 runs",
            ),
        ),
        (
            tasks > 1 and runs > 1,
            EncoreError(
                f"--runs {runs} in an array of {tasks} tasks",
                expected="one of them: every array task is a run",
                hint="omit --runs, or submit without --array",
            ),
        ),
        (
            seed is not None and not 0 <= seed < 2**31,
            EncoreError(f"--seed {seed}", expected="0 to 2147483647"),
        ),
    )
    check_gpus(1 if gpus is None else gpus)
    for is_refused, error in refusals:
        if is_refused:
            raise error


def checks(plan: Plan) -> list[preflight.Check]:
    """Return a plan's preflight checks. A toy data set that the run prepares may be missing."""
    creates_data = plan.makes_small_data and not (plan.data / "dataset.json").exists()
    results = [preflight.Check("WARN", "toy data set", plan.toy_data_set)] if plan.toy_data_set else []
    results += preflight.check_run(plan.configuration, plan.machine, plan.data, plan.results, creates_data)
    if creates_data:
        ok = preflight.Check("OK", "data set", f"the toy data set will be created in {plan.data}")
        results = [ok if check.name == "data set" else check for check in results]
        results += container_checks.check_preparation(plan.target, plan.configuration.choice)
    folders = [plan.data, plan.results]
    # Horovod controller for the launcher: srun provides PMIx, which needs MPI. On one node both controllers work.
    needed = "MPI" if plan.allocation is not None else ""
    if plan.hosts:
        needed = "MPI" if plan.launcher == "mpirun" else "Gloo"
    horovod = container_checks.check_horovod(plan.target, plan.configuration, needed)
    results = [*container_checks.check(plan.target, plan.configuration, plan.machine, folders), *horovod, *results]
    if plan.hosts:
        mpi = multi_host.check_mpi(plan.launcher) if plan.target.python is None else []
        return [*multi_host.local_checks(plan.hosts, plan.launcher, plan.target.runtime), *mpi, *results]
    if plan.configuration.nodes > 1 and plan.allocation is None:
        hint = (
            f"give the GPUs of one node, {plan.configuration.ranks_per_node}, or submit it: "
            f"sbatch -N {plan.configuration.nodes} slurm/run.sub {plan.configuration.choice.name}"
        )
        results.insert(0, preflight.Check("FAIL", "nodes", f"{plan.configuration.nodes} nodes requested", hint))
    return results


def query_python(plan: Plan, start: bool = True) -> Plan:
    # Add the answer of the run's Python to the plan. Images are only started if ``start`` is set.
    gpus = plan.configuration.ranks_per_node if plan.configuration.get("device") == "gpu" else 0
    outer = step.one_task_per_node(1) if plan.target.runtime == "pyxis" else ()
    choice = plan.configuration.choice
    return replace(plan, target=runtimes.query_python(plan.target, choice, plan.extra_environment, gpus, start, outer))


def refuse(plan: Plan) -> list[preflight.Check]:
    results = checks(plan)
    preflight.refuse_failed(results)
    return [check for check in results if check.level == "WARN"]


def plan_of(folder: run_folder.RunFolder, allocation: Allocation | None = None, in_pods: bool = False) -> Plan:
    """Restore the plan of an existing run from its metadata; the Slurm job defaults to this process's job."""
    content = folder.metadata()
    kubernetes = content.get("kubernetes")
    if kubernetes and not in_pods:
        raise EncoreError(f"{folder.path.name} was submitted to Kubernetes", hint=hints.resume(folder.path))
    choice = catalogue.choose(content["name"])
    system = catalogue.find_system(choice, content["system"], content["round"])
    stored = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in files.read_json(folder.path / "config.json").items()
    }
    if set(stored) != set(configurations.field_types(choice.folder)):
        raise EncoreError(
            f"{folder.path} was created by a version of Encore with different configuration keys",
            hint=f"check out commit {content['code']['commit']} to resume it, or start a new run",
        )
    configurations.config_class(choice.folder)(**stored)
    resolved = Configuration(
        choice=choice,
        system=system,
        nodes=content["nodes"],
        ranks_per_node=content["ranks_per_node"],
        values={
            name: configurations.Value(value, content["configuration"][name]["origin"])
            for name, value in stored.items()
        },
        deviations=tuple(configurations.Deviation(**entry) for entry in content["deviations"]),
    )
    machine = node.this_node()
    image = content["image"]["name"] if content["image"] else None
    python = Path(content["python"]["file"]) if content.get("python") else None
    host_list = tuple(Host(**entry) for entry in content.get("hosts", ()))
    if not host_list and not kubernetes:
        allocation = allocation or queue.this_allocation(os.environ)
        # Batch size and data sharding depend on the number of nodes.
        available = len(allocation.nodes) if allocation is not None else 1
        if content["nodes"] > available:
            raise EncoreError(
                f"the run started on {content['nodes']} nodes, {available} available here",
                hint=f"resume it through Slurm: {hints.command('submit', '--resume', folder.path.absolute())}",
            )
    cluster, _ = clusters.load()
    return Plan(
        configuration=resolved,
        machine=machine,
        data=Path(content["data"]["folder"]),
        makes_small_data=False,
        results=folder.path.parent,
        seeds=tuple(content["seeds"]),
        extra_environment=run_metadata.restore(content["extra_environment"], hints.resume(folder.path)),
        drop_caches=content["drop_caches"],
        target=Target(runtime="kubernetes", image=image or "")
        if kubernetes
        else runtimes.choose(content["runtime"], choice, machine, resolved.get("device"), image, python=python),
        allocation=allocation,
        cluster=cluster,
        hosts=host_list,
        launcher=content.get("launcher", ""),
        pods=Pods(
            settings=Kubernetes.model_validate(kubernetes["settings"]),
            kind=kubernetes["kind"],
            nodes=content["nodes"],
            seconds=kubernetes["seconds"],
            restarts=cluster.max_requeues,
            prepares=tuple(kubernetes["prepares"]),
        )
        if kubernetes
        else None,
    )
