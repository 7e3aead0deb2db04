"""Arguments and options shared by several commands."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from encore.errors import EncoreError
from encore.results.rules import ROUNDS

Benchmark = Annotated[str, typer.Argument(help="Benchmark, e.g. resnet (see encore list).")]
OptionalBenchmark = Annotated[str | None, typer.Argument(help="Benchmark, e.g. resnet (see encore list).")]

# What to run
System = Annotated[str | None, typer.Option(help="System with the submitted configuration to use, e.g. dgxa100.")]
Round = Annotated[str | None, typer.Option("--round", help="MLPerf round, e.g. v0.7.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a configuration value. Repeatable.")
]
Experiments = Annotated[int, typer.Option(help="Number of experiments with different seeds (per point in a sweep).")]
Seed = Annotated[int | None, typer.Option(help="Seed of the first experiment. Default: random.")]

# Where and how it runs.
Data = Annotated[Path | None, typer.Option("--data", help="Data set folder. Default: data/BENCHMARK.")]
Results = Annotated[
    Path | None, typer.Option(help="Parent folder of the run folders. Default: from cluster.toml, or results/.")
]
Environment = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME[=VALUE]", help="Environment variable for the ranks. Repeatable."),
]
DropCaches = Annotated[
    bool | None, typer.Option(help="Drop the page cache before each run. Default: yes, except for toy data sets.")
]
HangSeconds = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="Stop a hanging run after this time without a step (3x for the first step). 0: never.",
    ),
]
StopSeconds = Annotated[
    float | None,
    typer.Option(
        min=1.0,
        envvar="ENCORE_STOP_SECONDS",
        show_envvar=False,  # too long for 80 columns; see docs/troubleshooting.md
        metavar="SECONDS",
        help="Grace period to start a checkpoint after a stop signal. Default: 8, in a Slurm job 20.",
    ),
]
Runtime = Annotated[
    str | None, typer.Option(help="auto, host, docker, podman, apptainer, enroot or pyxis. Default: auto.")
]
Image = Annotated[str | None, typer.Option(help="Container image. Default: the last one built for the benchmark.")]
Python = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Python interpreter with the framework, for --runtime host."),
]
Hosts = Annotated[
    str | None, typer.Option("--hosts", help="Hosts for ssh with GPU counts, this host first: n1:4,n2:4.")
]
Cluster = Annotated[Path | None, typer.Option(help="Cluster file; see docs/slurm.md.")]
Engine = Annotated[
    Literal["docker", "podman"] | None, typer.Option(help="Container engine. Default: the first that is running.")
]
Resume = Annotated[Path | None, typer.Option(help="Resume the run in this folder.")]
TrustOwner = Annotated[bool, typer.Option("--trust-owner", help="Allow a run folder that a different user owns.")]

# Comparison
Logs = Annotated[
    Path | None,
    typer.Option(
        "--logs",
        metavar="DIR",
        help="Folder with submitted logs, used instead of the built-in digests if it has the submission.",
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option("--baseline", metavar="SYSTEM", help="System that scores are relative to, as the tables name it."),
]

# Output
Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to write to.")]
OptionalOutput = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="DIR", help="Output folder. Default: no output.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the checks and commands without running them.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Csv = Annotated[bool, typer.Option("--csv", help="Write CSV instead of a table.")]
Format = Annotated[
    Literal["text", "json", "sarif", "junit"],
    typer.Option("--format", help="sarif: for code scanning; junit: for CI servers; json: as --json."),
]


# Settings of commands that forward unknown options.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def one_format(**formats: bool) -> None:
    flags = [f"--{name}" for name, is_set in formats.items() if is_set]
    if len(flags) > 1:
        raise EncoreError(
            f"{' and '.join(flags)} cannot be combined", expected="one output format", hint="use only one"
        )


def one_form(format_: str, as_json: bool) -> str:
    # Return the output format; ``--json`` is short for ``--format json``.
    one_format(**{"json": as_json, f"format {format_}": format_ not in ("text", "json")})
    return "json" if as_json else format_


def known_round(name: str | None) -> str | None:
    if name is None:
        return None
    round_name = f"v{name.lower().removeprefix('v')}"
    if round_name not in ROUNDS:
        raise EncoreError(f"unknown round {name!r}", expected=", ".join(ROUNDS), hint="choose one of these")
    return round_name


def numbers(option: str, argument: str) -> tuple[int, ...]:
    # Parse ``1,2,4``. EncoreError unless all are positive integers.
    with suppress(ValueError):
        values = tuple(int(part) for part in argument.split(","))
        if min(values) >= 1:
            return values
    raise EncoreError(f"{option} {argument}", expected="positive integers, such as 1,2,4", hint=f"{option} 1,2,4")


def given(context: typer.Context) -> set[str]:
    """Return the names of the parameters set on the command line or in the environment."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return {name for name, source in sources if source is not None and source.name != "DEFAULT"}
