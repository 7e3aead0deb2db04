"""``encore doctor``: what this machine has, and what of it is missing or in the way."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from encore import catalogue, environment, paths
from encore.cli import options
from encore.cli.layout import console, write_json
from encore.cli.run import print_checks
from encore.containers import engines
from encore.errors import EncoreError, ExitCode
from encore.files import existing
from encore.machine import node, preflight
from encore.machine.preflight import Check, Level
from encore.slurm import cluster_check as slurm_doctor

DOCTOR_EPILOG = """
Examples:

  encore doctor

  encore doctor --json

  encore doctor --cluster                                   on a login node of a Slurm cluster

  encore doctor --cluster-file slurm/cluster.example.toml
"""


def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the Slurm cluster and cluster.toml instead.")
    ] = False,
    cluster_file: Annotated[
        Path | None, typer.Option("--cluster-file", help="Cluster file; default: the one at its usual place.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check this machine; exit code 2 if something makes every run impossible."""
    machine = node.this_node()
    if cluster or cluster_file is not None:
        _report(machine, slurm_doctor.check(cluster_file), as_json)
    else:
        _report(machine, _all(machine), as_json)


def _all(machine: node.Node) -> list[Check]:
    data = preflight.check_data_sets({name: paths.default_data(name) for name in catalogue.benchmarks()})
    return [*_machine(machine), *_tools(), *_engines(machine), *_environments(), *data, *_folders()]


def _report(machine: node.Node, found: list[Check], as_json: bool) -> None:
    if as_json:
        write_json({"node": machine.as_json(), "checks": [vars(each) for each in found]})
    else:
        print_checks(console(soft_wrap=True), found)
    if any(check.level == "FAIL" for check in found):
        raise typer.Exit(ExitCode.REFUSED)


def _machine(machine: node.Node) -> list[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    checks = [
        Check("OK", "system", f"{machine.operating_system}, kernel {machine.kernel}, Python {version}"),
        Check("OK", "processor", f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB"),
    ]
    if not machine.gpus:
        checks.append(Check("WARN", "GPUs", "none: ranks run on the CPU, and what they train reproduces nothing"))
    for gpu in machine.gpus:
        capability = f", compute capability {gpu.compute_capability}" if gpu.compute_capability else ""
        found = f"{gpu.index}: {gpu.name}, {gpu.memory_gib:g} GiB, driver {gpu.driver}{capability}"
        checks.append(Check("OK", "GPU", found))
    return checks


def _tools() -> list[Check]:
    checks = []
    for name, purpose in (("g++", "to compile Horovod"), ("make", "to compile Horovod")):
        path = shutil.which(name)
        level: Level = "OK" if path else "WARN"
        checks.append(Check(level, name, path or "missing", f"install it {purpose}"))
    mpi = shutil.which("mpicc")
    checks.append(Check("OK", "MPI", mpi or "none: Horovod is compiled with Gloo alone"))
    sbatch = shutil.which("sbatch")
    if sbatch:
        checks.append(Check("OK", "sbatch", sbatch))
    return checks


def _engines(machine: node.Node) -> list[Check]:
    checks = []
    for name in engines.ENGINES:
        if not engines.programs(name):
            continue
        try:
            engine = engines.connect(name)
        except EncoreError as error:
            checks.append(Check("WARN", name, error.found, error.remedy))
            continue
        if machine.gpus and engine.gpu_access is None:
            checks.append(Check("WARN", name, "cannot hand GPUs to containers", engines.NO_TOOLKIT))
        else:
            checks.append(Check("OK", name, engine.program + (", rootless" if engine.rootless else "")))
    return checks


def _environments() -> list[Check]:
    checks = []
    for framework in sorted({choice.implementation.framework for choice in catalogue.choices().values()}):
        try:
            made = environment.describe(framework)
        except EncoreError as error:
            checks.append(Check("WARN", f"{framework} environment", error.found, error.remedy))
            continue
        if made.is_ready:
            checks.append(Check("OK", f"{framework} environment", str(made.folder)))
        else:
            checks.append(Check("OK", f"{framework} environment", "will be made by the first run"))
    return checks


def _folders() -> list[Check]:
    checks = []
    for name, folder in (("cache", paths.cache_folder()), ("results", paths.default_results())):
        there = existing(folder)
        free = shutil.disk_usage(there).free / 2**30
        if not os.access(there, os.W_OK):
            checks.append(Check("FAIL", name, f"{there} is not writable", "make it so, or choose another folder"))
        else:
            level: Level = "OK" if free > 5 else "WARN"
            remedy = "a framework environment needs about 3 GiB"
            checks.append(Check(level, name, f"{folder}, {free:.0f} GiB free", remedy))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    checks.append(Check("OK", "locked memory", f"limit {text}"))
    return checks
