"""``encore images``: the NGC catalogue, and building, testing and removing the images that runs use."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from encore import catalogue
from encore.cli import options
from encore.cli.layout import console, plain_table, print_fitted, write_json
from encore.containers import building, compatibility, engines, images, standins
from encore.containers.engines import Engine
from encore.errors import EncoreError, ExitCode
from encore.machine import node
from encore.machine.node import Gpu
from encore.run import image_test

AnywayOption = Annotated[bool, typer.Option("--anyway", help="Though this machine cannot run it.")]
LIST_EPILOG = """
Examples:

  encore images list

  encore images list --json
"""
PIN_EPILOG = "Examples:\n\n  encore images pin resnet"
BUILD_EPILOG = "Examples:\n\n  encore images build resnet --base standin"
STANDIN_EPILOG = "Examples:\n\n  encore images standin pytorch"
CONVERT_EPILOG = "Examples:\n\n  encore images convert resnet --to apptainer"


def register(app: typer.Typer) -> None:
    """Add ``images`` with its commands to the command line."""
    group = typer.Typer(help="List, pin, build, test and remove container images.", no_args_is_help=True)
    group.command("list", epilog=LIST_EPILOG)(list_)
    group.command("pin", epilog=PIN_EPILOG)(pin)
    group.command("build", epilog=BUILD_EPILOG)(build)
    group.command("standin", epilog=STANDIN_EPILOG)(standin)
    group.command("convert", epilog=CONVERT_EPILOG)(convert)
    group.command("push")(push)
    group.command("shell")(shell)
    group.command("test")(test)
    group.command("clean")(clean)
    app.add_typer(group, name="images")


def list_(as_json: options.Json = False) -> None:
    """Show the NGC catalogue, and what this machine's GPUs and driver can run."""
    known, gpus, lock = images.catalogue(), node.gpus(), images.read_lock()
    if as_json:
        content = [
            {
                **release.model_dump(),
                "reference": release.reference,
                "digest": lock.get(release.reference, {}).get("digest"),
                "here": _verdict(release, gpus),
            }
            for release in known.release
        ]
        submitted = [entry.model_dump() for entry in known.submitted]
        write_json({"releases": content, "submitted": submitted})
        return
    screen = console()
    table = plain_table("NGC images", "image", "what it holds", "GPUs", "driver", "here")
    for release in known.release:
        default = known.default.get(release.framework) == release.release
        table.add_row(
            f"{release.framework}:{release.tag}" + ("\n(default)" if default else ""),
            _contents(release),
            ", ".join(release.architectures),
            release.driver,
            _verdict(release, gpus),
        )
    print_fitted(screen, table)
    _print_submitted(screen, known)
    screen.print("empty: no source states it; sources: encore images list --json")


def _contents(release: images.Release) -> str:
    facts = {
        release.framework: release.framework_version,
        "Python": release.python,
        "CUDA": release.cuda,
        "DALI": release.dali,
        "Horovod": release.horovod,
        "NCCL": release.nccl,
    }
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value)


def _verdict(release: images.Release, gpus: tuple[Gpu, ...]) -> str:
    if not gpus:
        return "no GPU"
    checks = [
        c
        for gpu in gpus
        for c in (compatibility.check_architecture(release, gpu), compatibility.check_driver(release, gpu))
    ]
    for level, word in (("FAIL", "no"), ("WARN", "unknown")):
        names = [check.name for check in checks if check.level == level]
        if names:
            return f"{word}: {names[0]}"
    return "yes"


def _print_submitted(screen: Console, known: images.Images) -> None:
    title = "submitted bases, and what is used today"
    table = plain_table(title, "round", "benchmark", "submitted on", "today", "why")
    for entry in known.submitted:
        submitted = images.find_release(entry.framework, entry.release)
        today = images.find_release(entry.framework)
        table.add_row(entry.round, entry.benchmark, submitted.tag, today.tag, entry.why)
    print_fitted(screen, table)


def pin(
    benchmark: options.Benchmark,
    base: Annotated[str | None, typer.Option(help="Release; default: the catalogue's.")] = None,
    engine: options.Engine = None,
    anyway: AnywayOption = False,
    accept: Annotated[bool, typer.Option("--accept", help="Replace the recorded digest.")] = False,
) -> None:
    """Pull a benchmark's base and record its digest in images.lock."""
    choice = catalogue.choose(benchmark)
    release = images.find_release(choice.implementation.framework, base)
    used = _engine(engine)
    building.pass_gate(choice, release, anyway)
    digest = building.pull(used, release, _echo, accept)
    typer.echo(f"{release.reference} is held to {digest}")


def build(
    benchmark: options.Benchmark,
    base: Annotated[str | None, typer.Option(help="Release such as 24.06, or standin.")] = None,
    engine: options.Engine = None,
    anyway: AnywayOption = False,
) -> None:
    """Build a benchmark's image on its base."""
    choice = catalogue.choose(benchmark)
    name = building.build(choice, _engine(engine), base or None, anyway, _echo)
    typer.echo(f"built {name}; run it with: ./run.sh {choice.name} GPUS")


def standin(
    framework: Annotated[str | None, typer.Argument(help="Such as pytorch; default: the first.")] = None,
    engine: options.Engine = None,
) -> None:
    """Build the CPU base that stands in for a framework's NGC image."""
    typer.echo(f"built {standins.build(_engine(engine), framework, _echo)}")


def convert(
    benchmark: options.Benchmark,
    to: Annotated[str, typer.Option(help="apptainer or enroot.")],
    dry_run: options.DryRun = False,
) -> None:
    """Make the image file that Apptainer or Enroot runs, from Docker's image."""
    choice = catalogue.choose(benchmark)
    if to not in ("apptainer", "enroot"):
        raise EncoreError(f"--to {to}", expected="apptainer or enroot")
    command = building.convert_command(choice, to, to if dry_run else engines.find(to))
    if dry_run:
        typer.echo(" ".join(command))
        return
    building.image_file(choice, to).parent.mkdir(parents=True, exist_ok=True)
    building.must(command, _echo, f"{choice.name} could not be converted")


def push(
    benchmark: options.Benchmark,
    registry: Annotated[str, typer.Option(help="Registry and folder to push to.")] = "",
    engine: options.Engine = None,
) -> None:
    """Push a benchmark's image to a registry of yours."""
    choice = catalogue.choose(benchmark)
    typer.echo(f"pushed {building.push(choice, _engine(engine), registry, _echo)}")


def shell(benchmark: options.Benchmark, engine: options.Engine = None) -> None:
    """Open a shell in a benchmark's image."""
    choice, used = catalogue.choose(benchmark), _engine(engine)
    if engines.inspect(used, building.image_name(choice)) is None:
        raise building.not_built(choice, used.name)
    terminal = ["--tty"] if sys.stdin.isatty() else []
    given = ["--rm", "--interactive", *terminal, *engines.gpu_options(used)]
    command = [used.program, "run", *given, building.image_name(choice), "/bin/bash"]
    os.execvp(command[0], command)


def test(benchmark: options.Benchmark, engine: options.Engine = None) -> None:
    """Check an image: imports, versions, user, labels, manifest, and a short training in it."""
    choice, used = catalogue.choose(benchmark), _engine(engine)
    failed = 0
    for name, problem in image_test.run(choice, used):
        typer.echo(f"{'FAIL' if problem else 'OK  '} {name}{': ' + problem if problem else ''}")
        failed += bool(problem)
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def clean(engine: options.Engine = None) -> None:
    """Remove every image that was built here; NGC's own stay."""
    for name in building.clean(_engine(engine)):
        typer.echo(f"removed {name}")


def _engine(name: str | None) -> Engine:
    """Return the engine that was named, else the first that answers."""
    if name:
        if name not in engines.BUILDERS:
            raise EncoreError(f"{name} does not build images", expected="docker or podman")
        return engines.connect(name)
    problems = []
    for candidate in engines.BUILDERS:
        try:
            return engines.connect(candidate)
        except EncoreError as error:
            problems.append(error)
    # The engine that is there but does not answer is nearer to the user's trouble than the one that is not.
    here = [error for error in problems if " on PATH" not in error.found]
    raise (here or problems)[0]


def _echo(line: str) -> None:
    typer.echo(line, err=True)
