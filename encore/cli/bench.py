"""``encore bench``: how fast the step is, compared with a bare loop in the framework, in one run."""

from __future__ import annotations

from typing import Annotated

import typer

from encore.cli import options
from encore.cli.data import shown_progress
from encore.cli.layout import console, plain_table, print_fitted, write_json
from encore.run import benching

BENCH_EPILOG = """
Examples:

  encore bench resnet                                   what this machine's default system does

  encore bench resnet --set image_size=224 --set eval_resize=256 --set depth=50 --set batch_size=16
"""


def bench(
    benchmark: options.Benchmark,
    system: options.System = None,
    round_name: options.Round = None,
    data_folder: options.Data = None,
    steps: Annotated[int, typer.Option(help="Steps of each measurement.")] = 20,
    repeats: Annotated[int, typer.Option(help="Measurements of each kind; the median counts.")] = 5,
    settings: options.Settings = None,
    python: options.Python = None,
    as_json: options.Json = False,
) -> None:
    """Measure samples/s on one GPU or on all cores: bare loop, synthetic data, real data, input alone."""
    screen = console(stderr=as_json)
    with shown_progress(screen) as on_update:
        request = benching.Request(
            name=benchmark,
            system=system,
            round=round_name,
            data=data_folder,
            steps=steps,
            repeats=repeats,
            settings=tuple(settings or ()),
            python=python,
        )
        result = benching.measure(request, screen.print, on_update)
    if as_json:
        write_json(result)
        return
    speed = f"{result.get('unit', 'samples')}/s"
    table = plain_table(result["title"], "measured", f"{speed}, median", "least", "most", "of the bare loop")
    bare = result["measured"]["bare"]["median"]
    for name, entry in result["measured"].items():
        ratio = "" if name in ("bare", "input") else f"{entry['ratio']:.3f}"
        table.add_row(entry["title"], f"{entry['median']:.1f}", f"{entry['least']:.1f}", f"{entry['most']:.1f}", ratio)
    print_fitted(screen, table)
    screen.print(f"share of the time waiting for data: {result['input_share']:.1%}; bare loop {bare:.1f} {speed}")
