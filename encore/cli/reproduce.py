"""``encore reproduce``: from a published folder to the command that runs it here."""

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
from encore.cli import options
from encore.cli.layout import console, limited_lines, say, show, text, write_json
from encore.containers import images
from encore.errors import EncoreError, ExitCode
from encore.lab.submissions.reproduction import Difference, Reproduction, UnmappedOption, command, write_system
from encore.lab.submissions.reproduction import reproduce as read_configuration
from encore.lab.submissions.reproduction import start as start_command
from encore.lab.submissions.safe_eval import NoValueError
from encore.lab.submissions.shell_expansion import Note
from encore.lab.submissions.source import Source, configuration_name, open_source
from encore.results.format import count_of
from encore.run import hints

MAX_LINES = 40  # Printed lines without --all


def escape(value: object) -> str:
    """Return a text from a published folder without markup and control codes."""
    return markup.escape(text(value).plain)


class MappedKey(TypedDict):
    value: Any
    options: tuple[str, ...]  # Of the submitted command
    variables: list[str]  # Of the scripts that they were made from
    origin: str  # command; code: the submitted code's own value, which no option changed
    meaning: str


class ReproductionJson(TypedDict):
    """A published configuration, and what of it runs here."""

    configuration: str
    folder: str
    round: str | None
    benchmark: str | None
    implementation: str
    checked: bool  # Whether the mapping was checked with this round
    nodes: int
    gpus_per_node: int
    keys: dict[str, MappedKey]
    missing: dict[str, str]  # Keys that have no value, with the reason
    environment: dict[str, dict[str, str]]  # Variables of the ranks, by the file that sets them
    without_counterpart: tuple[UnmappedOption, ...]
    not_understood: tuple[Note, ...]
    base_image: str  # That the submitted Dockerfile begins with
    base_image_now: str
    why: str  # Why it is another one
    equals: str  # The system here that it is, key by key; else empty
    nearest: str
    differences: tuple[Difference, ...]  # From the nearest system
    refused: str  # Why there is no command; else empty
    command: list[str]
    alternative: list[str]  # Command of the nearest system, if the options cannot be mapped


class NotUnderstood(TypedDict):
    """A configuration that is no assignments of a shell."""

    configuration: str
    not_understood: str


def reproduce(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Folder, config_*.sh or result folder of a results repository.")
    ],
    config: Annotated[
        str | None, typer.Option("--config", metavar="NAME", help="Of several configurations: DGXA100, for example.")
    ] = None,
    round_name: options.Round = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes, where the configuration does not say.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs of each, where the configuration does not say.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write a system file from it.")
    ] = None,
    data_folder: options.Data = None,
    everything: Annotated[bool, typer.Option("--all", help=f"Print everything, not only {MAX_LINES} lines.")] = False,
    start: Annotated[bool, typer.Option("--run", help="Run the command that is printed.")] = False,
    as_json: options.Json = False,
) -> None:
    """Read a published configuration, and show what of it runs here and how.

    Examples:

      encore reproduce training_results_v0.7/NVIDIA/benchmarks/resnet/implementations/mxnet

      encore reproduce training_results_v0.7/NVIDIA/benchmarks/resnet/implementations/mxnet/config_DGXA100.sh

      encore reproduce training_results_v0.7.zip/NVIDIA/benchmarks/bert/implementations/pytorch --config DGX1_1x8x6x6

      encore reproduce training_results_v0.7/NVIDIA/results/dgxa100_ngc20.06_mxnet/resnet

      encore reproduce .../ssd/implementations/pytorch/config_OURS.sh -o ours.toml

      encore reproduce .../resnet/implementations/mxnet/config_DGXA100.sh --data /data/imagenet --run

    Nothing of the folder is run: its scripts are read. See docs/reproduce.md.
    """
    opened = open_source(source, config, options.known_round(round_name))
    every = [_read(opened, file, nodes, gpus_per_node) for file in opened.configurations]
    read = [each for each in every if isinstance(each, Reproduction)]
    if len(every) > 1 and (start or output):
        listed = [configuration_name(file) for file in opened.configurations]
        wanted = ["--run"] if start else ["-o", str(output)]
        raise EncoreError(
            f"{wanted[0]} with {len(listed)} configurations",
            expected=f"one of {', '.join(listed)}",
            hint=hints.command("reproduce", source, "--config", listed[0], *wanted),
        )
    if as_json:
        found = [_as_json(each, data_folder) if isinstance(each, Reproduction) else each for each in every]
        write_json("reproduction", found)
    else:
        screen = console()
        with limited_lines(screen, None if everything else MAX_LINES):
            if len(every) == 1 and read:
                _print(screen, read[0], data_folder)
            else:
                _print_overview(screen, opened, every, data_folder)
    if not read:
        raise EncoreError(f"no configuration of {source} is understood", expected="assignments of a shell")
    if output:
        write_system(read[0], output)
        if read[0].choice and read[0].system:
            folder, name = read[0].choice.folder.parent.name, read[0].system.system
            where = f"in a systems folder of benchmarks/{folder} it is --system {name} --round {read[0].system.round}"
            say(console(), escape(f"written: {output}; {where}"))
    if start:
        _run(read[0], data_folder)


def _read(opened: Source, file: str, nodes: int | None, gpus: int | None) -> Reproduction | NotUnderstood:
    try:
        return read_configuration(opened, file, nodes, gpus)
    except NoValueError as error:
        return {"configuration": configuration_name(file), "not_understood": str(error)}


def _standing(made: Reproduction) -> str:
    if made.equals and made.nearest:
        return f"is the system {made.nearest.system}, {made.nearest.round}"
    if made.refused:
        return made.refused
    if made.missing:
        return f"{count_of(len(made.missing), 'key')} without a value"
    if made.nearest is None:
        return "no system to compare with"
    return f"{count_of(len(made.differences), 'difference')} from {made.nearest.system}, {made.nearest.round}"


def _print_overview(
    screen: Console, opened: Source, every: Sequence[Reproduction | NotUnderstood], data: Path | None
) -> None:
    say(screen, f"[bold]{escape(opened.shown)}[/], round {opened.round or 'not known'}")
    alternatives = dict.fromkeys(tuple(_alternative(each, data)) for each in every if isinstance(each, Reproduction))
    for words in filter(None, alternatives):
        _print_command(screen, words, "a system of Encore to run instead")
    columns = ("configuration", "nodes x GPUs", "keys", "without", "unknown", "what it is here")
    rows: list[tuple[object, ...]] = [
        (each["configuration"], *[""] * 4, each["not_understood"])
        if isinstance(each, dict)
        else (
            each.name, _layout(each), len(each.mapped), len(each.known_left), len(each.unknown_left),
            _standing(each),
        )
        for each in every
    ]  # fmt: skip
    show(screen, "", columns, rows, least=("unknown", "without"))
    say(screen, "without: options and variables without a counterpart here; --config NAME says what each means")


def _layout(made: Reproduction) -> str:
    return f"{made.nodes} x {made.gpus if made.gpus_are_known else '?'}"


def _alternative(made: Reproduction, data: Path | None) -> list[str]:
    if made.alternative is None:
        return []
    choice, system = made.alternative
    return start_command(choice, system.system, system, data)


def _print_command(screen: Console, words: Sequence[str], label: str) -> None:
    say(screen, f"{label}:")
    screen.print(hints.command(*words), markup=False, highlight=False, soft_wrap=True)


# The command first, then everything that may make it wrong, then tables.
def _print(screen: Console, made: Reproduction, data: Path | None) -> None:
    say(screen, f"[bold]{escape(made.source.shown)}, configuration {escape(made.name)}[/]")
    title = made.implementation.title if made.implementation else made.benchmark or "not a benchmark of Encore"
    assumed = f" ({made.system.round} is assumed; --round sets it)" if made.system else ""
    say(screen, escape(f"{title}, round {made.source.round or f'not known{assumed}'}, {_layout(made)} GPUs"))
    if words := command(made, data):
        _print_command(screen, words, "command")
    _print_system(screen, made)
    if words := _alternative(made, data):
        _print_command(screen, words, "a system of Encore to run instead")
    for key, why in made.missing.items():
        say(screen, f"[yellow]no value[/] for {key}: {escape(why)}")
    for note in made.notes:
        say(screen, f"[yellow]not understood[/] {escape(note)}")
    then, now, why = _images(made)
    for title, image, reason in (("base image then: ", then, ""), ("base image now:  ", now, why)):
        if image:
            say(screen, escape(f"{title}{image}{f' ({reason})' if reason else ''}"))
    if made.mapped:
        _print_mapped(screen, made)
    if made.left:
        rows = (
            (
                each.name,
                each.value if len(each.value) <= 40 else f"{each.value[:37]}...",
                each.meaning or text("not known", "yellow"),
            )
            for each in made.left
        )
        show(screen, "no counterpart", ("option or variable", "value", "what that means"), rows)


def _print_mapped(screen: Console, made: Reproduction) -> None:
    values = made.system.config if made.system else {}
    rows = (
        (
            each.key,
            values.get(each.key, each.value),
            " ".join(dict.fromkeys(each.options)) or "none: the submitted code's",
            " ".join(sorted(each.sources)),
        )
        for each in sorted(made.mapped, key=lambda each: each.origin == "code")
    )
    show(screen, "what maps", ("key", "value", "option", "variables"), rows, least=("variables",))
    variables = [(name, value, file) for file, named in made.environment.items() for name, value in named.items()]
    if variables:
        show(screen, "environment of the ranks", ("variable", "value", "from"), variables)


def _images(made: Reproduction) -> tuple[str, str, str]:
    """Return the submitted base image, today's, and why it is another one."""
    if made.choice is None:
        return made.base, "", ""
    framework, benchmark = made.choice.implementation.framework, made.choice.benchmark.name
    now = images.find_release(framework)
    submitted = images.catalogue().submitted
    why = next((s.why for s in submitted if s.round == made.source.round and s.benchmark == benchmark), "")
    return made.base, now.reference, why


def _print_system(screen: Console, made: Reproduction) -> None:
    if made.refused:
        say(screen, f"[yellow]no command[/]: {escape(made.refused)}")
        return
    if made.equals and made.nearest:
        say(screen, f"[green]equals[/] the system {made.nearest.system} of {made.nearest.round}, key by key")
    else:
        say(screen, f"[yellow]{_standing(made)}[/]; the command sets each; -o FILE writes a system file")
        for each in made.differences:
            say(screen, escape(f"  {each.name}: {each.published!r} published, {each.ours!r} in the system"))
    if made.choice and made.system:
        for key, weights in made.choice.benchmark.submitted_weights(made.system.round).items():
            files = " and ".join((weights.file, *weights.also))
            say(screen, escape(f"{key}: {weights.title}: put {files} into the data folder"))
    if made.source.round and not made.is_checked and made.system and made.implementation:
        rules, checked = made.system.round, ", ".join(made.implementation.checked)
        parts = [f"trained, logged and checked by the rules of {rules}"] if rules != made.source.round else []
        parts += [f"the mapping was checked with {checked}"] if checked != rules or not parts else []
        say(screen, f"[yellow]{'; '.join(parts)}[/]: code of {made.source.round} may read an option differently")


def _as_json(made: Reproduction, data: Path | None) -> ReproductionJson:
    then, now, why = _images(made)
    choice = made.choice
    meanings = configuration.fields_with_meaning(choice.folder) if choice else {}
    return {
        "configuration": made.name,
        "folder": made.source.shown,
        "round": made.source.round,
        "benchmark": choice.name if choice else made.benchmark,
        "implementation": made.implementation.title if made.implementation else "",
        "checked": made.is_checked,
        "nodes": made.nodes,
        "gpus_per_node": made.gpus,
        "keys": {
            each.key: {
                "value": each.value, "options": each.options, "variables": sorted(each.sources),
                "origin": each.origin, "meaning": meanings.get(each.key, ""),
            }
            for each in made.mapped
        },
        "missing": made.missing,
        "environment": made.environment,
        "without_counterpart": made.left,
        "not_understood": made.notes,
        "base_image": then,
        "base_image_now": now,
        "why": why,
        "equals": made.nearest.system if made.equals and made.nearest else "",
        "nearest": made.nearest.system if made.nearest else "",
        "differences": made.differences,
        "refused": made.refused,
        "command": ["encore", *words] if (words := command(made, data)) else [],
        "alternative": ["encore", *words] if (words := _alternative(made, data)) else [],
    }  # fmt: skip


def _run(made: Reproduction, data: Path | None) -> None:
    words = command(made, data)
    if not words or made.missing:
        why = made.refused or "keys have no value: " + ", ".join(made.missing)
        raise EncoreError(f"{made.name} cannot be run here: {why}", expected="a configuration that maps")
    done = subprocess.run([sys.executable, "-m", "encore.cli.app", *words], check=False)
    if done.returncode:
        raise typer.Exit(done.returncode if done.returncode > 0 else ExitCode.FAILED)
