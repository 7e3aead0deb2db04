"""``encore images``: the NGC catalogue, and building and testing the images that runs use."""

from typing import Annotated, Literal

import typer

from encore import catalogue
from encore.cli import options
from encore.cli.layout import console, show, write_json
from encore.containers import building, compatibility, engines, images
from encore.containers.engines import Engine
from encore.errors import EncoreError, ExitCode
from encore.machine import node
from encore.machine.node import Gpu
from encore.run import image_test


def list_(as_json: options.Json = False) -> None:
    """List the NGC images, and whether this machine's GPUs and driver can run them.

    Examples:

      encore images list

      encore images list --json
    """
    available, gpus, lock = images.catalogue(), node.gpus(), images.read_lock()
    if as_json:
        content = [
            {
                **release.model_dump(),
                "reference": release.reference,
                "digest": lock[release.reference]["digest"] if release.reference in lock else None,
                "here": _verdict(release, gpus),
            }
            for release in available.release
        ]
        write_json("images", {"releases": content, "submitted": available.submitted})
        return
    screen = console()
    defaults = set(available.default.items())
    rows = (
        (
            f"{entry.framework}:{entry.tag}" + (" (default)" if (entry.framework, entry.release) in defaults else ""),
            _contents(entry),
            ", ".join(entry.architectures),
            entry.driver,
            _verdict(entry, gpus),
        )
        for entry in available.release
    )
    show(screen, "NGC images", ("image", "contents", "GPUs", "driver", "here"), rows)
    submitted_rows = (
        (
            entry.round,
            entry.benchmark,
            images.find_release(entry.framework, entry.release).tag,
            images.find_release(entry.framework).tag,
            entry.why,
        )
        for entry in available.submitted
    )
    title = "bases of submissions and of this version"
    show(screen, title, ("round", "benchmark", "submitted on", "today", "why"), submitted_rows)
    screen.print("empty: no source states it; sources: encore images list --json")


def _contents(release: images.Release) -> str:
    fields = {
        release.framework: release.framework_version,
        "Python": release.python,
        "CUDA": release.cuda,
        "DALI": release.dali,
        "Horovod": release.horovod,
        "NCCL": release.nccl,
    }
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value)


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


def build(
    benchmark: options.Benchmark,
    base: Annotated[str | None, typer.Option(help="Release such as 24.06, or standin; default: today's.")] = None,
    base_only: Annotated[
        bool,
        typer.Option("--base-only", help="Only the base: pull it and record the digest, or build the stand-in."),
    ] = False,
    accept: Annotated[bool, typer.Option("--accept", help="Replace the digest in images.lock.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Build even if this machine cannot run the image.")] = False,
    engine: options.Engine = None,
) -> None:
    """Build the image of a benchmark. The digest of its base is recorded in images.lock and enforced afterwards.

    With --base standin: use a CPU base with the interface of NGC's image, built with --base-only.

    Examples:

      encore images build resnet

      encore images build resnet --base-only --accept               record a new digest of the base

      encore images build resnet --base standin --base-only
    """
    choice, used = catalogue.choose(benchmark), _engine(engine)
    framework = choice.implementation.framework
    if base_only and base == images.STANDIN:
        typer.echo(f"built {building.build_standin(used, framework, _echo)}")
        return
    if base_only or accept:
        release = images.find_release(framework, base)
        building.check_release(choice, release, force)
        typer.echo(f"{release.reference} is pinned to {building.pull(used, release, _echo, accept)}")
    if not base_only:
        name = building.build(choice, used, base or None, force, _echo)
        typer.echo(f"built {name}; run it with: ./run.sh {choice.name} GPUS")


def convert(
    benchmark: options.Benchmark,
    runtime: Annotated[Literal["apptainer", "enroot"], typer.Option(help="Runtime of the image file.")],
    dry_run: options.DryRun = False,
) -> None:
    """Make the image file that Apptainer or Enroot runs, from Docker's image.

    Examples:

      encore images convert resnet --runtime apptainer
    """
    choice = catalogue.choose(benchmark)
    command = building.convert_command(choice, runtime, runtime if dry_run else engines.find(runtime))
    if dry_run:
        typer.echo(" ".join(command))
    else:
        building.image_file(choice, runtime).parent.mkdir(parents=True, exist_ok=True)
        building.must(command, _echo, f"{choice.name} could not be converted")


def test(benchmark: options.Benchmark, engine: options.Engine = None) -> None:
    """Check an image: imports, versions, user, labels, manifest, and a short training in it.

    Examples:

      encore images test resnet --engine podman
    """
    choice, used = catalogue.choose(benchmark), _engine(engine)
    failed = False
    for name, problem in image_test.run(choice, used):
        typer.echo(f"{'FAIL' if problem else 'OK  '} {name}{': ' + problem if problem else ''}")
        failed |= bool(problem)
    raise typer.Exit(ExitCode.FAILED if failed else ExitCode.REACHED)


def _engine(name: str | None) -> Engine:
    # The given engine, else the first that responds
    if name:
        return engines.connect(name)
    problems = []
    for candidate in engines.BUILDERS:
        try:
            return engines.connect(candidate)
        except EncoreError as error:
            problems.append(error)
    # An installed engine that does not respond is a more useful error than a missing one.
    raise min(problems, key=lambda problem: " on PATH" in problem.found)


def _echo(line: str) -> None:
    typer.echo(line, err=True)


HELP = "List, build, test and convert container images."
GROUP = {"list": list_, "build": build, "test": test, "convert": convert}
