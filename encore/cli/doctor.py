"""``encore doctor``: hardware and software of this machine, missing requirements and conflicts."""

import os
import resource
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typing_extensions import TypedDict

from encore import catalogue, environment, paths
from encore.cli import options
from encore.cli.layout import console, write_json
from encore.cli.run import print_checks
from encore.containers import engines
from encore.errors import EncoreError, ExitCode
from encore.files import existing
from encore.machine import node, node_checks, preflight
from encore.machine.preflight import Check
from encore.run import gate as gates
from encore.slurm import cluster as clusters
from encore.slurm import cluster_checks, queue
from encore.ssh import hosts


class Machine(TypedDict):
    """Hardware and software of this machine or its Slurm cluster."""

    node: node.Node
    checks: list[Check]


class NodeVerdicts(TypedDict):
    """Results of the node checks (gate) per node."""

    nodes: list[node_checks.NodeVerdict]


def doctor(
    slurm: Annotated[bool, typer.Option("--slurm", help="Check the Slurm cluster and cluster.toml instead.")] = False,
    nodes: Annotated[
        bool,
        typer.Option("--nodes", help="Check all nodes of the Slurm job or --hosts, and compare them with each other."),
    ] = False,
    host_list: options.Hosts = None,
    python: options.Python = None,
    quick: Annotated[bool, typer.Option("--quick", help="With --nodes: no GEMMs, copies and collectives.")] = False,
    disk: Annotated[
        list[Path] | None, typer.Option(help="With --nodes: folder for the disk test. Default: results folder.")
    ] = None,
    cluster: options.Cluster = None,
    as_json: options.Json = False,
) -> None:
    """Check this machine, a cluster, or the nodes of a job. Exits with 2 if a run is impossible.

    Examples:

      encore doctor

      encore doctor --json

      encore doctor --slurm                                     on a login node of a Slurm cluster

      encore doctor --slurm --cluster slurm/cluster.example.toml

      encore doctor --nodes --quick                             only this machine, 5 seconds

      salloc -N 4 encore doctor --nodes --json                  the nodes of a job

      encore doctor --nodes --hosts n1:8,n2:8
    """
    if cluster is not None and not (slurm or nodes):
        raise EncoreError("--cluster without --slurm", hint="add --slurm")
    if nodes:
        _gate(host_list, None if quick else gates.framework_python(python), quick, disk, cluster, as_json)
    if host_list is not None or python is not None or quick or disk:
        raise EncoreError("--hosts, --python, --quick or --disk without --nodes", hint="add --nodes")
    machine = node.this_node()
    checks = cluster_checks.check_cluster(cluster) if slurm else _all(machine)
    if as_json:
        write_json("doctor", Machine(node=machine, checks=checks))
    else:
        print_checks(console(soft_wrap=True), checks)
    raise typer.Exit(ExitCode.REFUSED if any(check.level == "FAIL" for check in checks) else ExitCode.REACHED)


def _gate(
    host_list: str | None,
    python: Path | None,
    quick: bool,
    disks: list[Path] | None,
    cluster_file: Path | None,
    as_json: bool,
) -> NoReturn:
    screen = console(stderr=as_json, soft_wrap=True)
    settings, _ = clusters.load(cluster_file)
    allocation = queue.this_allocation(os.environ) if host_list is None else None
    if host_list is not None:
        gate_nodes = gates.from_hosts(hosts.parse(host_list))
    else:
        gate_nodes = gates.from_job(allocation, settings) if allocation is not None else gates.this_node()
    if python is None and not quick:
        screen.print("no framework to measure with: --python FILE, or make environments")
    folders = tuple(disk.absolute() for disk in disks or [settings.results or paths.default_results()])
    verdicts = gates.check(gate_nodes, folders, python, lambda step: screen.print(f"[dim]{step}[/]"), bool(disks))
    node_checks.store(verdicts)
    if as_json:
        write_json("doctor-nodes", NodeVerdicts(nodes=verdicts))
    else:
        for node_verdict in verdicts:
            screen.print(f"{node_verdict.node}:", style="bold")
            print_checks(screen, list(node_verdict.checks))
    raise typer.Exit(ExitCode.REFUSED if any(verdict.level == "FAIL" for verdict in verdicts) else ExitCode.REACHED)


def _all(machine: node.Node) -> list[Check]:
    data = preflight.check_data_sets({name: paths.default_data(name) for name in catalogue.benchmarks()})
    runtimes = [*_engines(machine), *_environments()]
    checks = [*_machine(machine), *_tools(), *runtimes, *data, *_folders()]
    if any(check.level == "OK" for check in runtimes):
        return checks
    hint = "install Python 3.11 with venv, g++ and make, or Docker"
    return [*checks, Check("FAIL", "runtime", "neither a container engine nor a framework environment is usable", hint)]


def _machine(machine: node.Node) -> list[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    gpus = [
        f"{gpu.index}: {gpu.name}, {gpu.memory_gib:g} GiB, driver {gpu.driver}"
        + (f", compute capability {gpu.compute_capability}" if gpu.compute_capability else "")
        for gpu in machine.gpus
    ]
    return [
        Check("OK", "system", f"{machine.operating_system}, kernel {machine.kernel}, Python {version}"),
        Check("OK", "processor", f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB"),
        *(Check("OK", "GPU", gpu_label) for gpu_label in gpus),
        *([] if gpus else [Check("WARN", "GPUs", "none found: CPU ranks train toy data, not a reproduction")]),
    ]


def _tools() -> list[Check]:
    compiler, sbatch, problem = shutil.which("mpicc"), shutil.which("sbatch"), environment.mpi_problem()
    hint = "apt-get install libopenmpi-dev (Debian, Ubuntu) for the headers"
    found = f"{problem}; Horovod will be built with Gloo only" if problem else str(compiler)
    return [
        *(
            Check("OK" if path else "WARN", name, path or "missing", "install it to compile Horovod")
            for name, path in ((name, shutil.which(name)) for name in ("g++", "make"))
        ),
        Check("WARN", "MPI", found, hint) if compiler and problem else Check("OK", "MPI", found),
        *([Check("OK", "sbatch", sbatch)] if sbatch else []),
    ]


def _engines(machine: node.Node) -> list[Check]:
    checks = []
    for name in filter(engines.programs, engines.ENGINES):
        try:
            engine = engines.connect(name)
            if machine.gpus and engine.gpu_access is None:
                raise EncoreError("cannot pass GPUs to containers", hint=engines.NO_TOOLKIT)
            checks.append(Check("OK", name, engine.program + (", rootless" if engine.rootless else "")))
        except EncoreError as error:
            checks.append(Check("WARN", name, error.found, error.hint))
    return checks


def _environments() -> list[Check]:
    checks = []
    for framework in sorted({choice.implementation.framework for choice in catalogue.choices().values()}):
        try:
            planned = environment.describe(framework)
            if not planned.is_ready:
                environment.check_compiler(planned)
            state = str(planned.folder) if planned.is_ready else "not built yet; the first run builds it"
            if not planned.is_ready and environment.MINOR_VERSION.fullmatch(planned.interpreter):
                state += f" and downloads Python {planned.interpreter} with uv"
            checks.append(Check("OK", f"{framework} environment", state))
        except EncoreError as error:
            checks.append(Check("WARN", f"{framework} environment", error.found, error.hint))
    return checks


def _folders() -> list[Check]:
    checks = []
    for name, folder in (("cache", paths.cache_folder()), ("results", paths.default_results())):
        there = existing(folder)
        free = shutil.disk_usage(there).free / 2**30
        checks.append(
            Check("OK" if free > 5 else "WARN", name, f"{folder}, {free:.0f} GiB free", "an environment needs 3 GiB")
            if os.access(there, os.W_OK)
            else Check("FAIL", name, f"{there} is not writable", "change its permissions, or choose a different folder")
        )
    if (owner := paths.ROOT.stat().st_uid) != os.getuid() and not paths.IS_INSTALLED:
        hint = f"use a clone that you own, or: git config --global --add safe.directory {shlex.quote(str(paths.ROOT))}"
        problem = f"{paths.ROOT} is owned by user {owner}: git does not report its commit, and setup may fail"
        checks.append(Check("WARN", "checkout", problem, hint))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    checks.append(Check("OK", "locked memory", f"limit {text}"))
    return checks
