"""``encore bench``: how fast the step is, beside a bare loop in the framework, in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from encore.cli.data import shown_progress
from encore.cli.layout import plain_table
from encore.run import benching

EPILOG = """
Examples:

  encore bench resnet                                   what this machine's default system does

  encore bench resnet --set image_size=224 --set eval_resize=256 --set depth=50 --set batch_size=16
"""


def register(app: typer.Typer) -> None:
    """Adds ``bench`` to the command line."""
    app.command("bench", epilog=EPILOG)(bench)


def bench(
    benchmark: Annotated[str, typer.Argument(help="Benchmark, such as resnet.")],
    system: Annotated[str | None, typer.Option(help="Configuration to take.")] = None,
    round_name: Annotated[str | None, typer.Option("--round", help="MLPerf round.")] = None,
    data_folder: Annotated[
        Path | None, typer.Option("--data", help="Data set; default data/BENCHMARK.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each measurement.")] = 20,
    repeats: Annotated[int, typer.Option(help="Measurements of each kind; the median counts.")] = 5,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure samples/s on one GPU or on all cores: bare loop, synthetic data, real data, input alone."""
    console = Console(stderr=as_json)
    with shown_progress(console) as on_update:
        request = benching.Request(
            benchmark, system, round_name, data_folder, steps, repeats, tuple(settings or ())
        )
        result = benching.measure(request, lambda text: console.print(text, highlight=False), on_update)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    table = plain_table(result["title"], "measured", "samples/s, median", "least", "most", "of the bare loop")
    bare = result["measured"]["bare"]["median"]
    for name, entry in result["measured"].items():
        ratio = "" if name in ("bare", "input") else f"{entry['ratio']:.3f}"
        table.add_row(
            entry["title"], f"{entry['median']:.1f}", f"{entry['least']:.1f}", f"{entry['most']:.1f}", ratio
        )
    console.print(table)
    console.print(
        f"share of the time waiting for data: {result['input_share']:.1%}; bare loop {bare:.1f} samples/s",
        highlight=False,
    )
