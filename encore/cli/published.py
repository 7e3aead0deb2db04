"""``encore published``: the published results looked up, as a list or as MLCommons' table."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import typer

from encore.cli import options
from encore.cli.layout import MIN_WORD, console, minutes_text, say, show, text, write_json
from encore.errors import EncoreError, unknown_name
from encore.results.published.published import PublishedResult, load_published, select
from encore.results.published.tables import parts_of_width, result_table, sections
from encore.results.rules import canonical
from encore.results.table import Table

_CSV_FIELDS = (
    "name", "round", "submitter", "system", "benchmark", "runs", "converged", "score_minutes",
    "fastest_minutes", "slowest_minutes", "cv", "global_batch", "last_eval_epochs", "last_quality",
    "samples_per_second", "init_seconds", "scaling_factor", "official_minutes", "division", "availability", "note",
)  # fmt: skip
_ORDERS: Mapping[str, Callable[[PublishedResult], Any]] = {
    "name": lambda result: (result.name.lower(), result.benchmark or ""),
    "minutes": lambda result: math.inf if result.official_minutes is None else result.official_minutes,
    "accelerators": lambda result: math.inf if (count := result.hardware.accelerators) is None else count,
}
_TEXTS = ("submitter", "system", "accelerator", "software")
_NAMES_WIDTH = 2 * (MIN_WORD + 2) + 1  # Submitter and system, shortened


def published(
    benchmark: Annotated[str | None, typer.Option(help="Such as resnet or maskrcnn.")] = None,
    round_: Annotated[str | None, typer.Option("--round", help="v0.5 to v6.0.")] = None,
    submitter: Annotated[str | None, typer.Option(help="Such as NVIDIA.")] = None,
    system: Annotated[str | None, typer.Option(help="Any part of the system's name, such as dgx1.")] = None,
    accelerator: Annotated[str | None, typer.Option(help="Any part of the accelerator's name, such as H100.")] = None,
    division: Annotated[Literal["closed", "open"] | None, typer.Option(help="Only this division.")] = None,
    sort: Annotated[
        Literal["name", "minutes", "accelerators"] | None,
        typer.Option(help="The list; default: by round and benchmark."),
    ] = None,
    as_table: Annotated[
        bool, typer.Option("--table", help="As MLCommons' table: a row per system, a column per benchmark.")
    ] = False,
    as_json: options.Json = False,
    as_csv: options.Csv = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="With --table: write Markdown.")] = False,
) -> None:
    """List the published MLPerf Training results that fit all the options given.

    Examples:

      encore published --benchmark resnet --round v0.7

      encore published --benchmark llama2_70b_lora --accelerator b200 --sort minutes

      encore published --system dgxa100 --csv > dgxa100.csv

      encore published --table --round v4.0
    """
    options.one_format(json=as_json, csv=as_csv, markdown=as_markdown)
    if as_markdown and not as_table:
        raise EncoreError("--markdown without --table", hint="add --table")
    wanted_round = options.known_round(round_)
    # Refuse a wrong name and offer the nearest right one: an empty list would look like an answer.
    benchmarks = {result.benchmark for result in load_published() if result.benchmark}
    submitters, rounds = ({getattr(result, key) for result in load_published()} for key in ("submitter", "round"))
    if benchmark is not None and canonical(benchmark) not in benchmarks:
        raise unknown_name("published benchmark", benchmark, benchmarks)
    if submitter is not None and submitter.lower() not in [name.lower() for name in submitters]:
        raise unknown_name("submitter", submitter, submitters)
    results = select(
        load_published(),
        benchmark=benchmark,
        round_=wanted_round,
        submitter=submitter,
        system=system,
        accelerator=accelerator,
        division=division,
    )
    if wanted_round is not None and wanted_round not in rounds:
        raise EncoreError(f"no published result of {wanted_round}", expected=", ".join(sorted(rounds)))
    if sort is not None:
        results.sort(key=_ORDERS[sort])
    if as_table:
        _write_table(result_table(results), as_json=as_json, as_csv=as_csv, as_markdown=as_markdown)
    elif as_json:
        write_json("published", [result.as_json() for result in results])
    elif as_csv:
        rows: Any = tuple(tuple(result.as_json()[name] for name in _CSV_FIELDS) for result in results)
        sys.stdout.write(Table(title="", columns=_CSV_FIELDS, rows=rows).as_csv())
    else:
        _print_published(results)


def _print_published(results: list[PublishedResult]) -> None:
    screen = console()
    minutes = ("raw minutes", "official") if any(result.scaling_factor for result in results) else ("minutes",)
    numbers = (*minutes, "runs", "batch")
    rows = (
        (
            entry.benchmark or "?",
            entry.name,
            *map(minutes_text, (entry.score_minutes, entry.official_minutes)[: len(minutes)]),
            entry.runs or "",
            entry.global_batch or "",
            " x ".join(str(part) for part in (entry.hardware.accelerators, entry.hardware.accelerator) if part),
        )
        for entry in results
    )
    columns = ("benchmark", "name", *numbers, "accelerators")
    show(screen, f"Published results: {len(results)}", columns, rows, numbers=numbers, least=("accelerators", "runs"))
    if len(minutes) > 1:
        say(screen, text("raw: from the logs; official: as MLCommons publishes it, held to the reference convergence"))
    for result in (entry for entry in results if entry.note):
        say(screen, text(f"{result.name} {result.benchmark}: {result.note}"))


def _write_table(table: Table, *, as_json: bool, as_csv: bool, as_markdown: bool) -> None:
    parts = sections(table)
    if as_csv:
        sys.stdout.write(table.as_csv())
    elif as_json:
        write_json("tables", parts)
    elif as_markdown:
        sys.stdout.write("\n\n".join(f"### {section.title}\n\n{section.as_markdown()}" for section in parts))
        sys.stdout.write(f"\n\n{table.note}\n")
    else:
        screen = console()
        # If there are too many benchmarks for the width, repeat the systems in several parts.
        for part in (part for section in parts for part in parts_of_width(section, screen.width, _NAMES_WIDTH)):
            numbers = [column for column in part.columns if column not in _TEXTS]
            least = ("software", "accelerator", "count")
            show(screen, part.title, part.columns, map(part.texts, part.rows), numbers=numbers, least=least)
        say(screen, text(table.note, "dim"))
