"""Arguments and options that several commands take, with the same name and help in each."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from encore.errors import EncoreError
from encore.results.rules import ROUNDS

Benchmark = Annotated[str, typer.Argument(help="Benchmark, such as resnet.")]
OptionalBenchmark = Annotated[str | None, typer.Argument(help="Benchmark, such as resnet.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a folder of logs.")]
Runs = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN...", help="Run folders, folders of logs, or trees of them."),
]

# What is run.
System = Annotated[str | None, typer.Option(help="Configuration to take, such as dgxa100.")]
Round = Annotated[str | None, typer.Option("--round", help="MLPerf round, such as v0.7.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one configuration value.")
]
Experiments = Annotated[int, typer.Option(help="Experiments, each with a new seed; of a sweep: of each point.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the first experiment; default: drawn.")]

# Where and how it runs.
Data = Annotated[Path | None, typer.Option("--data", help="Data set; default data/BENCHMARK.")]
Results = Annotated[
    Path | None, typer.Option(help="Folder of the run folders; default: the cluster file's, or results/.")
]
Environment = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME[=VALUE]", help="Pass an environment variable to the ranks."),
]
DropCaches = Annotated[
    bool | None, typer.Option(help="Drop the page cache before each run; default: not for a toy data set.")
]
HangSeconds = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="End a run in which no rank makes a step for this time, the first for 3 times this time; 0: never.",
    ),
]
StopSeconds = Annotated[
    float | None,
    typer.Option(
        min=1.0,
        envvar="ENCORE_STOP_SECONDS",
        help="Time for a checkpoint to be begun when a run is stopped; default: 8, in a Slurm job 20.",
    ),
]
Runtime = Annotated[
    str | None, typer.Option(help="auto, host, docker, podman, apptainer, enroot or pyxis; default: auto.")
]
Image = Annotated[str | None, typer.Option(help="Image to run in; default: the benchmark's that was built last.")]
Python = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Python that has the framework, for the host runtime."),
]
Hosts = Annotated[
    str | None, typer.Option("--hosts", help="Hosts to reach by ssh, with GPUs: n1:4,n2:4; this one first.")
]
Cluster = Annotated[Path | None, typer.Option(help="Cluster file; see docs/slurm.md.")]
Engine = Annotated[Literal["docker", "podman"] | None, typer.Option(help="Default: the first that answers.")]
Resume = Annotated[Path | None, typer.Option(help="Resume what is in this folder.")]
TrustOwner = Annotated[bool, typer.Option("--trust-owner", help="Allow a run folder of another user.")]

# What it is compared with.
Logs = Annotated[
    Path | None,
    typer.Option("--logs", metavar="DIR", help="Folder of submitted logs, used where it holds the submission's."),
]
Baseline = Annotated[
    str | None,
    typer.Option("--baseline", metavar="SYSTEM", help="System that scores are relative to, as the tables name it."),
]

# What comes out.
Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to write to.")]
OptionalOutput = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="DIR", help="Folder to write to; default: nothing is written.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done and do nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Csv = Annotated[bool, typer.Option("--csv", help="Write CSV instead of a table.")]
Format = Annotated[
    Literal["text", "json", "sarif", "junit"],
    typer.Option("--format", help="sarif: for code scanning; junit: for CI servers; json: as --json."),
]


# Settings of a command that hands on the options which it does not know.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def one_format(**formats: bool) -> None:
    given = [f"--{name}" for name, chosen in formats.items() if chosen]
    if len(given) > 1:
        raise EncoreError(f"{' and '.join(given)} at once", expected="one output format", hint="give one of them")


def one_form(format_: str, as_json: bool) -> str:
    # The chosen form of what is printed; ``--json`` is the short form of one.
    one_format(**{"json": as_json, f"format {format_}": format_ not in ("text", "json")})
    return "json" if as_json else format_


def known_round(name: str | None) -> str | None:
    if name is None:
        return None
    found = f"v{name.lower().removeprefix('v')}"
    if found not in ROUNDS:
        raise EncoreError(f"there is no round {name!r}", expected=", ".join(ROUNDS), hint="name one of these")
    return found


def numbers(option: str, given: str) -> tuple[int, ...]:
    # ``1,2,4`` as numbers; EncoreError for anything but whole numbers from 1 on.
    with suppress(ValueError):
        found = tuple(int(part) for part in given.split(","))
        if min(found) >= 1:
            return found
    raise EncoreError(f"{option} {given}", expected="whole numbers from 1 on, such as 1,2,4", hint=f"{option} 1,2,4")


def as_path(given: Any) -> Path | None:
    return None if given is None else Path(given)


def given(context: typer.Context) -> set[str]:
    """Return the names of the parameters that the command line or the environment gives."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return {name for name, source in sources if source is not None and source.name != "DEFAULT"}
