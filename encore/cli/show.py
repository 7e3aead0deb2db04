"""``encore list`` and ``encore show``: benchmarks, systems and resolved configurations."""

import json
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from typing_extensions import TypedDict

from encore import catalogue, configuration
from encore.catalogue import Difference, Weights
from encore.cli import extensions, layout, options, schemas
from encore.cli.layout import console, text, write_json
from encore.configuration import Deviation, Value
from encore.containers import images
from encore.machine import node
from encore.results.format import with_names
from encore.run import planning

WIDE = 120


class ShownConfiguration(TypedDict):
    """A resolved configuration."""

    benchmark: str
    system: str
    round: str
    source: str  # Of the system's values
    nodes: int
    ranks: int
    submitted: bool  # Whether it is exactly a submitted configuration
    deviations: tuple[Deviation, ...]  # From the system file
    values: dict[str, Value]  # By key
    environment: dict[str, Value]  # Variables of the ranks
    weights: Mapping[str, Weights]  # Pretrained weights by configuration key
    not_as_submitted: list[Difference]  # Whatever is set


def list_(
    benchmark: Annotated[str | None, typer.Argument(help="List the systems of this benchmark.")] = None,
    studies: Annotated[bool, typer.Option("--studies", help="List the studies of encore study run.")] = False,
    as_json: options.Json = False,
) -> None:
    """List the benchmarks, the systems of one, or the studies.

    Examples:

      encore list

      encore list resnet --json
    """
    choices = catalogue.choices()
    if studies:
        extensions.load("list --studies")(as_json)
    elif benchmark is not None:
        _list_systems(catalogue.choose(benchmark), as_json)
    elif as_json:
        content = [
            {"name": name, "framework": choice.implementation.framework, **choice.benchmark.model_dump()}
            for name, choice in choices.items()
        ]
        write_json("benchmarks", content)
    else:
        rows = (
            (
                name,
                choice.benchmark.title,
                choice.implementation.framework,
                choice.benchmark.data_set,
                Text(
                    "\n".join(f"{r}  {with_names(entry.targets, 'g')}" for r, entry in choice.benchmark.rounds.items())
                ),
            )
            for name, choice in choices.items()
        )
        columns = ("name", "task", "framework", "data set", "target per round")
        layout.show(console(), "benchmarks", columns, rows, least=("task",))


def _list_systems(choice: catalogue.Choice, as_json: bool) -> None:
    systems = catalogue.systems(choice)
    if as_json:
        write_json("systems", systems)
        return
    # Keys with the default of the implementation may be missing in the file.
    rows = (
        (
            system.round,
            system.system,
            system.kind,
            f"{system.nodes} x {system.gpus_per_node}" if system.accelerator else "any",
            resolved.global_batch,
            resolved.get("optimizer"),
            resolved.get("epochs"),
        )
        for system, resolved in ((s, configuration.resolve(choice, s, s.nodes, s.gpus_per_node, [])) for s in systems)
    )
    columns = ("round", "system", "kind", "nodes x GPUs", "batch", "optimizer", "epochs")
    layout.show(console(), f"systems of {choice.name}", columns, rows, least=("kind", "optimizer"))
    console().print(
        "batch: samples per step over all GPUs; `encore show` prints the source of every value", style="dim"
    )


def show(
    benchmark: options.Benchmark,
    gpus: Annotated[int | None, typer.Argument(help="GPUs. Default: all GPUs of the system.")] = None,
    system: options.System = None,
    round_name: options.Round = None,
    settings: options.Settings = None,
    as_json: options.Json = False,
) -> None:
    """Print a resolved configuration and the source of its values.

    Examples:

      encore show resnet --system dgx1

      encore show resnet 4
    """
    choice = catalogue.choose(benchmark)
    machine = node.this_node()
    if gpus is not None:
        planning.check_gpus(gpus)
    chosen = planning.choose_system(choice, gpus or len(machine.gpus) or 1, machine, system, round_name)
    nodes, per_node = planning.spread(chosen, gpus or chosen.nodes * chosen.gpus_per_node)
    resolved = configuration.resolve(choice, chosen, nodes, per_node, list(settings or ()))
    if as_json:
        write_json(
            "configuration",
            ShownConfiguration(
                benchmark=choice.name,
                system=chosen.system,
                round=chosen.round,
                source=chosen.source,
                nodes=resolved.nodes,
                ranks=resolved.ranks,
                submitted=resolved.is_submitted,
                deviations=resolved.deviations,
                values=resolved.values,
                environment=resolved.environment,
                weights=resolved.needed_weights,
                not_as_submitted=images.differences(choice, chosen),
            ),
        )
    else:
        _print_configuration(console(), resolved)


def _print_configuration(screen: Console, resolved: configuration.Configuration) -> None:
    system = resolved.system
    screen.print(f"{resolved.choice.name}, system {system.system}, round {system.round}", style="bold")
    screen.print(f"source: {system.source}")
    screen.print(configuration.describe_scale(resolved))
    if resolved.is_submitted:
        screen.print("[green]a submitted configuration[/]")
    else:
        screen.print(f"[yellow]not a submitted configuration[/]: {resolved.why_not_submitted}")
    meanings = schemas.meanings(configuration.config_class(resolved.choice.folder))
    wide = screen.width >= WIDE
    rows = (
        [
            text(cell, "dim" if value.origin == "default" else "")
            for cell in (name, json.dumps(value.value), value.origin, *([meanings[name]] if wide else []))
        ]
        for name, value in resolved.values.items()
    )
    layout.show(screen, "", ("key", "value", "from", *(["meaning"] if wide else [])), rows)
    variables = [(name, variable.value, variable.origin) for name, variable in resolved.environment.items()]
    if variables:
        layout.show(screen, "environment of the ranks", ("variable", "value", "from"), variables)
    for name, weights in resolved.needed_weights.items():
        screen.print(f"{name}: {weights.title}, from {weights.source}")
    differences = images.differences(resolved.choice, system)
    if differences:
        parts = ((difference.what, difference.submitted, difference.here) for difference in differences)
        layout.show(screen, "not as submitted, whatever is set", ("what", "submitted", "here"), parts)
    if not wide:
        screen.print(f"a terminal of {WIDE} columns also shows the meaning of the keys", style="dim")
