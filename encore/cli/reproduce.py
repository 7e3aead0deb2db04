"""``encore reproduce``: from a published folder to the command that runs it here."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import markup
from rich.console import Console
from typing_extensions import TypedDict

from encore import configuration
from encore.cli import options, schemas
from encore.cli.layout import console, limited_lines, say, show, text, write_json
from encore.containers import images
from encore.errors import EncoreError, ExitCode
from encore.lab.submissions.reproduction import (
    Difference,
    Reproduction,
    UnmappedOption,
    command,
    reproduce_log,
    write_system,
)
from encore.lab.submissions.reproduction import reproduce as read_configuration
from encore.lab.submissions.reproduction import start as start_command
from encore.lab.submissions.safe_eval import NoValueError
from encore.lab.submissions.shell_expansion import Note
from encore.lab.submissions.source import Source, configuration_name, open_source
from encore.results.format import count_of
from encore.results.logs.reader import has_mark
from encore.run import hints

MAX_LINES = 40  # Printed lines without --all


def escape(value: object) -> str:
    """Return a text from a published folder without markup and control codes."""
    return markup.escape(text(value).plain)


class MappedKey(TypedDict):
    value: Any
    options: tuple[str, ...]  # Of the submitted command
    variables: list[str]  # Variables in the published scripts, or the line of a log
    origin: str  # "command", or "code" for defaults in the submitted code
    meaning: str


class ReproductionJson(TypedDict):
    """A published configuration and the equivalent Encore configuration."""

    configuration: str
    folder: str
    round: str | None
    benchmark: str | None
    implementation: str
    checked: bool  # Whether the mapping was checked with this round
    nodes: int
    gpus_per_node: int
    keys: dict[str, MappedKey]
    missing: dict[str, str]  # Keys without a value, with the reason
    assumed: dict[str, Any]  # Keys that a log does not have, with the values of the nearest system
    environment: dict[str, dict[str, str]]  # Variables of the ranks, by script
    without_counterpart: tuple[UnmappedOption, ...]
    not_understood: tuple[Note, ...]
    base_image: str  # Base image of the submitted Dockerfile
    base_image_now: str
    why: str  # Reason for a different base image
    equals: str  # Identical system of Encore; empty if none
    nearest: str
    differences: tuple[Difference, ...]  # From the nearest system
    refused: str  # Reason why there is no command; empty if there is one
    command: list[str]
    alternative: list[str]  # Command of the nearest system, if the options cannot be mapped


class NotUnderstood(TypedDict):
    """A configuration that could not be parsed."""

    configuration: str
    not_understood: str


def reproduce(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Implementation folder, config_*.sh, result folder or log in an MLPerf results repository.",
        ),
    ],
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="NAME", help="Configuration name if SOURCE has more than one, e.g. DGXA100."),
    ] = None,
    round_name: options.Round = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes, if not set in the configuration.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs per node, if not set in the configuration.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the configuration as a system file.")
    ] = None,
    data_folder: options.Data = None,
    everything: Annotated[bool, typer.Option("--all", help=f"Print everything, not only {MAX_LINES} lines.")] = False,
    start: Annotated[bool, typer.Option("--run", help="Run the generated command.")] = False,
    as_json: options.Json = False,
) -> None:
    """Convert a published MLPerf configuration to an Encore command.

    Examples:

      encore reproduce training_results_v0.7/NVIDIA/benchmarks/resnet/implementations/mxnet

      encore reproduce training_results_v0.7/NVIDIA/benchmarks/resnet/implementations/mxnet/config_DGXA100.sh

      encore reproduce training_results_v0.7.zip/NVIDIA/benchmarks/bert/implementations/pytorch --config DGX1_1x8x6x6

      encore reproduce training_results_v0.7/NVIDIA/results/dgxa100_ngc20.06_mxnet/resnet

      encore reproduce training_results_v5.1/NVIDIA/results/tyche_ngpu8_ngc25.09_nemo/llama31_8b/result_0.txt

      encore reproduce .../ssd/implementations/pytorch/config_OURS.sh -o ours.toml

      encore reproduce .../resnet/implementations/mxnet/config_DGXA100.sh --data /data/imagenet --run

    The scripts in the folder are parsed, not executed. See docs/reproduce.md.
    """
    known_round = options.known_round(round_name)
    configurations: list[Reproduction | NotUnderstood]
    if source.is_file() and has_mark(source):
        from_log = reproduce_log(source, known_round, nodes, gpus_per_node)
        opened, configurations = from_log.source, [from_log]
    else:
        opened = open_source(source, config, known_round)
        configurations = [_read(opened, file, nodes, gpus_per_node) for file in opened.configurations]
    read = [entry for entry in configurations if isinstance(entry, Reproduction)]
    if len(configurations) > 1 and (start or output):
        listed = [configuration_name(file) for file in opened.configurations]
        flags = ["--run"] if start else ["-o", str(output)]
        raise EncoreError(
            f"{flags[0]} with {len(listed)} configurations",
            expected=f"one of {', '.join(listed)}",
            hint=hints.command("reproduce", source, "--config", listed[0], *flags),
        )
    if as_json:
        entries = [
            _as_json(entry, data_folder) if isinstance(entry, Reproduction) else entry for entry in configurations
        ]
        write_json("reproduction", entries)
    else:
        screen = console()
        with limited_lines(screen, None if everything else MAX_LINES):
            if len(configurations) == 1 and read:
                _print(screen, read[0], data_folder)
            else:
                _print_overview(screen, opened, configurations, data_folder)
    if not read:
        raise EncoreError(f"no configuration of {source} is understood", expected="shell variable assignments")
    if output:
        write_system(read[0], output)
        if (choice := read[0].choice) and (system := read[0].system):
            place = f"in a systems folder of benchmarks/{choice.folder.parent.name}"
            words = f"written: {output}; {place} it is --system {system.system} --round {system.round}"
            say(console(), escape(words))
    if start:
        argv = command(read[0], data_folder)
        if not argv or read[0].missing:
            reason = read[0].refused or "keys without a value: " + ", ".join(read[0].missing)
            raise EncoreError(f"{read[0].name} cannot be run here: {reason}", expected="a configuration that maps")
        done = subprocess.run([sys.executable, "-m", "encore.cli.app", *argv], check=False)
        if done.returncode:
            raise typer.Exit(done.returncode if done.returncode > 0 else ExitCode.FAILED)


def _read(opened: Source, file: str, nodes: int | None, gpus: int | None) -> Reproduction | NotUnderstood:
    try:
        return read_configuration(opened, file, nodes, gpus)
    except NoValueError as error:
        return {"configuration": configuration_name(file), "not_understood": str(error)}


def _standing(reproduction: Reproduction) -> str:
    if reproduction.equals and reproduction.nearest:
        return f"is the system {reproduction.nearest.system}, {reproduction.nearest.round}"
    if reproduction.refused:
        return reproduction.refused
    if reproduction.missing:
        return f"{count_of(len(reproduction.missing), 'key')} without a value"
    if reproduction.nearest is None:
        return "no system to compare with"
    nearest = reproduction.nearest
    return f"{count_of(len(reproduction.differences), 'difference')} from {nearest.system}, {nearest.round}"


def _print_overview(
    screen: Console, opened: Source, configurations: Sequence[Reproduction | NotUnderstood], data: Path | None
) -> None:
    say(screen, f"[bold]{escape(opened.shown)}[/], round {opened.round or 'not known'}")
    alternatives = dict.fromkeys(
        tuple(_alternative(entry, data)) for entry in configurations if isinstance(entry, Reproduction)
    )
    for argv in filter(None, alternatives):
        _print_command(screen, argv, "a system of Encore to run instead")
    columns = ("configuration", "nodes x GPUs", "keys", "omitted", "unknown", "in Encore")
    rows: list[tuple[object, ...]] = [
        (entry["configuration"], *[""] * 4, entry["not_understood"])
        if isinstance(entry, dict)
        else (
            entry.name, _layout(entry), len(entry.mapped), len(entry.known_left), len(entry.unknown_left),
            _standing(entry),
        )
        for entry in configurations
    ]  # fmt: skip
    show(screen, "", columns, rows, least=("unknown", "omitted"))
    say(screen, "omitted: options and variables without an equivalent; --config NAME explains them")


def _layout(reproduction: Reproduction) -> str:
    return f"{reproduction.nodes} x {reproduction.gpus if reproduction.gpus_are_known else '?'}"


def _alternative(reproduction: Reproduction, data: Path | None) -> list[str]:
    if reproduction.alternative is None:
        return []
    choice, system = reproduction.alternative
    return start_command(choice, system.system, system, data)


def _print_command(screen: Console, argv: Sequence[str], label: str) -> None:
    say(screen, f"{label}:")
    screen.print(hints.command(*argv), markup=False, highlight=False, soft_wrap=True)


# The command first, then everything that may make it wrong, then tables.
def _print(screen: Console, reproduction: Reproduction, data: Path | None) -> None:
    say(screen, f"[bold]{escape(reproduction.source.shown)}, configuration {escape(reproduction.name)}[/]")
    title = (
        reproduction.implementation.title
        if reproduction.implementation
        else reproduction.benchmark or "not a benchmark of Encore"
    )
    assumed = f" ({reproduction.system.round} is assumed; --round sets it)" if reproduction.system else ""
    say(
        screen,
        escape(f"{title}, round {reproduction.source.round or f'not known{assumed}'}, {_layout(reproduction)} GPUs"),
    )
    if argv := command(reproduction, data):
        _print_command(screen, argv, "command")
    _print_system(screen, reproduction)
    if argv := _alternative(reproduction, data):
        _print_command(screen, argv, "a system of Encore to run instead")
    if reproduction.assumed and reproduction.nearest:
        values = ", ".join(f"{key}={json.dumps(value)}" for key, value in reproduction.assumed.items())
        say(screen, escape(f"not in the log, from {reproduction.nearest.system}: {values}"))
    for key, explanation in reproduction.missing.items():
        say(screen, f"[yellow]no value[/] for {key}: {escape(explanation)}")
    for note in reproduction.notes:
        say(screen, f"[yellow]not understood[/] {escape(note)}")
    then, now, explanation = _images(reproduction)
    for title, image, reason in (("base image then: ", then, ""), ("base image now:  ", now, explanation)):
        if image:
            say(screen, escape(f"{title}{image}{f' ({reason})' if reason else ''}"))
    if reproduction.mapped:
        settings = reproduction.system.config if reproduction.system else {}
        mapped = (
            (
                mapping.key,
                settings.get(mapping.key, mapping.value),
                " ".join(dict.fromkeys(mapping.options)) or "none: the submitted code's",
                " ".join(sorted(mapping.sources)),
            )
            for mapping in sorted(reproduction.mapped, key=lambda mapping: mapping.origin == "code")
        )
        show(screen, "what maps", ("key", "value", "option", "variables"), mapped, least=("variables",))
        variables = [
            (name, value, file)
            for file, file_variables in reproduction.environment.items()
            for name, value in file_variables.items()
        ]
        if variables:
            show(screen, "environment of the ranks", ("variable", "value", "from"), variables)
    if reproduction.left:
        rows = (
            (
                leftover.name,
                leftover.value if len(leftover.value) <= 40 else f"{leftover.value[:37]}...",
                leftover.meaning or text("not known", "yellow"),
            )
            for leftover in reproduction.left
        )
        show(screen, "no counterpart", ("option or variable", "value", "what that means"), rows)


def _images(reproduction: Reproduction) -> tuple[str, str, str]:
    """Return the submitted base image, the current one, and the reason for the difference."""
    if reproduction.choice is None:
        return reproduction.base, "", ""
    key = reproduction.source.round, reproduction.choice.benchmark.name
    reason = next((s.why for s in images.catalogue().submitted if (s.round, s.benchmark) == key), "")
    return reproduction.base, images.find_release(reproduction.choice.implementation.framework).reference, reason


def _print_system(screen: Console, reproduction: Reproduction) -> None:
    if reproduction.refused:
        say(screen, f"[yellow]no command[/]: {escape(reproduction.refused)}")
        return
    if reproduction.equals and reproduction.nearest:
        say(
            screen,
            f"[green]equals[/] the system {reproduction.nearest.system} of {reproduction.nearest.round}, "
            + ("in the keys of the log" if reproduction.assumed else "key by key"),
        )
    else:
        say(screen, f"[yellow]{_standing(reproduction)}[/]; the command sets them; -o FILE writes a system file")
        for difference in reproduction.differences:
            say(
                screen,
                escape(f"  {difference.name}: {difference.published!r} published, {difference.ours!r} in the system"),
            )
    if reproduction.choice and reproduction.system:
        for key, weights in reproduction.choice.benchmark.submitted_weights(reproduction.system.round).items():
            files = " and ".join((weights.file, *weights.also))
            say(screen, escape(f"{key}: {weights.title}: put {files} into the data folder"))
    if (
        reproduction.source.round
        and not reproduction.is_checked
        and reproduction.system
        and reproduction.implementation
    ):
        rules, checked = reproduction.system.round, ", ".join(reproduction.implementation.checked)
        parts = [f"trained, logged and checked by the rules of {rules}"] if rules != reproduction.source.round else []
        parts += [f"the mapping was checked with {checked}"] if checked != rules or not parts else []
        say(
            screen, f"[yellow]{'; '.join(parts)}[/]: code of {reproduction.source.round} may read an option differently"
        )


def _as_json(reproduction: Reproduction, data: Path | None) -> ReproductionJson:
    (then, now, reason), choice = _images(reproduction), reproduction.choice
    meanings = schemas.meanings(configuration.config_class(choice.folder)) if choice else {}
    return {
        "configuration": reproduction.name,
        "folder": reproduction.source.shown,
        "round": reproduction.source.round,
        "benchmark": choice.name if choice else reproduction.benchmark,
        "implementation": reproduction.implementation.title if reproduction.implementation else "",
        "checked": reproduction.is_checked,
        "nodes": reproduction.nodes,
        "gpus_per_node": reproduction.gpus,
        "keys": {
            mapping.key: {
                "value": mapping.value, "options": mapping.options, "variables": sorted(mapping.sources),
                "origin": mapping.origin, "meaning": meanings.get(mapping.key, ""),
            }
            for mapping in reproduction.mapped
        },
        "missing": reproduction.missing,
        "assumed": reproduction.assumed,
        "environment": reproduction.environment,
        "without_counterpart": reproduction.left,
        "not_understood": reproduction.notes,
        "base_image": then,
        "base_image_now": now,
        "why": reason,
        "equals": reproduction.nearest.system if reproduction.equals and reproduction.nearest else "",
        "nearest": reproduction.nearest.system if reproduction.nearest else "",
        "differences": reproduction.differences,
        "refused": reproduction.refused,
        "command": ["encore", *argv] if (argv := command(reproduction, data)) else [],
        "alternative": ["encore", *argv] if (argv := _alternative(reproduction, data)) else [],
    }  # fmt: skip
